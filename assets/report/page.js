// The frame of the page: its data, headline numbers, phase times, arguments. curves.js and samples.js have the rest.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const $ = (id) => document.getElementById(id);

/** Return an element; attributes that start with "on" are listeners; children are elements, texts or null. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

/** Return a number with at most four significant digits. */
function format(x) {
  if (typeof x !== "number") return x ?? "–";
  const size = Math.abs(x);
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  if (size !== 0 && size < 0.001) return x.toExponential(1);
  return String(Number(x.toPrecision(size >= 100 ? 4 : 3)));
}

const dot = (number) => element("span", { class: "dot", style: `background: var(--c${number % 8})` });
const known = (values) => (values || []).filter((x) => x !== null);
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

/** Fill a table, and return it: a head of cells, and rows of elements. */
function fillTable(table, head, rows) {
  const cells = head.map((cell) => element("th", {}, cell));
  table.replaceChildren(element("thead", {}, element("tr", {}, cells)), element("tbody", {}, rows));
  return table;
}

function showHeader() {
  const running = RUNS.filter((run) => !run.finished).length;
  const facts = RUNS.length === 1 ? [RUNS[0].script, RUNS[0].args.model, RUNS[0].args.dataset] : [];
  facts.push(running ? `${running} of ${RUNS.length} not finished` : "finished");
  $("about").textContent = facts.filter(Boolean).join(" · ");
}

// ---- headline numbers: of each run the last value of its main metrics, and the first one ----

function showHeadline() {
  const names = Object.keys(DATA.titles).filter((key) => RUNS.some((run) => known(run.metrics[key]).length));
  const cell = (values) =>
    values.length ? `${format(values.at(-1))}${values.length > 1 ? ` (from ${format(values[0])})` : ""}` : "–";
  const rows = RUNS.map((run) => {
    const seconds = known(run.metrics["time/from_scratch"]).at(-1);
    const speed = known(run.metrics["perf/tokens_per_second"]);
    const numbers = [run.steps.at(-1), seconds === undefined ? null : seconds / 60, speed.length ? mean(speed) : null];
    const cells = [...names.map((key) => cell(known(run.metrics[key]))), ...numbers.map(format)];
    const name = element("td", {}, dot(run.group), run.name);
    return element("tr", {}, name, cells.map((text) => element("td", {}, text)));
  });
  const table = fillTable(element("table"), ["run", ...names.map((key) => DATA.titles[key]), "steps", "minutes", "tokens a second"], rows);
  $("headline").append(element("div", { class: "wide" }, table));
}

// ---- phase times ----

function showPhases() {
  const isPhase = (key) => key.startsWith("time/") && !["time/step", "time/from_scratch", "time/reward"].includes(key); // a part of the rollout
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics).filter(isPhase)))];
  const rows = RUNS.map((run) => {
    const steps = known(run.metrics["time/step"]).length; // an evaluation counts for the steps without one, too
    const seconds = names.map((key) => known(run.metrics[key]).reduce((a, b) => a + b, 0) / steps);
    const step = seconds.reduce((a, b) => a + b, 0);
    const bars = seconds.map((x, i) => {
      const percent = (100 * x) / (step || 1);
      const style = `width: ${percent}%; background: var(--c${i % 8})`;
      return element("i", { style, title: `${names[i]}: ${format(x)} s` }, percent > 8 ? `${Math.round(percent)} %` : "");
    });
    const row = [element("span", {}, run.name), element("div", { class: "stack" }, bars)];
    return element("div", { class: "phase-row" }, row, element("span", {}, `${format(step)} s a step`));
  });
  const key = names.map((name, i) => element("span", {}, dot(i), name.slice("time/".length)));
  $("phases").append(element("div", { class: "key" }, key), ...rows);
}

// ---- arguments: bold where they are not the default, shaded where they differ between runs ----

function showArguments() {
  const text = (value) => (Array.isArray(value) ? value.join(" ") : String(value ?? "–")) || '""';
  const changed = (run, name) => run.defaults && text(run.args[name]) !== text(run.defaults[name]);
  const differs = (name) => new Set(RUNS.filter((run) => name in run.args).map((run) => text(run.args[name]))).size > 1;
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.args)))];
  names.sort((a, b) => differs(b) - differs(a));
  const chosen = names.filter(
    (name) => $("all-arguments").checked || differs(name) || RUNS.some((run) => !run.defaults || changed(run, name)));
  const rows = chosen.map((name) => {
    const cells = RUNS.map((run) => element("td", { class: changed(run, name) && "changed" }, text(run.args[name])));
    return element("tr", { class: differs(name) && "between" }, element("td", {}, `--${name}`), cells);
  });
  for (const name of ["script", "ranks", "git_commit"])
    rows.push(element("tr", {}, element("td", {}, name), RUNS.map((run) => element("td", {}, text(run[name])))));
  fillTable($("argument-table"), ["flag", ...RUNS.map((run) => run.name)], rows);
}
