// Draws the charts of a report again, to be looked into: values under the pointer, drag to zoom, double click to go back.
(function () {
  "use strict";
  const charts = JSON.parse(document.querySelector('script[type="application/json"]').textContent);
  const figures = document.querySelectorAll("figure.chart");
  const HEIGHT = 210;
  const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  let plots = [];

  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;

  function colour(name) {
    probe.style.color = "var(--" + name + ")";
    return getComputedStyle(probe).color;
  }

  function shown(value, isShare, more = 0) {
    if (value == null) return "";
    if (isShare) return (100 * value).toFixed((value !== 0 && Math.abs(value) < 0.0005 ? 3 : 1) + more) + "%";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(1 + more);
    return size >= 100 && !more ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4 + more)));
  }

  function across(value) {
    return value >= 1e5 ? COMPACT.format(value) : shown(value);
  }

  // The labels of an axis, with as many digits as tell them apart.
  function labels(ticks, isShare) {
    for (let more = 0; ; more++) {
      const said = ticks.map((tick) => shown(tick, isShare, more).replace(/\.0+%/, "%"));
      if (more === 4 || new Set(said.filter(Boolean)).size === said.filter(Boolean).length) return said;
    }
  }

  // One axis for all lines: where a line has no value of its own, it is not drawn to nothing but goes on.
  function joined(lines) {
    return uPlot.join(lines.map((line) => [line.x, line.y]));
  }

  // Between two points of a line, the value of the nearer one.
  function nearest(values, at) {
    for (let away = 0; away < values.length; away++) {
      if (values[at - away] != null) return values[at - away];
      if (values[at + away] != null) return values[at + away];
    }
    return null;
  }

  function drawPhases(plot, chart) {
    const { ctx, bbox } = plot;
    const right = bbox.left + bbox.width;
    const inside = (x) => Math.min(right, Math.max(bbox.left, plot.valToPos(x, "x", true)));
    ctx.save();
    ctx.font = 10.5 * devicePixelRatio + "px system-ui, sans-serif";
    ctx.textAlign = "center";
    for (const [start, end, label] of chart.bands) {
      const from = inside(start), to = inside(end);
      if (label !== "learning") {
        ctx.fillStyle = colour(label === "warm-up" ? "warm" : "whole");
        ctx.fillRect(from, bbox.top, to - from, bbox.height);
      }
      if (ctx.measureText(label).width < to - from - 4) {
        ctx.fillStyle = colour("soft");
        ctx.fillText(label, (from + to) / 2, bbox.top - 5 * devicePixelRatio);
      }
    }
    ctx.strokeStyle = ctx.fillStyle = colour("soft");
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    let free = bbox.left; // up to where labels stand already
    for (const [at, label] of chart.marks) {
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > right) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (x > right - 3 * devicePixelRatio) continue; // the end needs no label
      const width = ctx.measureText(label).width + 8 * devicePixelRatio;
      const from = x + width > right ? x - width : x;
      if (from < free) continue;
      free = from + width;
      ctx.textAlign = "left";
      ctx.fillText(label, from + 4 * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
    }
    ctx.restore();
  }

  // Beside each name the value under the pointer, or else the last one.
  function sayLast(plot) {
    if (plot.cursor.idx == null) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  }

  function seriesOf(line, chart) {
    const stroke = colour("c" + line.colour);
    return {
      label: line.label,
      stroke: line.look === "faint" ? stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.28)") : stroke,
      width: line.look === "faint" ? 1 : line.look === "level" ? 1.3 : 2,
      dash: line.dash,
      spanGaps: true,
      points: { show: line.has_dots, size: 6, fill: stroke },
      value: (plot, value, series, at) => shown(nearest(plot.data[series], at), chart.is_share),
    };
  }

  function draw(chart, figure) {
    const place = figure.querySelector(".plot");
    const axis = {
      stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false },
      font: "11.5px system-ui, sans-serif", labelFont: "11.5px system-ui, sans-serif",
    };
    const y = chart.is_log_y ? { distr: 3 } : { range: (plot, low, high) => {
      if (low == null) return [0, 1];
      const room = 0.06 * (high - low || Math.abs(high) || 1);
      return [chart.from_zero ? Math.min(0, low) : low - room, high + room];
    } };
    const logX = chart.log_x && { distr: 3, log: chart.log_x, range: (plot, low, high) => uPlot.rangeLog(low, high, chart.log_x, true) };
    figure.classList.add("live");
    const data = joined(chart.lines);
    const first = data[0][0], last = data[0][data[0].length - 1];
    const isWhole = (low, high) => first === last || (low === first && high === last); // a single point is given room
    const plot = new uPlot({
      width: place.clientWidth,
      height: HEIGHT,
      padding: [18, 18, 0, 0],
      cursor: { sync: { key: "run" }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (plot, low, high) => (isWhole(low, high) ? chart.span : [low, high]), ...logX }, y },
      axes: [
        { ...axis, label: chart.axis, labelSize: 18, size: 26, values: (plot, ticks) => ticks.map(across) },
        { ...axis, size: 52, values: (plot, ticks) => labels(ticks, chart.is_share) },
      ],
      series: [
        { label: chart.axis, value: (plot, x, series, at) => across(plot.data[0][at]) },
        ...chart.lines.map((line) => seriesOf(line, chart)),
      ],
      legend: { markers: { show: false } },
      hooks: { drawClear: [(plot) => drawPhases(plot, chart)], setCursor: [sayLast], ready: [sayLast] },
    }, data, place);
    // A piece of the line itself beside its name: colour alone does not tell it from others to everyone.
    const names = place.querySelectorAll(".u-series th");
    figure.querySelectorAll(".keys .key").forEach((key, number) => names[number + 1].prepend(key.cloneNode(true)));
    plots.push([plot, place]);
  }

  function drawAll() {
    for (const [plot] of plots) plot.destroy();
    plots = [];
    charts.forEach((chart, number) => draw(chart, figures[number]));
  }

  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", () => {
    for (const [plot, place] of plots) plot.setSize({ width: place.clientWidth, height: HEIGHT });
  });
})();
