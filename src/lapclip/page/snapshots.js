// What the model found for the fixed questions, at one evaluation after another; follows the newest until told otherwise.
import { find, make, showText } from "./dom.js";
import { showMatrix } from "./grids.js";

const read = new Map(); // by address: looking back and forth asks once
const MOST_READ = 40;
let run = "", files = [], chosen = 0, isFollowing = true, shownAddress = "";

export function setUpSnapshots() {
  find("snapshot").addEventListener("input", (event) => choose(Number(event.target.value)));
  find("earlier").addEventListener("click", () => choose(chosen - 1));
  find("later").addEventListener("click", () => choose(chosen + 1));
}

export function showSnapshots({ name, evaluations }) {
  run = name;
  files = (evaluations.snapshot ?? []).map((file, i) => ({ file, step: evaluations.step[i] })).filter(({ file }) => file);
  if (files.length) choose(isFollowing ? files.length - 1 : Math.min(chosen, files.length - 1));
}

function choose(wanted) {
  chosen = Math.max(0, Math.min(files.length - 1, wanted));
  isFollowing = chosen === files.length - 1;
  const slider = find("snapshot"), step = `step ${files[chosen].step.toLocaleString("en")}`;
  const words = isFollowing ? `${step}, the newest` : `${step}, ${chosen + 1} of ${files.length}`;
  find("snapshot-controls").hidden = false;
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
  shownAddress = address;
  try {
    if (!read.has(address)) {
      const answer = await fetch(address);
      if (!answer.ok) throw new Error((await answer.json()).error);
      read.set(address, await answer.json());
      if (read.size > MOST_READ) read.delete(read.keys().next().value);
    }
    if (shownAddress === address) draw(read.get(address));
  } catch (problem) {
    if (shownAddress !== address) return;
    if (problem instanceof TypeError) shownAddress = ""; // no connection: the next news ask again
    find("thinks-note").textContent = "This one cannot be read: of a long run only some are kept.";
  }
}

function draw({ queries, matrix }) {
  const first = queries.filter(({ rank }) => rank === 1).length;
  find("thinks-note").textContent = `The six nearest pictures for each question, best first; `
    + `${first} of ${queries.length} find the right one first.`;
  find("queries").replaceChildren(...queries.map(({ text, rank, found }) => make("li", {},
    make("p", { class: "question" }, make("q", {}, text), make("span", { class: "rank" }, inWords(rank))),
    make("ol", { class: "found" }, ...found.map(drawFound)))));
  showMatrix(matrix, addressOf);
}

function drawFound({ picture, score, is_right: isRight }, i) {
  const alt = `${isRight ? "the right picture" : "another picture"}, place ${i + 1}`;
  return make("li", isRight ? { class: "right" } : {},
    make("img", { src: addressOf(picture), alt, width: 96, height: 96 }),
    make("span", {}, score.toFixed(2)), ...(isRight ? [make("b", {}, "✓ right")] : []));
}

const inWords = (rank) => (rank === 1 ? "✓ found first" : `right one at place ${rank.toLocaleString("en")}`);
