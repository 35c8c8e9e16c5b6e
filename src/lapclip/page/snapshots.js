// What the model found for the fixed captions at each evaluation; follows the newest until another is chosen.
import { find, make, showText } from "./dom.js";
import { showMatrix } from "./grids.js";

const MOST_READ = 40;
let read = new Map(); // by address: looking back and forth asks once
let told = null; // the evaluations these belong to
let run = "", files = [], chosen = 0, isFollowing = true, shownAddress = "";

export function setUpSnapshots() {
  find("snapshot").addEventListener("input", (event) => choose(Number(event.target.value)));
  find("earlier").addEventListener("click", () => choose(chosen - 1));
  find("later").addEventListener("click", () => choose(chosen + 1));
}

export function showSnapshots({ name, evaluations }) {
  run = name;
  // All sent again: a run that was resumed writes the same names again.
  if (evaluations !== told) [told, read, shownAddress] = [evaluations, new Map(), ""];
  const before = files[chosen]?.step;
  files = (evaluations.snapshot ?? []).map((file, i) => ({ file, step: evaluations.step[i] })).filter(({ file }) => file);
  find("snapshot-controls").hidden = files.length === 0;
  if (files.length) choose(isFollowing ? files.length - 1 : files.findLastIndex(({ step }) => step <= before));
}

function choose(wanted) {
  chosen = Math.max(0, Math.min(files.length - 1, wanted));
  isFollowing = chosen === files.length - 1;
  const slider = find("snapshot"), step = `step ${files[chosen].step.toLocaleString("en")}`;
  const words = isFollowing ? `${step}, the newest` : `${step}, ${chosen + 1} of ${files.length}`;
  slider.max = files.length - 1;
  slider.value = chosen;
  slider.setAttribute("aria-valuetext", words);
  showText("snapshot-step", words);
  find("earlier").disabled = chosen === 0;
  find("later").disabled = isFollowing;
  const address = addressOf(files[chosen].file);
  if (address !== shownAddress) load(address);
}

const addressOf = (file) => `/snapshots/${encodeURIComponent(run)}/${file.replace(/^snapshots\//, "")}`;

async function load(address) {
  const kept = read;
  const isShown = () => shownAddress === address && read === kept;
  shownAddress = address;
  try {
    const snapshot = kept.get(address) ?? (await ask(address));
    if (snapshot) kept.set(address, snapshot);
    if (kept.size > MOST_READ) kept.delete(kept.keys().next().value);
    if (isShown()) draw(snapshot);
  } catch {
    if (!isShown()) return;
    shownAddress = ""; // the next news ask again
    find("thinks-note").textContent = "This evaluation is not loaded yet: no connection.";
  }
}

/** A snapshot; null when it is gone or no JSON. Fails only without a connection. */
async function ask(address) {
  const answer = await fetch(address), text = await answer.text();
  try {
    return answer.ok ? JSON.parse(text) : null;
  } catch {
    return null;
  }
}

function draw(snapshot) {
  try {
    const { queries, matrix } = snapshot;
    const items = queries.map(drawQuery), first = queries.filter(({ rank }) => rank === 1).length;
    showMatrix(matrix, addressOf);
    find("queries").replaceChildren(...items);
    find("thinks-note").textContent = `The six nearest images for each caption, best first; `
      + `${first} of ${queries.length} have the correct image first.`;
  } catch { // whatever the file says, the rest of the page goes on
    find("thinks-note").textContent = "This evaluation cannot be read: for long runs, only some are kept.";
  }
}

const drawQuery = ({ text, rank, found }) => make("li", {},
  make("p", { class: "question" }, make("q", {}, text), make("span", { class: "rank" }, inWords(rank))),
  make("ol", { class: "found" }, ...found.map(drawFound)));

function drawFound({ picture, score, is_right: isRight }, i) {
  const alt = `${isRight ? "the correct image" : "another image"}, rank ${i + 1}`;
  return make("li", isRight ? { class: "right" } : {},
    make("img", { src: addressOf(picture), alt, width: 96, height: 96 }),
    make("span", {}, score.toFixed(2)), ...(isRight ? [make("b", {}, "✓ correct")] : []));
}

const inWords = (rank) => (rank === 1 ? "✓ found first" : `correct one at rank ${rank.toLocaleString("en")}`);
