// Before anything is asked: how many images there are, and a few questions to begin with.
import { find, make, sentence, show, showText } from "./dom.js";
import { ask } from "./search-api.js";

const EXAMPLES = ["a dog running", "people at the sea", "children playing", "something red", "snow", "at night"];
const NUM_IMAGES = 4;
let drawn = false;

export const counted = (number) => number.toLocaleString("en");

export const images = (number) => (number === 1 ? "1 image" : `${counted(number)} images`);

/** `health` is what the server says of itself; `choose` asks one of the examples. */
export function showWelcome(health, choose) {
  const isEmpty = health.num_pictures === 0;
  showText("welcome-title", isEmpty ? "No image is indexed yet" : `Search ${images(health.num_pictures)}`);
  const words = isEmpty
    ? "Type `lapclip index FOLDER` in a terminal, with a folder of images. They appear here when they are indexed."
    : "Type what is in the image, or drop, paste or choose one to find others like it. `beach - people` finds beaches without people.";
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
  ask(`/search?${new URLSearchParams({ q: words, top: NUM_IMAGES })}`).then(
    ({ results }) => strip.append(...results.map(({ id }) => make("img", { src: `/thumbnail/${id}`, alt: "", loading: "lazy" }))),
    () => strip.remove(), // the words alone do
  );
  return make("li", {}, button);
}
