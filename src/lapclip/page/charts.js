// The curves: what each chart shows, drawn by uPlot, with one window on the steps for all of them.
import { colour, find, make, table } from "./dom.js";

// Each takes a number of further digits.
const plain = (value, more = 0) => value.toFixed((Math.abs(value) < 1 ? 3 : 2) + more);
const whole = (value, more = 0) => Number(value.toFixed(more)).toLocaleString("en");
const share = (value, more = 0) => `${(value * 100).toFixed((value > 0 && value < 0.1 ? 1 : 0) + more)}%`;
const tiny = (value, more = 0) => String(Number(value.toPrecision(2 + more)));
/** The labels of an axis, with as many digits as tell them apart. */
const labels = (splits, say, more = 0) => {
  const said = splits.map((value) => (value == null ? "" : say(value, more))), known = said.filter(Boolean);
  return more === 4 || new Set(known).size === known.length ? said : labels(splits, say, more + 1);
};

const steps = (column, label, more) => ({ from: "steps", column, label, ...more });
const looks = (column, label, more) => ({ from: "evaluations", column, label, hasPoints: true, ...more });
const CHARTS = [
  { title: "Loss", say: plain, lines: [steps("loss", "training", { isNoisy: true }), looks("loss", "validation")] },
  { title: "In-batch accuracy", say: share, fromZero: true, against: ["accuracy", "chance"],
    lines: [steps("accuracy", "training", { isNoisy: true })] },
  { title: "Pairs/s", say: whole, fromZero: true, against: ["pairs_per_second", "bench"],
    lines: [steps("pairs_per_second", "training", { isNoisy: true })] },
  { title: "Recall@1", say: share, fromZero: true, against: ["recall_1", "chance"],
    lines: [looks("there_1", "text → image"), looks("back_1", "image → text"), looks("general_1", "general")] },
  { title: "Recall@10", say: share, fromZero: true, against: ["recall_10", "chance"],
    lines: [looks("there_10", "text → image"), looks("back_10", "image → text"), looks("general_10", "general")] },
  { title: "Negatives by difficulty", say: share, fromZero: true, against: ["negatives", "chance"], isOwn: true,
    lines: [looks("easy", "easy"), looks("medium", "medium"), looks("hard", "hard")] },
  { title: "Temperature (tau)", say: tiny, isOwn: true, lines: [steps("temperature", "tau")] },
  { title: "Learning rate", say: tiny, isOwn: true, fromZero: true, lines: [steps("lr", "lr")] },
  { title: "Gradient norm", say: tiny, isOwn: true, isLog: true,
    lines: [steps("grad_norm", "all layers", { isNoisy: true })] },
];
const DASHES = [[], [7, 4], [2, 3]]; // of a run's own lines
export const RUN_DASHES = [[10, 4], [3, 3], [12, 3, 3, 3], [5, 7]]; // of the runs beside it
const AGAINST = [1, 4];
const HEIGHT = 190;

let view = { last: 1 }; // the share of the steps at the end, or { from, to }
let redraw = () => {};
const charts = [];

export function setUpCharts(changed) {
  redraw = changed;
  for (const definition of CHARTS) charts.push(new Chart(definition));
  find("charts").append(...charts.map((chart) => chart.figure));
  find("range").addEventListener("change", (event) => look({ last: Number(event.target.value) }));
  document.addEventListener("themechange", () => { charts.forEach((chart) => { chart.key = ""; }); redraw(); });
  new ResizeObserver(() => redraw()).observe(find("charts"));
}

export function drawCharts(run, others) {
  const last = Math.max(1, ...[run, ...others].map(({ steps, evaluations }) =>
    Math.max(steps.step.at(-1) ?? 0, evaluations.step.at(-1) ?? 0)));
  const range = view.last ? [last * (1 - view.last), last] : [view.from, view.to];
  for (const chart of charts) chart.draw(run, others, range);
}

function look(wanted) {
  view = wanted;
  find("range").value = wanted.last ? String(wanted.last) : "";
  redraw();
}

class Chart {
  constructor(definition) {
    Object.assign(this, definition);
    this.key = "";
    this.legend = make("ul", { class: "legend" });
    this.at = make("span", { class: "quiet" });
    this.plot = make("div", { class: "plot", role: "img" });
    this.rows = make("div", { class: "scroll" });
    this.details = make("details", {}, make("summary", {}, "As a table"), this.rows);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.figure = make("figure", {},
      make("figcaption", {}, make("h3", {}, this.title), this.at), this.legend, this.plot, this.details);
  }

  /** The lines to draw, each with its own steps: the run's, a reference to compare with, other runs'. */
  linesOf(run, others) {
    const found = [];
    this.lines.forEach(({ from, column, label, isNoisy, hasPoints }, i) => {
      const xs = run[from].step, ys = clean(run[from][column] ?? [], this.isLog);
      const line = { xs, ys, label, hasPoints, ink: `line-${i + 1}`, dash: DASHES[i], width: 2 };
      if (isNoisy) found.push({ ...line, label: "", ink: "line-faint", width: 1 }, { ...line, ys: smooth(ys) });
      else found.push(line);
    });
    others.forEach((other, i) => {
      if (this.isOwn) return;
      const { from, column, isNoisy, hasPoints } = this.lines[0];
      const ys = clean(other[from][column] ?? [], this.isLog);
      const dash = RUN_DASHES[other.number], ink = `run-${other.number + 1}`;
      found.push({ xs: other[from].step, ys: isNoisy ? smooth(ys) : ys, label: other.name, hasPoints, ink, dash, width: 2 });
    });
    const value = this.against && run.now?.lines[this.against[0]];
    const xs = [...new Set([0, ...found.flatMap((line) => line.xs.slice(-1))])].sort((a, b) => a - b);
    if (value != null) {
      found.push({ xs, ys: xs.map(() => value), label: this.against[1], ink: "line-against", dash: AGAINST, width: 2 });
    }
    return found.filter((line) => line.ys.some((y) => y != null));
  }

