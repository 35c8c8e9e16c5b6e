// The images found, in rows. An image that is found again keeps its place in memory, so that typing does not flicker.
import { find, make } from "./dom.js";

const FLATTEST = 2.6, TALLEST = 0.56; // shapes beyond are cut at their edges, here only
const MAX_TRIES = 4; // to load a thumbnail
const tiles = new Map(); // by id
let results = [];

export const score = (value) => value.toFixed(3).replace("-", "\u2212");

/** A small image that is tried some times before it counts as gone, and `again` by whoever knows better. */
function thumbnail(id, gone) {
  const image = make("img", { alt: "", loading: "lazy", decoding: "async", draggable: "false" });
  let tries = 0;
  const load = () => { tries += 1; image.src = `/thumbnail/${id}`; };
  image.addEventListener("load", () => { gone.hidden = true; });
  image.addEventListener("error", () => {
    if (tries < MAX_TRIES) setTimeout(load, 700 * tries);
    else gone.hidden = false;
  });
  load();
  return { image, again: () => { tries = 0; load(); } };
}

function makeTile(result, actions) {
  const gone = make("span", { class: "gone" }, "cannot be shown");
  gone.hidden = true;
  const { image, again } = thumbnail(result.id, gone);
  const open = make("button", { type: "button", class: "open", tabindex: "-1" }, image, gone);
  const number = make("span", { class: "score" });
  const similar = make("button", { type: "button", tabindex: "-1", "aria-hidden": "true" }, "Similar");
  const over = make("div", { class: "over" }, number, make("span", { class: "name" }, result.name), similar);
  const copies = make("span", { class: "copies" });
  const item = make("li", { class: "tile", "data-id": result.id }, open, over, copies);
  const ratio = result.width > 0 && result.height > 0 ? result.width / result.height : 1;
  item.style.setProperty("--ratio", Math.min(FLATTEST, Math.max(TALLEST, ratio)).toFixed(4));
  open.addEventListener("click", () => actions.open(result.id));
  similar.addEventListener("click", () => actions.similar(result.id));
  return { item, open, number, copies, gone, again };
}

export function copiesInWords(count) {
  return count === 1 ? "1 copy" : `${count} copies`;
}

/** Shows these results and no others. */
export function showResults(found, actions) {
  const held = focusedImage();
  results = found;
  const kept = new Set(found.map((result) => result.id));
  for (const id of tiles.keys()) if (!kept.has(id)) tiles.delete(id);
  for (const result of found) {
    if (!tiles.has(result.id)) tiles.set(result.id, makeTile(result, actions));
    const { open, number, copies } = tiles.get(result.id);
    const more = result.copies.length ? `, ${copiesInWords(result.copies.length)}` : "";
    open.setAttribute("aria-label", `${result.name}, score ${result.score.toFixed(3)}${more}`);
    number.textContent = score(result.score);
    copies.textContent = result.copies.length ? `+${copiesInWords(result.copies.length)}` : "";
    copies.hidden = !result.copies.length;
  }
  const items = found.map((result) => tiles.get(result.id).item), grid = find("grid");
  const isSame = items.length === grid.children.length && items.every((item, i) => item === grid.children[i]);
  if (!isSame) grid.replaceChildren(...items);
  const current = kept.has(held) ? held : found[0]?.id;
  for (const [id, { open }] of tiles) open.tabIndex = id === current ? 0 : -1;
  if (held && !isSame) focusImage(held);
}

/** Gives the keyboard to an image, or to the first if it is not there; the others are then reached by arrows. */
export function focusImage(id) {
  const tile = tiles.get(id) ?? tiles.get(results[0]?.id);
  if (!tile) {
    find("words").focus();
    return;
  }
  for (const { open } of tiles.values()) open.tabIndex = -1;
  const { open, item } = tile;
  open.tabIndex = 0;
  open.focus({ preventScroll: true });
  item.scrollIntoView({ block: "nearest" });
}

export const focusedImage = () => Number(document.activeElement?.closest?.(".tile")?.dataset.id) || 0;

/** The image in that direction: the next in order, or the nearest of the row above or below. 0 is beyond the edge. */
function neighbour(id, key) {
  const at = results.findIndex((result) => result.id === id);
  if (key === "Home") return results[0].id;
  if (key === "End") return results.at(-1).id;
  if (key === "ArrowLeft") return results[at - 1]?.id ?? id;
  if (key === "ArrowRight") return results[at + 1]?.id ?? id;
  const middle = ({ left, width }) => left + width / 2;
  const from = tiles.get(id).item.getBoundingClientRect(), isDown = key === "ArrowDown";
  let best = 0, bestTop = 0, bestOff = Infinity;
  for (const { id: other } of isDown ? results.slice(at + 1) : results.slice(0, at).reverse()) {
    const box = tiles.get(other).item.getBoundingClientRect();
    if (Math.abs(box.top - from.top) < 4) continue;
    if (best && Math.abs(box.top - bestTop) > 4) break; // a row further
    const off = Math.abs(middle(box) - middle(from));
    if (off < bestOff) [best, bestTop, bestOff] = [other, box.top, off];
  }
  return best || (isDown ? results.at(-1).id : 0);
}

/** Moves by the arrows, Home and End; up from the first row leads back to the field. */
export function setUpGrid() {
  find("grid").addEventListener("keydown", (event) => {
    const isMove = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key);
    const id = focusedImage();
    if (!isMove || !id || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = neighbour(id, event.key);
    if (next) focusImage(next);
    else find("words").focus();
  });
  document.addEventListener("connected", () => { for (const { gone, again } of tiles.values()) if (!gone.hidden) again(); });
}
