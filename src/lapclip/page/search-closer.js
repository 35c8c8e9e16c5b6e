// One image, large, with what is known about it, and which of some labels it is.
import { find, make, show, showText } from "./dom.js";
import { ask } from "./search-api.js";
import { copiesInWords, score } from "./search-grid.js";

const PAUSE = 250; // milliseconds after typing a label
const MAX_LABELS = 100;
let shown = null, order = [], asking = null, timer = 0;

export const shownImage = () => shown?.id ?? 0;

/** Opens at this result, or changes to it; `results` are what the arrows go through. */
export function openCloser(result, results) {
  const dialog = find("closer"), isNew = shown?.id !== result.id;
  [shown, order] = [result, results];
  const at = results.indexOf(result);
  find("previous").disabled = at <= 0;
  find("next").disabled = at >= results.length - 1;
  if (!dialog.open) dialog.showModal();
  if (!dialog.contains(document.activeElement) || document.activeElement.disabled) dialog.focus(); // or keys would be lost
  showText("closer-place", `${at + 1} of ${results.length}`);
  if (!isNew) return;
  const image = find("closer-image");
  find("closer-gone").hidden = true;
  image.hidden = false;
  image.alt = result.name;
  image.removeAttribute("src"); // or the one before would stay until this one is there
  image.style.backgroundImage = `url("/thumbnail/${result.id}")`;
  image.src = `/picture/${result.id}`;
  showText("closer-name", result.name);
  showText("closer-path", result.path);
  const facts = [["Score", score(result.score)], ["Size", `${result.width} \u00d7 ${result.height}`], ["Modified", new Date(1000 * result.modified).toLocaleDateString()]];
  show("closer-facts", facts, () => facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const copies = find("closer-copies");
  copies.hidden = !result.copies.length;
  copies.querySelector("summary").textContent = `${copiesInWords(result.copies.length)} with equal bytes`;
  copies.querySelector("ul").replaceChildren(...result.copies.map((path) => make("li", {}, path)));
  showText("copy", "Copy path");
  find("closer").querySelector(".side").scrollTop = 0;
  if (results[at + 1]) new Image().src = `/picture/${results[at + 1].id}`; // there when it is asked for
  classify();
}

export function closeCloser() {
  asking?.abort();
  shown = null;
  if (find("closer").open) find("closer").close();
}

async function classify() {
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  const labels = [...new Set(find("labels").value.split(",").map((label) => label.trim()).filter(Boolean))].slice(0, MAX_LABELS);
  if (labels.length < 2) {
    show("shares", [], () => []);
    return showText("labels-note", labels.length ? "Add another label: at least two are needed." : "Enter labels, separated by commas, to get their probabilities.");
  }
  const query = new URLSearchParams([["id", shown.id], ...labels.map((label) => ["label", label])]);
  try {
    const { results } = await ask(`/classify?${query}`, { signal });
    if (signal.aborted) return;
    show("shares", results, () => results.map(share));
    showText("labels-note", "");
  } catch (problem) {
    if (signal.aborted) return;
    show("shares", [], () => []);
    showText("labels-note", problem.message);
  }
}

function share({ label, probability }) {
  const bar = make("i");
  bar.style.width = `${100 * probability}%`;
  return make("li", {}, make("span", {}, label), make("span", { class: "number" }, `${(100 * probability).toFixed(1)}%`), make("div", { class: "track" }, bar));
}

async function copyPath() {
  const range = document.createRange();
  range.selectNodeContents(find("closer-path"));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(shown.path);
  } catch { // only a page of this machine, or by https, may write there
    isCopied = document.execCommand("copy");
  }
  showText("copy", isCopied ? "Copied" : "Selected");
}

/** `actions`: step to another image, close, similar, add, subtract. */
export function setUpCloser(actions) {
  const dialog = find("closer"), image = find("closer-image");
  const step = (by) => {
    const other = order[order.indexOf(shown) + by];
    if (!other) return;
    openCloser(other, order); // at once, so that a second key goes on from here
    actions.step(other.id);
  };
  find("previous").addEventListener("click", () => step(-1));
  find("next").addEventListener("click", () => step(1));
  find("close").addEventListener("click", () => actions.close());
  dialog.addEventListener("cancel", (event) => { event.preventDefault(); actions.close(); });
  dialog.addEventListener("close", () => { if (shown) actions.close(); }); // a second Escape asks nobody
  dialog.addEventListener("click", (event) => { if (event.target === dialog) actions.close(); }); // beside it
  find("copy").addEventListener("click", copyPath);
  find("similar").addEventListener("click", () => actions.similar(shown.id));
  find("add").addEventListener("click", () => actions.add(shown.id, 1));
  find("subtract").addEventListener("click", () => actions.add(shown.id, -1));
  find("labels").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => shown && classify(), PAUSE); });
  image.addEventListener("load", () => { image.style.backgroundImage = ""; });
  image.addEventListener("error", () => { image.hidden = true; find("closer-gone").hidden = false; });
  dialog.addEventListener("keydown", (event) => {
    if (event.target.localName === "input" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "ArrowRight") step(1);
    else return;
    event.preventDefault();
  });
}
