// Before anything is asked: how many pictures there are, and a few questions to begin with.
import { find, make, sentence, show, showText } from "./dom.js";
import { ask } from "./search-api.js";

const EXAMPLES = ["a dog running", "people at the sea", "children playing", "something red", "snow", "at night"];
const NUM_PICTURES = 4;
let drawn = false;

export const counted = (number) => number.toLocaleString("en");

export const pictures = (number) => (number === 1 ? "1 picture" : `${counted(number)} pictures`);

/** `health` is what the server says of itself; `choose` asks one of the examples. */
export function showWelcome(health, choose) {
  const isEmpty = health.num_pictures === 0;
  showText("welcome-title", isEmpty ? "No picture is indexed yet" : `Search ${pictures(health.num_pictures)}`);
  const words = isEmpty
    ? "Type `lapclip index FOLDER` in a terminal, with a folder of pictures. They are shown here as soon as they are there."
    : "Type what is on the picture, or drop, paste or choose one to find others like it. `beach - people` is a beach without people.";
  show("welcome-words", words, sentence);
  find("examples").hidden = isEmpty;
  if (isEmpty || drawn) return;
  drawn = true;
  for (const words of EXAMPLES) find("examples").append(example(words, choose));
}

function example(words, choose) {
  const strip = make("span", { class: "strip", "aria-hidden": "true" });
  const button = make("button", { type: "button" }, strip, make("span", { class: "words" }, words));
  button.addEventListener("click", () => choose(words));
  ask(`/search?${new URLSearchParams({ q: words, top: NUM_PICTURES })}`).then(
    ({ results }) => strip.append(...results.map(({ id }) => make("img", { src: `/thumbnail/${id}`, alt: "", loading: "lazy" }))),
    () => strip.remove(), // the words alone do
  );
  return make("li", {}, button);
}
