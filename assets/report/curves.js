// Curves: a card for each metric, a line for each run, or the mean of runs that differ by their seed alone in a band.
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

/** Return the lines of a card: {number, values: Map of step to [mean, lowest, highest, text] over the seeds}. */
function lines(key) {
  return GROUPS.filter(([run]) => $(`show-${run.group}`)?.checked ?? true).map((runs) => {
    const curves = runs.map((run) => points(run, key, Number($("smooth").value), $("log").checked));
    const values = new Map();
    for (const step of [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((a, b) => a - b)) {
      const seeds = curves.map((curve) => curve.get(step)).filter((y) => y !== undefined);
      const spread = seeds.length > 1 ? ` ± ${format(deviation(seeds))}` : "";
      values.set(step, [mean(seeds), Math.min(...seeds), Math.max(...seeds), format(mean(seeds)) + spread]);
    }
    return { number: runs[0].group, values };
  }).filter((line) => line.values.size);
}

/** Draw a card anew, at its width now, if it can be seen. */
function draw(card) {
  const [{ title: key }, readout, place] = card.children;
  card.plot?.destroy();
  if (!card.checkVisibility()) return;
  const all = lines(key);
  const steps = [...new Set(all.flatMap((line) => [...line.values.keys()]))].sort((a, b) => a - b);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [series, data, bands] = [[{}], [steps], []];
  for (const { number, values } of all) {
    const ink = color(`--c${number % 8}`);
    const bound = { spanGaps: true, width: 0, points: { show: false } }; // of the band; with one seed both lie on the line
    bands.push({ series: [series.length, series.length + 1], fill: `${ink}2a` });
    series.push(bound, bound, { spanGaps: true, stroke: ink, width: 1.8, points: { show: values.size < 25, size: 5, fill: ink } });
    data.push(...[2, 1, 0].map((part) => steps.map((step) => values.get(step)?.[part])));
  }
  const values = (_, numbers) => numbers.map((x) => (x === null ? "" : format(x)));
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line") }, ticks: { show: false }, values };
  const show = (step) => {
    const at = (line) => (step === null ? [...line.values.values()].at(-1) : line.values.get(step));
    const parts = all.filter(at).flatMap((line) => [dot(line.number), at(line)[3]]);
    readout.replaceChildren(step === null ? "last" : `step ${step}`, ...parts);
  };
  const options = {
    width: place.clientWidth, height: 196, padding: [8, 20, 0, 0], series, bands, legend: { show: false },
    scales: { x: { time: false }, y: $("log").checked ? { distr: 3 } : key.includes("accuracy") ? { range: [0, 1] } : {} },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 48 }],
    cursor: { y: false, sync: { key: "step" }, drag: { x: true, y: false } },
    hooks: { setCursor: [(plot) => show(steps[plot.cursor.idx] ?? null)] },
  };
  card.plot = new uPlot(options, data, place);
  card.plot.over.onclick = ({ detail }) => detail === 1 && (card.click = setTimeout(openStep, 300, steps[card.plot.cursor.idx], key));
  card.plot.over.ondblclick = () => clearTimeout(card.click); // uPlot zooms out
  show(null);
}

/** Draw the cards whose names have the text searched for; the further metrics unfold for a search. */
function showCards() {
  const query = $("metric-search").value.toLowerCase();
  if (query) $("more").open = true;
  for (const card of document.querySelectorAll("#curves .card")) {
    card.hidden = !`${card.firstChild.title} ${card.firstChild.textContent}`.toLowerCase().includes(query);
    draw(card);
  }
}
