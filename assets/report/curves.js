// Curves: a card for each metric, a line for each run, or the mean of runs that differ by their seed alone in a band.
const METRICS = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))];
const GROUPS = [...new Set(RUNS.map((run) => run.group))].map((number) => RUNS.filter((run) => run.group === number));

/** Return the points of a run's metric as a map, smoothed by an exponential moving average without bias. */
function points(run, key, weight, log) {
  const values = new Map();
  let [sum, total] = [0, 0];
  (run.metrics[key] || []).forEach((y, i) => {
    if (y === null || (log && y <= 0)) return;
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    values.set(run.steps[i], sum / total);
  });
  return values;
}

/** Return the lines of a card: {number, seeds, values: Map of step to [mean, lowest, highest, text] over the seeds}. */
function lines(key) {
  return GROUPS.filter(([run]) => $(`show-${run.group}`)?.checked ?? true).map((runs) => {
    const curves = runs.map((run) => points(run, key, Number($("smooth").value), $("log").checked));
    const values = new Map();
    for (const step of [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((a, b) => a - b)) {
      const seeds = curves.map((curve) => curve.get(step)).filter((y) => y !== undefined);
      const variance = (mean(seeds.map((y) => (y - mean(seeds)) ** 2)) * seeds.length) / (seeds.length - 1);
      const spread = seeds.length > 1 ? ` ± ${format(Math.sqrt(variance))}` : "";
      values.set(step, [mean(seeds), Math.min(...seeds), Math.max(...seeds), format(mean(seeds)) + spread]);
    }
    return { number: runs[0].group, seeds: runs.length, values };
  }).filter((line) => line.values.size);
}

/** Return a card, which `draw` fills once it has a place in the page. */
const makeCard = (key) =>
  element("div", { className: "card", key }, element("h3", { title: key }, DATA.titles[key] || key), div("readout"), div("plot"));

/** Draw a card anew, at its width now, unless it is folded away. */
function draw(card) {
  const [, readout, place] = card.children;
  card.plot?.destroy();
  if (card.closest("details:not([open])")) return;
  const all = lines(card.key);
  const steps = [...new Set(all.flatMap((line) => [...line.values.keys()]))].sort((a, b) => a - b);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [series, data, bands] = [[{}], [steps], []];
  for (const { number, seeds, values } of all) {
    const ink = color(`--c${number % 8}`);
    const add = (part, options) => {
      series.push({ spanGaps: true, points: { show: false }, ...options });
      data.push(steps.map((step) => values.get(step)?.[part]));
    };
    if (seeds > 1) {
      add(2, { width: 0 });
      add(1, { width: 0 });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${ink}2a` });
    }
    add(0, { stroke: ink, width: 1.8, points: { show: values.size < 25, size: 5, fill: ink } });
  }
  const numbers = (_, values) => values.map((x) => (x === null ? "" : format(x)));
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line") }, ticks: { show: false }, values: numbers };
  const show = (step) => {
    const at = (line) => (step === null ? [...line.values.values()].at(-1) : line.values.get(step));
    const parts = all.filter(at).flatMap((line) => [dot(line.number), at(line)[3]]);
    readout.replaceChildren(step === null ? "last" : `step ${step}`, ...parts);
  };
  const options = {
    width: place.clientWidth, height: 196, padding: [8, 20, 0, 0], series, bands, legend: { show: false },
    scales: { x: { time: false }, y: $("log").checked ? { distr: 3 } : card.key.includes("accuracy") ? { range: [0, 1] } : {} },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 48 }],
    cursor: { y: false, sync: { key: "step" }, drag: { x: true, y: false } },
    hooks: { setCursor: [(plot) => show(steps[plot.cursor.idx] ?? null)] },
  };
  card.plot = new uPlot(options, data, place);
  show(null);
}

const redraw = () => document.querySelectorAll("#curves .card").forEach(draw);

function showCards() {
  const query = $("metric-search").value.toLowerCase();
  const matches = METRICS.filter((key) => `${key} ${DATA.titles[key] || ""}`.toLowerCase().includes(query));
  const main = query ? matches : Object.keys(DATA.titles).filter((key) => METRICS.includes(key));
  const more = matches.filter((key) => !main.includes(key)).sort();
  $("charts").replaceChildren(...main.map(makeCard));
  $("more").firstElementChild.textContent = `${more.length} more metrics`;
  $("more").lastElementChild.replaceChildren(...more.map(makeCard));
  redraw();
}
