// The frame of the page: its data and state, headline numbers, phase times, arguments. curves.js and samples.js have the rest.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const $ = (id) => document.getElementById(id);

/** Return an element; attributes that start with "on" are listeners; children are elements or texts. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return a number as one would say it: four significant digits at most, thousands apart. */
function shown(x) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  const size = Math.abs(x);
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  if (size !== 0 && size < 0.001) return x.toExponential(1).replace("e-", "e−");
  return String(Number(x.toPrecision(size >= 100 ? 4 : 3))).replace("-", "−");
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (number) => css(`--c${number % 8}`);
const dot = (number) => element("span", { class: "dot", style: `background: var(--c${number % 8})` });
const known = (values) => (values || []).filter((x) => x !== null);
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const last = (values) => values[values.length - 1];

// ---- state, in the address, so that a reload and a link show the same view ----

const state = { x: "step", y: "linear", seeds: "range", smooth: 0, metric: "", off: [], sample: null, other: null, filters: {}, color: "none", all: false, reload: false };
try {
  Object.assign(state, JSON.parse(decodeURIComponent(location.hash.slice(1) || "{}")));
} catch {} // the address has something else behind its #

function remember(changes) {
  Object.assign(state, changes);
  try {
    history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
  } catch {} // a viewer without history, such as a frame
}

/** Let the radio buttons of a fieldset show and set a field of the state. */
function radios(id, field, changed) {
  for (const input of $(id).querySelectorAll("input")) {
    input.checked = input.value === state[field];
    input.addEventListener("change", () => {
      remember({ [field]: input.value });
      changed();
    });
  }
}

// ---- header ----

