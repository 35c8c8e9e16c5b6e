// The page: chooses a run, follows it, and draws what it is told, at most once a frame.
import { RUN_DASHES, drawCharts, drawKey, setUpCharts } from "./charts.js";
import { find, make, sentence, show, showText } from "./dom.js";
import { Followed } from "./follow.js";
import { setUpGrids, showLayers } from "./grids.js";
import { showPanels } from "./panels.js";
import { setUpSnapshots, showSnapshots } from "./snapshots.js";

const SECONDS_BETWEEN_LISTS = 20;
const asked = new URLSearchParams(location.search);
let run = null, isDue = false;
const others = new Map(); // followed runs by name, beside the one that is shown
const rows = new Map(); // of the list of runs, by name

/** The run that the page is about; for whoever looks into the page from outside. */
export const shownRun = () => run;

function draw() {
  if (isDue || document.hidden) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (!run) return;
    showPanels(run);
    drawCharts(run, [...others.values()]);
    showLayers(run);
    showSnapshots(run);
  });
}

function changed(followed) {
  if (followed !== run && followed.now?.is_over) followed.close(); // nothing more comes
  draw();
}

async function list() {
  clearTimeout(list.timer);
  let wait = SECONDS_BETWEEN_LISTS;
  try {
    const { runs, shown } = await (await fetch("/runs")).json();
    const name = asked.get("run") ?? shown;
    if (!run && runs.some((one) => one.name === name)) begin(name);
    if (!run) {
      showText("name", name ?? "No run yet");
      const words = name ? "there is no such run in this folder" : "`lapclip train` starts one; it then appears here";
      show("sentence", words, sentence);
      wait = 2;
    }
    listOthers(runs.filter((other) => other.name !== (run?.name ?? name)));
  } catch {
    if (!run) wait = 2;
  }
  list.timer = setTimeout(list, wait * 1000);
}

function begin(name) {
  run = new Followed(name, changed);
  for (const other of asked.getAll("with")) if (other !== name) compare(other, true);
}

function listOthers(runs) {
  find("runs-section").hidden = runs.length === 0;
  for (const { name, words } of runs) {
    if (!rows.has(name)) rows.set(name, addRow(name));
    rows.get(name).words.textContent = words;
  }
  for (const [name, row] of rows) {
    if (runs.some((other) => other.name === name)) continue;
    row.item.remove();
    rows.delete(name);
    compare(name, false);
  }
  mark();
}

function addRow(name) {
  const box = make("input", { type: "checkbox" }), words = make("span", { class: "quiet" });
  const key = make("canvas", { class: "key", width: 48, height: 12, "aria-hidden": "true" });
  const link = make("a", { href: `/?run=${encodeURIComponent(name)}`, "aria-label": `show ${name} by itself` }, "show");
  const item = make("li", {}, make("label", {}, box, key, name), words, link);
  box.addEventListener("change", () => { compare(name, box.checked); mark(); });
  find("runs").append(item);
  return { item, box, key, words };
}

function compare(name, isWanted) {
  if (!isWanted) {
    others.get(name)?.close();
    others.delete(name);
  } else if (!others.has(name) && others.size < RUN_DASHES.length) {
    const taken = [...others.values()].map((other) => other.number);
    const other = new Followed(name, changed);
    other.number = RUN_DASHES.findIndex((_, number) => !taken.includes(number));
    others.set(name, other);
  }
  draw();
}

/** Shows in the list and in the address which runs are compared. */
function mark() {
  for (const [name, { box, key }] of rows) {
    const other = others.get(name);
    box.checked = Boolean(other);
    box.disabled = !other && others.size >= RUN_DASHES.length;
    key.hidden = !other;
    key.width = key.width; // clears it
    if (other) drawKey(key, { ink: `run-${other.number + 1}`, dash: RUN_DASHES[other.number] });
  }
  const query = new URLSearchParams(asked.has("run") ? { run: asked.get("run") } : {});
  for (const name of others.keys()) query.append("with", name);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

setUpCharts(draw);
setUpGrids();
setUpSnapshots();
document.addEventListener("visibilitychange", () => {
  for (const followed of [run, ...others.values()]) followed?.open(); // or ends, when hidden
  if (document.hidden) return;
  list();
  draw();
});
document.addEventListener("themechange", mark);
list();
