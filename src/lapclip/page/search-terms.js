// The terms as chips before the field: a click turns + into - and back, x removes.
import { find, make } from "./dom.js";

const MINUS = "\u2212";
const uploads = new Map(); // dropped images by number, as long as the page lives
let nextUpload = Date.now(); // not those of before a reload, which the history may still name

/** Keeps a dropped image; its bytes now, since the file may change or go. Returns its term. */
export async function keepUpload(file) {
  const blob = new Blob([await file.arrayBuffer()], { type: file.type });
  uploads.set(nextUpload, { blob, name: file.name || "a pasted image", address: URL.createObjectURL(blob) });
  return { sign: 1, upload: nextUpload++ };
}

export const uploaded = (number) => uploads.get(number);

function nameOf(term) {
  return term.words ?? (term.upload ? uploads.get(term.upload).name : `image ${term.id}`);
}

function chip(term, { toggle, remove }) {
  const name = nameOf(term), isAdded = term.sign > 0;
  const mark = make("b", { "aria-hidden": "true" }, isAdded ? "+" : MINUS);
  const words = () => make("span", {}, name);
  const face = term.words
    ? words()
    : make("img", { src: term.upload ? uploads.get(term.upload).address : `/thumbnail/${term.id}`, alt: "", width: 34, height: 34 });
  face.addEventListener("error", () => face.replaceWith(words())); // a kind that the browser cannot show
  const change = isAdded ? "press to subtract it" : "press to add it";
  const sign = make("button", { type: "button", "aria-label": `${isAdded ? "with" : "without"} ${name}; ${change}`, title: name }, mark, face);
  if (term.upload) { // the server adds the image it is sent
    sign.disabled = true;
    sign.setAttribute("aria-label", `with ${name}`);
  }
  const away = make("button", { type: "button", class: "remove", "aria-label": `remove ${name}` }, "\u00d7");
  sign.addEventListener("click", () => toggle(term));
  away.addEventListener("click", () => remove(term));
  return make("li", { class: "term", "data-sign": isAdded ? "+" : "-" }, sign, away);
}

let shown = "";

/** Draws the chips, and the sign of the words being typed where there is something to add them to. */
export function showTerms(state, actions) {
  const key = JSON.stringify(state.terms);
  if (key !== shown) {
    const buttons = [...find("terms").querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
    find("terms").replaceChildren(...state.terms.map((term) => chip(term, actions)));
    if (at >= 0) (find("terms").querySelectorAll("button")[at] ?? find("words")).focus();
    shown = key;
  }
  const sign = find("sign"), isAdded = state.sign > 0;
  sign.hidden = isAdded && !state.terms.length;
  sign.textContent = isAdded ? "+" : MINUS;
  sign.dataset.sign = isAdded ? "+" : "-";
  sign.setAttribute("aria-label", isAdded ? "the text is added; press to subtract it" : "the text is subtracted; press to add it");
}
