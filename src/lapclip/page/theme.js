// Dark or light: as the system says, until somebody chooses. Loaded before the page is drawn, so that it does not flash.
"use strict";

const kept = (() => {
  try { return localStorage.getItem("lapclip-theme"); } catch { return null; }
})();
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `change to ${isDark() ? "light" : "dark"} colours`);
    document.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("lapclip-theme", document.documentElement.dataset.theme); } catch { /* private window */ }
    say();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
  say();
});