  draw(run, others, [min, max]) {
    this.drawn = this.linesOf(run, others);
    const key = JSON.stringify(this.drawn.map(({ label, ink, hasPoints }) => [label, ink, hasPoints]));
    const data = this.drawn.length ? uPlot.join(this.drawn.map(({ xs, ys }) => [xs, ys])) : [[]];
    const size = { width: Math.max(200, this.plot.clientWidth), height: HEIGHT };
    if (key !== this.key) this.rebuild(size);
    else if (this.u.width !== size.width) this.u.setSize(size);
    this.key = key;
    this.u.batch(() => {
      this.u.setData(data, false);
      this.u.setScale("x", { min, max });
    });
    this.sayValues();
    this.plot.setAttribute("aria-label", this.summary());
    if (this.details.open) this.fillTable();
  }

  rebuild(size) {
    this.u?.destroy();
    const axis = { stroke: colour("quiet"), font: "11px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: colour("grid"), width: 1 } };
    const range = this.fromZero ? (u, min, max) => [0, (max || 1) * 1.08] : undefined;
    this.u = new uPlot({
      ...size,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      scales: { x: { time: false, auto: false }, y: this.isLog ? { distr: 3 } : { range } },
      axes: [
        { ...axis, size: 28, values: (u, splits) => splits.map((step) => (Number.isInteger(step) ? whole(step) : "")) },
        { ...axis, size: 52, values: (u, splits) => labels(splits, this.say) },
      ],
      series: [{}, ...this.drawn.map(({ ink, dash, width, hasPoints }) => ({
        stroke: colour(ink), dash, width, spanGaps: true,
        points: { show: Boolean(hasPoints), size: 5, fill: colour(ink) },
      }))],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: "steps", scales: ["x", null], filters: { pub: (type) => /move|leave/.test(type) } },
        bind: { dblclick: () => () => look({ last: 1 }) },
        points: { size: 6 },
        y: false,
      },
      hooks: { setCursor: [() => this.sayValues()], setSelect: [(u) => this.zoom(u)] },
    }, [[]], this.plot);
    this.legend.replaceChildren();
    for (const line of this.drawn) {
      if (!line.label) continue;
      line.value = make("b");
      const key = make("canvas", { class: "key", width: 48, height: 12, "aria-hidden": "true" });
      drawKey(key, line);
      this.legend.append(make("li", {}, key, `${line.label} `, line.value));
    }
    this.values = this.drawn.map((line) => line.value);
  }

  zoom(u) {
    if (u.select.width < 4) return;
    const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    look({ from, to });
  }

  /** Beside each line's name its value under the cursor, or else its last. */
  sayValues() {
    if (!this.values) return;
    const [xs, ...lines] = this.u.data, idx = this.u.cursor.idx;
    const at = idx ?? xs.length - 1;
    this.at.textContent = idx == null ? "" : `step ${whole(xs[idx])}`;
    this.values.forEach((element, i) => {
      if (element) element.textContent = this.words(lastBefore(lines[i], at));
    });
  }

  words(value) { return value == null ? "" : this.say(value); }

  summary() {
    const parts = this.drawn.filter((line) => line.label).map(({ label, xs, ys }) => {
      const first = ys.findIndex((y) => y != null);
      return `${label} ${this.words(ys[first])} at step ${whole(xs[first])}, ${this.words(lastBefore(ys, ys.length - 1))} at step ${whole(xs.at(-1))}`;
    });
    return `${this.title}: ${parts.join("; ") || "nothing yet"}`;
  }

  fillTable() {
    const [xs, ...lines] = this.u?.data ?? [[]];
    const named = this.drawn?.map((line, i) => [line.label, lines[i]]).filter(([label]) => label) ?? [];
    const count = Math.min(12, xs.length);
    const chosen = [...Array(count).keys()].map((i) => Math.round((i * (xs.length - 1)) / Math.max(1, count - 1)));
    this.rows.replaceChildren(table(this.title, ["step", ...named.map(([label]) => label)],
      chosen.map((i) => [whole(xs[i]), ...named.map(([, ys]) => this.words(lastBefore(ys, i)))])));
  }
}

const clean = (ys, isLog) => (isLog ? ys.map((y) => (y > 0 ? y : null)) : ys);

/** A mean over ten neighbours, at the end over the last ten, as in the figures above; the raw line is faint behind. */
function smooth(ys) {
  return ys.map((y, i) => {
    if (y == null) return null;
    const near = ys.slice(Math.max(0, Math.min(i - 5, ys.length - 10)), i + 6).filter((other) => other != null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

function lastBefore(ys, at) {
  for (let i = at; i >= 0; i -= 1) if (ys[i] != null) return ys[i];
  return null;
}

export function drawKey(canvas, { ink, dash, hasPoints }) {
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.strokeStyle = context.fillStyle = colour(ink);
  context.lineWidth = 2;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(0, 3);
  context.lineTo(24, 3);
  context.stroke();
  if (hasPoints) { context.beginPath(); context.arc(12, 3, 2.5, 0, 7); context.fill(); }
}
