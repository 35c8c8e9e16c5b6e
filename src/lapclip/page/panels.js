// The words and bars around the curves. Every sentence comes from the server.
import { find, make, sentence, show, showText } from "./dom.js";

export function showPanels({ now, isLost }) {
  showText("connection", isLost ? "connection lost, trying again" : "");
  if (!now) return;
  document.title = `${now.progress_words} ${now.name} · lapclip`;
  showText("name", now.name);
  showText("state", now.state_words);
  find("state").dataset.state = now.state;
  show("sentence", now.sentence, sentence);
  showText("facts", now.facts);
  find("progress").value = now.progress ?? 0;
  showText("percent", now.progress_words);
  show("figures", now.figures, (figures) => figures.map(({ name, value, note }) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value), make("dd", { class: "quiet" }, note || "\u00a0"))));
  find("warnings-section").hidden = now.warnings.length === 0;
  show("warnings", now.warnings, (warnings) => warnings.map(({ message, hint, when }) =>
    make("li", {}, make("strong", {}, ...sentence(message)), make("span", {}, ...sentence(hint)), make("small", { class: "quiet" }, when))));
  showText("inspected", now.inspected);
  for (const id of ["parts", "memory", "cores"]) show(id, now[id], drawBars);
  show("readings", now.readings, (rows) => rows.flatMap(([name, words]) =>
    [make("dt", {}, name), make("dd", {}, words)]));
}

function drawBars(bars) {
  if (!bars.length) return ["not measured"];
  return [make("ul", { class: "bars" }, ...bars.map(({ name, share, words }) => {
    const row = make("li", {}, make("span", {}, name), make("span", { class: "number" }, words));
    if (share !== null) {
      const fill = make("i");
      fill.style.width = `${Math.min(1, share) * 100}%`;
      row.append(make("span", { class: "track", "aria-hidden": "true" }, fill));
    }
    return row;
  }))];
}
