// Curves: a card for each metric, a line for each run, or for the mean of runs that differ by their seed alone.
"use strict";

const GROUPS = [...new Set(RUNS.map((run) => run.group))].map((number) => ({ number, runs: RUNS.filter((run) => run.group === number) }));
const TIME = (key) => key.startsWith("time/") || key.startsWith("perf/");
const METRICS = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))];
const TITLES = { ...DATA.titles, "time/step": "seconds a step", "perf/peak_memory_gb": "peak memory (GB)", "perf/tokens_per_second": "tokens a second" };
const MAIN = Object.keys(DATA.titles).filter((key) => METRICS.includes(key));
const cards = []; // {key, box, plot}, those that were scrolled to have a plot

/** Return the points [x, y] of a run's metric, without those that are missing or, with logarithms, not positive. */
function points(run, key) {
  const minutes = run.metrics["time/from_scratch"] || [];
  return run.metrics[key]
    .map((y, i) => [state.x === "step" ? run.steps[i] : run.steps[i] === 0 ? 0 : (minutes[i] ?? NaN) / 60, y])
    .filter(([x, y]) => y !== null && Number.isFinite(x) && (state.y === "linear" || y > 0));
}

/** Return the exponential moving average of points, unbiased at the start. */
function smoothed(list, weight) {
  let sum = 0;
  let total = 0;
  return list.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

/** Return the value at x on the straight lines between points; null before the first and after the last. */
function interpolate(list, x) {
  if (!list.length || x < list[0][0] || x > last(list)[0]) return null;
  let low = 0;
  let high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle][0] <= x) low = middle;
    else high = middle;
  }
  const [[x0, y0], [x1, y1]] = [list[low], list[high]];
  return x1 === x0 ? y0 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

/** Return the lines of a card: {label, number, points, raw, low, high}; low and high bound the band of seeds. */
function lines(key) {
  const found = [];
  const weight = Number(state.smooth);
  for (const { number, runs } of GROUPS) {
    if (state.off.includes(number)) continue;
    const drawn = runs.filter((run) => run.metrics[key]).map((run) => ({ run, list: points(run, key) })).filter(({ list }) => list.length);
    if (!drawn.length) continue;
    const smooth = drawn.map(({ list }) => (weight ? smoothed(list, weight) : list));
    if (drawn.length === 1 || state.seeds === "each") {
      drawn.forEach(({ run, list }, i) => found.push({ label: run.name, number, points: smooth[i], raw: weight ? list : null }));
      continue;
    }
    let xs = [...new Set(smooth.flatMap((list) => list.map(([x]) => x)))].sort((a, b) => a - b);
    if (state.x === "minute") xs = Array.from({ length: 200 }, (_, i) => xs[0] + ((last(xs) - xs[0]) * i) / 199);
    const line = { label: runs[0].group_name, number, points: [], low: [], high: [] };
    for (const x of xs) {
      const values = smooth.map((list) => interpolate(list, x)).filter((y) => y !== null);
      if (!values.length) continue;
      const middle = mean(values);
      const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, y) => sum + (y - middle) ** 2, 0) / (values.length - 1)) : 0;
      line.points.push([x, middle]);
      line.low.push([x, state.seeds === "std" ? middle - spread : Math.min(...values)]);
      line.high.push([x, state.seeds === "std" ? middle + spread : Math.max(...values)]);
    }
    found.push(line);
  }
  return found;
}

/** Return a color with an opacity, whichever way the style sheet writes it. */
const faint = (value, opacity) => value + Math.round(opacity * 255).toString(16).padStart(2, "0");

function draw(card) {
  card.plot?.destroy();
  card.place.replaceChildren();
  const all = lines(card.key);
  const xs = [...new Set(all.flatMap((line) => [...line.points, ...(line.raw || [])].map(([x]) => x)))].sort((a, b) => a - b);
  const index = new Map(xs.map((x, i) => [x, i]));
  const column = (list) => {
    const values = Array(xs.length).fill(undefined); // undefined: no point here; the line goes on
    for (const [x, y] of list) values[index.get(x)] = y;
    return values;
  };
  const series = [{}];
  const data = [xs];
  const bands = [];
  const add = (list, options) => series.push({ spanGaps: true, points: { show: false }, ...options }) && data.push(column(list));
  for (const line of all) {
    const ink = color(line.number);
    if (line.raw) add(line.raw, { stroke: faint(ink, 0.22), width: 1 });
    if (line.high) {
      add(line.high, { stroke: faint(ink, 0), width: 0 });
      add(line.low, { stroke: faint(ink, 0), width: 0 });
      bands.push({ series: [series.length - 2, series.length - 1], fill: faint(ink, 0.16) });
    }
    const few = line.points.length < 25;
    add(line.points, { stroke: ink, width: 1.8, label: line.label, points: { show: few, size: 5, fill: ink, stroke: ink } });
  }
  const axis = { stroke: css("--muted"), font: `11px ${css("--sans")}`, grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false } };
  const numbers = (_, values) => values.map((x) => (x === null ? "" : shown(x)));
  card.plot = new uPlot(
    {
      width: card.place.clientWidth || 300, height: 196, series, bands, padding: [8, 8, 0, 0], legend: { show: false },
      scales: { x: { time: false }, y: { distr: state.y === "log" ? 3 : 1 } },
      axes: [{ ...axis, size: 28, values: numbers }, { ...axis, size: 48, values: numbers }],
      cursor: { sync: { key: "x" }, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => readOut(card, plot, all)] },
    },
    data, card.place);
  card.readout.replaceChildren(...summary(all));
}

