// The browser of samples: a list that filters narrow, and a sample, or two responses to the same prompt side by side.
"use strict";

const NOT_SCORES = new Set("step prompt response answer stop_reason turns held_out length chosen_text rejected_text run id".split(" "));
const SAMPLES = RUNS.flatMap((run, number) =>
  run.samples.map((row) => ({ ...row, run: number, response: row.response ?? row.chosen_text ?? "" })));
SAMPLES.forEach((sample, i) => (sample.id = i));
const SCORES = [...new Set(SAMPLES.flatMap((sample) => Object.keys(sample).filter((key) => !NOT_SCORES.has(key))))];
const STEPS = new Set(SAMPLES.map((sample) => sample.step)).size; // of a long run, others are not in the page
const ORDERS = {
  "newest step": (sample) => -sample.step,
  "oldest step": (sample) => sample.step,
  "lowest score": (sample) => scoreOf(sample) ?? Infinity,
  "highest score": (sample) => -(scoreOf(sample) ?? -Infinity),
  longest: (sample) => -(sample.length ?? sample.response.length),
};
const LISTED = 300;
let selected = null; // a sample
let other = null; // the one next to it

const value = (id) => $(id)?.value ?? "";
const scoreOf = (sample) => sample[value("filter-score")];

function showFilters() {
  const choice = (id, label, options) => {
    const items = options.map(([key, text]) => element("option", { value: key }, text));
    return element("label", {}, label, element("select", { id, onchange: showList }, items));
  };
  const reasons = [...new Set(SAMPLES.map((sample) => sample.stop_reason).filter(Boolean))];
  const same = (names) => names.map((name) => [name, name]);
  $("filters").append(
    element("input", { type: "search", id: "filter-text", placeholder: "search prompts and responses", oninput: showList }),
    choice("filter-run", "run", [["", "all"], ...RUNS.map((run, i) => [i, run.name])]),
    choice("filter-kind", "of", [["", "all"], ["training", "training"], ["held-out", "evaluations"]]),
    choice("filter-reason", "ended by", [["", "any"], ...same(reasons)]),
    choice("filter-score", "score", same(SCORES)),
    choice("filter-order", "order", same(Object.keys(ORDERS))),
    element("span", { id: "sample-count" }));
}

/** Return the samples that pass the filters, in the chosen order. */
function filtered() {
  const query = value("filter-text").toLowerCase();
  const passes = (sample) =>
    [sample.prompt, sample.response, sample.rejected_text ?? ""].join("\n").toLowerCase().includes(query) &&
    ["", String(sample.run)].includes(value("filter-run")) &&
    ["", sample.held_out ? "held-out" : "training"].includes(value("filter-kind")) &&
    ["", sample.stop_reason].includes(value("filter-reason"));
  const order = ORDERS[value("filter-order")];
  return SAMPLES.filter(passes).sort((a, b) => order(a) - order(b) || a.id - b.id);
}

function showList() {
  const samples = filtered();
  $("sample-count").textContent = `${samples.length} of ${SAMPLES.length} samples of ${STEPS} steps`;
  const items = samples.slice(0, LISTED).map((sample) => {
    const facts = [`step ${sample.step}`, format(scoreOf(sample)), sample.stop_reason, sample.length && `${sample.length} tokens`];
    const line = element("div", { class: "facts" }, dot(RUNS[sample.run].group), facts.filter(Boolean).join(" · "));
    const text = element("div", { class: "text" }, sample.response.slice(0, 200) || "(empty)");
    return element("li", { "data-id": sample.id, onclick: () => open(sample) }, line, text);
  });
  $("sample-list").replaceChildren(...(items.length ? items : [element("li", { class: "label" }, "no sample")]));
  open(samples.includes(selected) ? selected : samples[0] ?? null, other);
}

function open(sample, second = null) {
  [selected, other] = [sample, second];
  for (const item of $("sample-list").children) item.setAttribute("aria-selected", Number(item.dataset.id) === sample?.id);
  $("sample").replaceChildren();
  if (!sample) return;
  const steps = (one) => Math.abs(one.step - sample.step); // between the two
  const alike = SAMPLES.filter((one) => one.prompt === sample.prompt).sort((a, b) => steps(a) - steps(b) || a.id - b.id);
  const scores = SCORES.filter((key) => alike.some((one) => key in one));
  const rows = alike.slice(0, 40).map((one) => {
    const facts = [one.step, ...scores.map((key) => format(one[key])), one.stop_reason ?? "", one.response.slice(0, 80)];
    const cells = [RUNS[one.run].name, ...facts].map((fact) => element("td", {}, fact));
    const click = () => open(sample, one === other ? null : one);
    return element("tr", { "aria-selected": one === sample || one === other, onclick: click }, cells);
  });
  const table = fillTable(element("table", { id: "same-prompt" }), ["run", "step", ...scores, "ended by", "response"], rows);
  $("sample").append(
    element("p", { class: "label" }, "prompt"), element("p", { class: "text-block prompt" }, marked(sample.prompt)),
    element("div", {}, sample.answer == null ? null : labelled("reference answer", sample.answer)),
    element("div", { class: "columns" }, card(sample), other && card(other)),
    element("p", { class: "label" }, "responses to this prompt, nearest step first; click on one to compare"),
    element("div", { class: "wide" }, table));
}

// ---- one sample ----

/** Return a text whose parts that were searched for are marked. */
function marked(text) {
  const query = value("filter-text").toLowerCase();
  const parts = [];
  let from = 0;
  for (let at; query && (at = text.toLowerCase().indexOf(query, from)) >= 0; from = at + query.length)
    parts.push(text.slice(from, at), element("mark", {}, text.slice(at, at + query.length)));
  return [...parts, text.slice(from)];
}

const textBlock = (text) => element("p", { class: "text-block" }, marked(text ?? ""));
const labelled = (label, text, kind = "") =>
  element("div", { class: `turn ${kind}` }, element("p", { class: "label" }, label), textBlock(text));

function card(sample) {
  const facts = [["", `${sample.held_out ? "evaluation" : "training"}, ${RUNS[sample.run].name}`], ["step", sample.step]];
  facts.push(...SCORES.filter((key) => key in sample).map((key) => [key, format(sample[key])]));
  facts.push(["ended by", sample.stop_reason], ["tokens", sample.length]);
  const tags = facts.filter(([, x]) => x !== undefined).map(([key, x]) => element("span", { class: "tag" }, `${key} ${x}`));
  let body = [textBlock(sample.response)];
  if (sample.rejected_text !== undefined)
    body = [labelled("chosen", sample.chosen_text, "tool"), labelled("rejected", sample.rejected_text, "user")];
  if (sample.turns)
    body = sample.turns.map((turn) => {
      const calls = (turn.tool_calls ?? []).map((call) => JSON.stringify(call.function ?? call));
      const content = typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content ?? "");
      return labelled([turn.role, turn.name].filter(Boolean).join(" "), [content, ...calls].join("\n"), turn.role);
    });
  return element("div", { class: "card", "data-sample": sample.id }, element("div", { class: "tags" }, tags), body);
}

showHeader();
showHeadline();
showPhases();
showArguments();
$("all-arguments").addEventListener("change", showArguments);
showCurves();
showFilters();
showList();