function showHeader() {
  const scripts = [...new Set(RUNS.map((run) => run.script))].join(", ");
  $("title").textContent = RUNS.length === 1 ? RUNS[0].name : `${RUNS.length} runs`;
  document.title = $("title").textContent;
  const written = new Date(DATA.written * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
  const facts = [scripts, ...(RUNS.length === 1 ? [RUNS[0].args.model, RUNS[0].args.dataset] : []), progress(), `written ${written}`];
  $("about").textContent = facts.filter(Boolean).join(" · ");
  $("live").hidden = RUNS.every((run) => run.finished);
  $("reload").checked = state.reload;
  $("reload").addEventListener("change", () => remember({ reload: $("reload").checked }));
  setInterval(() => state.reload && !$("live").hidden && location.reload(), 60_000);
  for (const link of document.querySelectorAll("nav a"))
    link.addEventListener("click", (event) => {
      event.preventDefault(); // the address holds the state
      $(link.dataset.to).scrollIntoView({ behavior: "smooth" });
    });
}

function progress() {
  const going = RUNS.filter((run) => !run.finished);
  if (!going.length) return "finished";
  if (RUNS.length > 1) return `${going.length} of ${RUNS.length} not finished`;
  return `step ${going[0].last_step}${going[0].total_steps ? ` of ${going[0].total_steps.toLocaleString("en")}` : ""}`;
}

// ---- headline numbers ----

/** Return [label, value, note] of each number that a run has: what it reached, and what it cost. */
function headline(run) {
  const found = [];
  const ends = (key) => {
    const values = known(run.metrics[key]);
    return values.length ? [values[0], last(values)] : null;
  };
  const add = (label, values, note) => values && found.push([label, shown(values[1]), note(values)]);
  const from = (values) => `from ${shown(values[0])}`;
  add("held-out accuracy", ends("eval/accuracy"), from);
  add("held-out accuracy, greedy", ends("eval/greedy_accuracy"), from);
  add("held-out pairs ranked right", ends("eval/pair_accuracy"), from);
  const scores = known(run.metrics["objective/scores"] || run.metrics["train/pair_accuracy"]);
  if (scores.length) {
    const tenth = Math.max(1, Math.ceil(scores.length / 10));
    const label = run.metrics["objective/scores"] ? "mean score" : "training pairs ranked right";
    found.push([label, shown(mean(scores.slice(-tenth))), `last tenth of steps; first ${shown(mean(scores.slice(0, tenth)))}`]);
  }
  add("KL to the reference", ends("objective/kl"), () => "nats a response");
  add("entropy", ends("policy/entropy_avg"), (values) => `nats a token, ${from(values)}`);
  add("response length", ends("val/sequence_lengths"), (values) => `tokens, ${from(values)}`);
  const seconds = last(known(run.metrics["time/from_scratch"]));
  if (seconds !== undefined) found.push([seconds < 5400 ? "minutes" : "hours", shown(seconds / (seconds < 5400 ? 60 : 3600)), `${run.last_step.toLocaleString("en")} steps`]);
  const speed = known(run.metrics["perf/tokens_per_second"]);
  if (speed.length) found.push(["tokens a second", shown(mean(speed)), "prompts and responses, mean"]);
  const memory = known(run.metrics["perf/peak_memory_gb"]);
  if (memory.length) found.push(["peak memory", shown(memory.reduce((a, b) => Math.max(a, b))), "GB"]);
  return found;
}

function showHeadline() {
  if (RUNS.length === 1) {
    const tiles = headline(RUNS[0]).map(([label, value, note]) => element("div", { class: "tile" }, element("span", {}, label), element("b", {}, value), element("span", {}, note)));
    $("headline").append(element("div", { class: "tiles" }, tiles));
    return;
  }
  const numbers = RUNS.map((run) => new Map(headline(run).map(([label, value]) => [label, value])));
  const labels = [...new Set(numbers.flatMap((found) => [...found.keys()]))];
  const rows = RUNS.map((run, i) =>
    element("tr", {}, element("td", {}, dot(run.group), run.name, run.finished ? "" : ` (at step ${run.last_step})`),
      labels.map((label) => element("td", { class: "number" }, numbers[i].get(label) || "–"))));
  const head = element("tr", {}, element("th", {}, "run"), labels.map((label) => element("th", { class: "number" }, label)));
  $("headline").append(element("div", { class: "wide" }, element("table", {}, element("thead", {}, head), element("tbody", {}, rows))));
}

// ---- phase times ----

const phaseKeys = (run) => Object.keys(run.metrics).filter((key) => key.startsWith("time/") && !["time/step", "time/from_scratch"].includes(key));

function showPhases() {
  const names = [...new Set(RUNS.flatMap(phaseKeys))];
  const rows = [];
  for (const run of RUNS) {
    const parts = names.map((key) => mean(known(run.metrics[key]).concat(known(run.metrics[key]).length ? [] : [0])));
    const step = parts.reduce((a, b) => a + b, 0);
    if (!step) continue;
    const bars = parts.map((x, i) => element("i", { style: `width: ${(100 * x) / step}%; background: var(--c${i % 8})`, title: `${names[i].slice(5)}: ${shown(x)} s a step` },
      x > 0.08 * step ? `${Math.round((100 * x) / step)} %` : ""));
    rows.push(element("div", { class: "phase-row" }, element("span", {}, run.name), element("div", { class: "stack" }, bars), element("span", {}, `${shown(step)} s a step`)));
  }
  if (!rows.length) return;
  const key = element("div", { class: "key" }, names.map((name, i) => element("span", {}, dot(i), name.slice(5))));
  $("phases").append(key, ...rows);
}

// ---- arguments ----

const written = (value) => (Array.isArray(value) ? value.join(" ") || '""' : value === "" ? '""' : value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

function showArguments() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.args)))];
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const between = (name) => RUNS.some((run) => !same(run.args[name], RUNS[0].args[name]));
  const changed = (run, name) => run.defaults && name in run.args && !same(run.args[name], run.defaults[name]);
  const without = RUNS.filter((run) => !run.defaults).map((run) => run.name);
  $("arguments-note").textContent = without.length ? `Defaults are not recorded for ${without.join(", ")}.` : "In bold: not the default." + (RUNS.length > 1 ? " Shaded: differs between runs." : "");
  const facts = [["script", (run) => run.script], ["ranks", (run) => run.ranks], ["commit", (run) => run.git_commit], ["versions", (run) => Object.entries(run.versions || {}).map((pair) => pair.join(" ")).join(", ")]];
  const withDefault = RUNS.length === 1 && RUNS[0].defaults;
  const draw = () => {
    const chosen = names.filter((name) => state.all || between(name) || RUNS.some((run) => changed(run, name)) || (without.length && RUNS.length === 1));
    const rows = chosen.sort((a, b) => between(b) - between(a)).map((name) =>
      element("tr", { class: between(name) ? "between" : null }, element("td", {}, `--${name}`),
        RUNS.map((run) => element("td", { class: changed(run, name) ? "changed" : null }, written(run.args[name] ?? null))),
        withDefault ? element("td", { class: "default" }, written(RUNS[0].defaults[name] ?? null)) : null));
    const about = facts.map(([name, value]) => element("tr", {}, element("td", {}, name), RUNS.map((run) => element("td", {}, written(value(run) ?? null))), withDefault ? element("td") : null));
    const head = element("tr", {}, element("th", {}, "flag"), RUNS.map((run) => element("th", {}, dot(run.group), run.name)), withDefault ? element("th", {}, "default") : null);
    $("argument-table").replaceChildren(element("thead", {}, head), element("tbody", {}, rows, about));
  };
  $("all-arguments").checked = state.all;
  $("all-arguments").addEventListener("change", () => {
    remember({ all: $("all-arguments").checked });
    draw();
  });
  draw();
}

// ---- a line beside the pointer ----

const tip = element("div", { id: "tip", hidden: "" });
document.body.append(tip);

function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
}