/** Return the last value of each line. */
const summary = (all) => (all.length ? ["last  ", ...all.flatMap((line) => values(line, last(line.points)[1]))] : []);
const values = (line, y) => [" ", dot(line.number), shown(y), " "];

/** Write the values under the pointer, or the last ones when it is elsewhere. */
function readOut(card, plot, all) {
  if (plot.cursor.idx === null || plot.cursor.idx === undefined) {
    card.readout.replaceChildren(...summary(all));
    return;
  }
  const x = plot.data[0][plot.cursor.idx];
  const parts = all.map((line) => ({ line, y: interpolate(line.points, x) })).filter(({ y }) => y !== null);
  const at = state.x === "step" ? `step ${shown(x)}` : `${shown(x)} min`;
  card.readout.replaceChildren(`${at}  `, ...parts.flatMap(({ line, y }) => values(line, y)));
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = cards.find(({ box }) => box === entry.target);
    if (entry.isIntersecting && card && !card.plot) draw(card);
  }
}, { rootMargin: "300px" });

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const card = cards.find(({ place }) => place === entry.target);
    if (card?.plot && entry.contentRect.width && Math.abs(card.plot.width - entry.contentRect.width) > 1) card.plot.setSize({ width: entry.contentRect.width, height: 196 });
  }
});

function makeCard(key) {
  const place = element("div", { class: "plot" });
  const readout = element("div", { class: "readout" });
  const title = TITLES[key] || key;
  const box = element("div", { class: "card", "data-metric": key }, element("header", {}, element("h3", {}, title), title === key ? null : element("code", {}, key)), readout, place);
  const card = { key, box, place, readout, plot: null };
  cards.push(card);
  seen.observe(box);
  resized.observe(place);
  return box;
}

/** Draw the cards anew, those in sight now and the others once they are scrolled to. */
function redraw() {
  for (const card of cards) {
    const near = card.box.getBoundingClientRect();
    const visible = near.height && near.bottom > -300 && near.top < innerHeight + 300;
    if (visible && card.box.isConnected) draw(card);
    else if (card.plot) {
      card.plot.destroy();
      card.plot = null;
      card.place.replaceChildren();
      seen.unobserve(card.box);
      seen.observe(card.box); // it reports the first sight again
    }
  }
}

function showCards() {
  cards.splice(0).forEach((card) => (card.plot?.destroy(), seen.unobserve(card.box), resized.unobserve(card.place)));
  const query = state.metric.toLowerCase();
  const other = METRICS.filter((key) => !MAIN.includes(key) && !TIME(key));
  const parts = [];
  if (query) {
    const found = METRICS.filter((key) => `${key} ${TITLES[key] || ""}`.toLowerCase().includes(query));
    parts.push(found.length ? element("div", { class: "grid" }, found.map(makeCard)) : element("p", { class: "empty" }, "no metric of this name"));
  } else {
    parts.push(element("div", { class: "grid" }, MAIN.map(makeCard)));
    if (other.length) parts.push(element("details", {}, element("summary", {}, `${other.length} more metrics`), element("div", { class: "grid" }, other.sort().map(makeCard))));
  }
  $("charts").replaceChildren(...parts);
  const timed = METRICS.filter((key) => TIME(key) && key !== "time/from_scratch" && RUNS.some((run) => known(run.metrics[key]).length));
  const first = ["time/step", "perf/peak_memory_gb", "perf/tokens_per_second"].filter((key) => timed.includes(key));
  const rest = timed.filter((key) => !first.includes(key));
  $("time-charts").replaceChildren(
    element("div", { class: "grid" }, first.map(makeCard)),
    rest.length ? element("details", {}, element("summary", {}, `${rest.length} more`), element("div", { class: "grid" }, rest.map(makeCard))) : "");
}

function showCurves() {
  radios("x-axis", "x", redraw);
  radios("y-axis", "y", redraw);
  radios("seeds", "seeds", redraw);
  $("seeds").hidden = GROUPS.every(({ runs }) => runs.length === 1);
  const slider = $("smooth");
  const label = slider.nextElementSibling;
  slider.value = label.textContent = state.smooth;
  slider.addEventListener("input", () => {
    remember({ smooth: slider.value });
    label.textContent = slider.value;
    redraw();
  });
  $("metric-search").value = state.metric;
  $("metric-search").addEventListener("input", () => {
    remember({ metric: $("metric-search").value });
    showCards();
  });
  if (GROUPS.length > 1 || RUNS.length > 1)
    $("legend").append(...GROUPS.map(({ number, runs }) => {
      const name = runs.length > 1 ? `${runs[0].group_name} (${runs.length} seeds)` : runs[0].name;
      const item = element("li", { class: state.off.includes(number) ? "off" : null, title: "show or hide" }, dot(number), name);
      item.addEventListener("click", () => {
        remember({ off: state.off.includes(number) ? state.off.filter((x) => x !== number) : [...state.off, number] });
        item.classList.toggle("off");
        redraw();
      });
      return item;
    }));
  showCards();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
