// Two tables of numbers as colours: gradients by layer over time, and similarities of captions and images.
import { colour, find, make, show, showText, table } from "./dom.js";

const LABELS = 92; // pixels for the names of the layers
const RAMP = ["ramp-1", "ramp-2", "ramp-3", "ramp-4"];

function ramp() {
  const stops = RAMP.map((name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number));
  return (share) => {
    const at = Math.max(0, Math.min(1, share)) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    return `rgb(${stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i))).join(",")})`;
  };
}

/** A canvas of cells that the pointer and the arrow keys point at. */
class Grid {
  constructor(id, pointed, labels = 0) {
    this.canvas = find(id);
    this.labels = labels;
    this.cell = null;
    this.values = [];
    const point = (row, column) => {
      const rows = this.values.length, columns = this.values[0]?.length ?? 0;
      if (!rows || !columns) return;
      this.cell = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
      this.paint();
      pointed(...this.cell);
    };
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect(), left = event.clientX - box.left - this.labels;
      const rows = this.values.length, columns = this.values[0]?.length ?? 0;
      point(Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor((left / (box.width - this.labels)) * columns));
    });
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      point((this.cell?.[0] ?? 0) + move[0], (this.cell?.[1] ?? 0) + move[1]);
    });
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    document.addEventListener("themechange", () => this.paint());
  }

  /** `values` in 0..1 by row and column; null is left blank. */
  show(values, names = []) {
    Object.assign(this, { values, names });
    this.canvas.hidden = false;
    this.paint();
  }

  paint() {
    const rows = this.values.length, columns = this.values[0]?.length ?? 0;
    const { clientWidth, clientHeight } = this.canvas, sharp = devicePixelRatio || 1;
    if (!rows || !clientWidth) return;
    this.canvas.width = clientWidth * sharp;
    this.canvas.height = clientHeight * sharp;
    const context = this.canvas.getContext("2d"), toColour = ramp();
    context.scale(sharp, sharp);
    const width = (clientWidth - this.labels) / columns, height = clientHeight / rows;
    const box = (row, column) => [this.labels + column * width, row * height, width, height];
    this.values.forEach((line, row) => line.forEach((value, column) => {
      if (value === null) return;
      context.fillStyle = toColour(value);
      const [x, y, w, h] = box(row, column);
      context.fillRect(x, y, w + 0.5, h + (this.labels ? -1 : 0.5));
    }));
    context.fillStyle = colour("ink");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.names.forEach((name, row) => context.fillText(name, 0, (row + 0.5) * height, this.labels - 8));
    if (this.cell) {
      context.strokeStyle = colour("focus");
      context.lineWidth = 2;
      context.strokeRect(...box(...this.cell));
    }
  }
}

let layers, matrix, heat, snapshot, pictures;

export function setUpGrids() {
  layers = new Grid("layers", sayLayer, LABELS);
  matrix = new Grid("matrix", sayPair);
}

export function showLayers({ inspections }) {
  const isKnown = heat?.norms === inspections.norms && heat?.count === inspections.norms?.length;
  if (!inspections.norms?.length || isKnown) return;
  const names = Object.keys(inspections.norms.at(-1));
  const logs = names.map((name) => inspections.norms.map((norms) => (norms[name] > 0 ? Math.log10(norms[name]) : null)));
  const found = logs.flat().filter((log) => log !== null);
  const low = found.reduce((a, b) => Math.min(a, b), Infinity), high = found.reduce((a, b) => Math.max(a, b), -Infinity);
  heat = { names, steps: inspections.step, norms: inspections.norms, count: inspections.norms.length };
  layers.canvas.style.height = `${names.length * 17}px`;
  layers.show(logs.map((line) => line.map((log) => (log === null ? null : (log - low) / (high - low || 1)))), names);
  const last = heat.norms.at(-1), sorted = [...names].sort((a, b) => last[b] - last[a]);
  const words = `Steps ${heat.steps[0].toLocaleString("en")} to ${heat.steps.at(-1).toLocaleString("en")}, left to right. `
    + `Now largest in ${sorted[0]} (${norm(last[sorted[0]])}), smallest in ${sorted.at(-1)} (${norm(last[sorted.at(-1)])}).`;
  find("layers-words").textContent = words;
  layers.canvas.setAttribute("aria-label", `norm of the gradients by layer over time. ${words}`);
  const legend = find("layers-legend");
  legend.hidden = find("layers-details").hidden = false;
  legend.firstElementChild.textContent = norm(10 ** low);
  legend.lastElementChild.textContent = norm(10 ** high);
  const chosen = [0, Math.floor((heat.count - 1) / 2), heat.count - 1];
  find("layers-table").replaceChildren(table("gradient norm", ["layer", ...chosen.map((i) => `step ${heat.steps[i]}`)],
    names.map((name) => [name, ...chosen.map((i) => norm(heat.norms[i][name]))])));
}

const norm = (value) => (value == null ? "none" : value.toPrecision(2));

function sayLayer(row, column) {
  const name = heat.names[row];
  showText("layers-cell", `${name} at step ${heat.steps[column].toLocaleString("en")}: ${norm(heat.norms[column][name])}`);
}

/** The similarities of one snapshot; `address` makes the address of an image from its path. */
export function showMatrix(told, address) {
  if (!told?.cosine?.length) return;
  [snapshot, pictures] = [told, told.pictures.map(address)];
  const all = told.cosine.flat(), low = Math.min(...all), high = Math.max(...all);
  matrix.show(told.cosine.map((line) => line.map((value) => (value - low) / (high - low || 1))));
  const nearest = told.cosine.map((line) => line.indexOf(Math.max(...line)));
  const right = nearest.filter((column, row) => column === row).length;
  const own = told.cosine.reduce((sum, line, row) => sum + line[row], 0) / told.cosine.length;
  const rest = (all.reduce((a, b) => a + b, 0) - own * told.cosine.length) / Math.max(1, all.length - told.cosine.length);
  const words = `Rows are captions, columns are images; pairs are on the diagonal. ${right} of ${told.captions.length} captions `
    + `are nearest to their own image. Mean cosine ${own.toFixed(2)} with their own image, ${rest.toFixed(2)} with others.`;
  find("matrix-words").textContent = words;
  matrix.canvas.setAttribute("aria-label", `cosine of captions and images. ${words}`);
  find("matrix-details").hidden = false;
  find("matrix-table").replaceChildren(table("nearest image of each caption", ["caption", "own", "nearest", "which"],
    told.captions.map((caption, row) => [caption, told.cosine[row][row].toFixed(2), told.cosine[row][nearest[row]].toFixed(2),
      nearest[row] === row ? "its own" : `of "${told.captions[nearest[row]]}"`])));
  if (matrix.cell) sayPair(...matrix.cell);
}

function sayPair(row, column) {
  const cosine = snapshot.cosine[row][column].toFixed(3), own = snapshot.captions[row], other = snapshot.captions[column];
  show("matrix-cell", [cosine, own, other, pictures[column], row === column], () => [
    make("img", { src: pictures[column], alt: `image of "${other}"`, width: 72, height: 72 }),
    make("p", {}, make("b", {}, `cosine ${cosine}`), row === column ? " of a pair" : " of two that are not a pair"),
    make("p", {}, make("span", { class: "quiet" }, "caption "), own),
    make("p", {}, make("span", { class: "quiet" }, "image of "), other)]);
}
