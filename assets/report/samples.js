// The browser of samples: a list that filters narrow, and beside it a sample, or two of the same prompt.
"use strict";

const NOT_SCORES = new Set(["step", "prompt", "response", "stop_reason", "turns", "tokens", "held_out", "chosen_text", "rejected_text", "run", "id", "length", "unit"]);
const SAMPLES = RUNS.flatMap((run, number) =>
  run.samples.map((row) => {
    const response = row.response ?? row.chosen_text ?? "";
    const [length, unit] = row.length === undefined ? [[...response].length, "characters"] : [row.length, "tokens"];
    return { ...row, run: number, response, length, unit };
  }));
SAMPLES.forEach((sample, i) => (sample.id = i));
const SCORES = [...new Set(SAMPLES.flatMap((sample) => Object.keys(sample).filter((key) => !NOT_SCORES.has(key))))];
const byPrompt = Map.groupBy ? Map.groupBy(SAMPLES, (sample) => sample.prompt) : grouped(SAMPLES, (sample) => sample.prompt);
const UNITS = [...new Set(SAMPLES.map((sample) => sample.unit))].join(" or ");
let listed = 200; // of the samples that the filters leave

function grouped(items, key) {
  const groups = new Map();
  for (const item of items) groups.set(key(item), [...(groups.get(key(item)) || []), item]);
  return groups;
}

const scoreOf = (sample) => sample[state.filters.score || SCORES[0]];

/** Return the samples that the filters leave, in their order. */
function filtered() {
  const { text = "", run = "", kind = "", reason = "", scoreMin = "", scoreMax = "", lengthMin = "", lengthMax = "", stepMin = "", stepMax = "", order = "newest step" } = state.filters;
  const query = text.toLowerCase();
  const within = (x, low, high) => (low === "" || (x !== null && x !== undefined && x >= Number(low))) && (high === "" || (x !== null && x !== undefined && x <= Number(high)));
  const found = SAMPLES.filter((sample) =>
    (!query || `${sample.prompt}\n${sample.response}\n${sample.rejected_text || ""}`.toLowerCase().includes(query)) &&
    (run === "" || sample.run === Number(run)) && (!kind || (kind === "held-out") === Boolean(sample.held_out)) &&
    (!reason || sample.stop_reason === reason) && within(scoreOf(sample), scoreMin, scoreMax) &&
    within(sample.length, lengthMin, lengthMax) && within(sample.step, stepMin, stepMax));
  const by = { "oldest step": (x) => x.step, "newest step": (x) => -x.step, "lowest score": (x) => scoreOf(x) ?? Infinity, "highest score": (x) => -(scoreOf(x) ?? -Infinity), shortest: (x) => x.length, longest: (x) => -x.length }[order];
  return found.map((sample) => [by(sample), sample]).sort(([a, x], [b, y]) => (a === b ? x.id - y.id : a < b ? -1 : 1)).map(([, sample]) => sample);
}

function showFilters() {
  const set = (name) => (event) => {
    remember({ filters: { ...state.filters, [name]: event.target.value } });
    listed = 200;
    showList();
  };
  const choice = (name, label, options, always) =>
    options.length > 1 || always ? element("label", {}, label, element("select", { id: `filter-${name}`, onchange: set(name) }, options.map(([value, text]) => {
      const option = element("option", { value }, text);
      option.selected = value === (state.filters[name] ?? options[0][0]);
      return option;
    }))) : null;
  const number = (name, hint) => element("input", { type: "number", step: "any", id: `filter-${name}`, placeholder: hint, "aria-label": `${name}`, value: state.filters[name] ?? "", oninput: set(name) });
  const reasons = [...new Set(SAMPLES.map((sample) => sample.stop_reason).filter(Boolean))].sort();
  const kinds = new Set(SAMPLES.map((sample) => Boolean(sample.held_out)));
  const pair = (name, label) => element("label", {}, label, number(`${name}Min`, "from"), number(`${name}Max`, "to"));
  $("filters").append(...[
    element("input", { type: "search", id: "filter-text", placeholder: "search prompts and responses", "aria-label": "search prompts and responses", value: state.filters.text ?? "", oninput: set("text") }),
    RUNS.length > 1 ? choice("run", "run", [["", "all"], ...RUNS.map((run, i) => [String(i), run.name])]) : null,
    kinds.size > 1 ? choice("kind", "of", [["", "all"], ["training", "training"], ["held-out", "evaluations"]]) : null,
    reasons.length ? choice("reason", "ended by", [["", "any"], ...reasons.map((reason) => [reason, reason])], true) : null,
    SCORES.length ? choice("score", "", SCORES.map((name) => [name, name]), true) : null,
    SCORES.length ? pair("score", SCORES.length > 1 ? "" : "") : null,
    pair("length", UNITS), pair("step", "step"),
    choice("order", "order", ["newest step", "oldest step", "lowest score", "highest score", "shortest", "longest"].map((name) => [name, name])),
  ].filter(Boolean));
}

function facts(sample) {
  const name = state.filters.score || SCORES[0];
  return [element("span", {}, RUNS.length > 1 ? dot(RUNS[sample.run].group) : "", `step ${sample.step}`), name ? element("b", {}, shown(sample[name])) : "",
    sample.stop_reason ? element("span", {}, sample.stop_reason) : "", element("span", {}, `${shown(sample.length)} ${sample.unit}`)];
}

function showList() {
  const found = filtered();
  const notes = RUNS.map((run) => run.samples_note).filter(Boolean);
  $("sample-note").textContent = [`${found.length.toLocaleString("en")} of ${SAMPLES.length.toLocaleString("en")} samples.`, ...notes].join(" ");
  const items = found.slice(0, listed).map((sample) =>
    element("li", { "data-id": sample.id, "aria-selected": sample.id === state.sample, onclick: () => open(sample.id) },
      element("div", { class: "facts" }, facts(sample)), element("div", { class: "text" }, (sample.response || "(empty)").slice(0, 300))));
  if (found.length > listed) items.push(element("li", { class: "more", onclick: () => ((listed += 500), showList()) }, `show more of ${found.length.toLocaleString("en")}`));
  if (!items.length) items.push(element("li", { class: "empty" }, "no sample passes these filters"));
  $("sample-list").replaceChildren(...items);
  if (!SAMPLES[state.sample] && found.length) open(found[0].id);
  else showSample();
}

function open(id, other = null) {
  remember({ sample: id, other });
  for (const item of $("sample-list").children) item.setAttribute("aria-selected", Number(item.dataset.id) === id);
  showSample();
}

// ---- one sample ----

const COLORINGS = {
  none: ["turns and text", null],
  advantage: ["advantage", "signed"],
  logprob_diff: ["log-prob difference", "signed"],
  entropy: ["entropy", "amount"],
  logprob: ["log-prob", "amount"],
};
const MEANING = {
  advantage: "of the token, as the policy trains with it",
  logprob_diff: "nats: of the trainer less of what sampled",
  entropy: "nats: of the distribution that the token was drawn from",
  logprob: "nats: of the token, by what sampled",
};

/** Return the values of a coloring, one a token, null for a token that does not train; null if it has none. */
function valuesOf(sample, name) {
  if (!sample.tokens) return null;
  if (sample.tokens[name]) return sample.tokens[name];
  // All tokens that train have the advantage of their response, where tokens have none of their own.
  if (name === "advantage" && typeof sample.advantage === "number") return sample.tokens.logprob.map((x) => (x === null ? null : sample.advantage));
  return null;
}

/** Return the bound of a coloring's scale: what all but 2 % of the values of these samples stay within. */
function bound(samples, name) {
  const sizes = samples.flatMap((sample) => valuesOf(sample, name) || []).filter((x) => x !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.ceil(0.98 * (sizes.length - 1))] || last(sizes) || 1;
}

const tint = (x, kind, limit) => `rgba(var(--${kind === "amount" ? "amount" : x < 0 ? "negative" : "positive"}), ${(0.75 * Math.min(1, Math.abs(x) / limit)).toFixed(3)})`;

/** Return the tokens of a response, colored. Tokens without a value, such as observations, are set apart. */
function coloredTokens(sample, name, limit) {
  const values = valuesOf(sample, name);
  const block = element("p", { class: "text-block tokens" });
  sample.tokens.text.forEach((text, i) => {
    if (!text && i + 1 < sample.tokens.text.length) return; // part of a character that the next token completes
    const x = values[i];
    block.append(element("span", { class: x === null ? "token outside" : "token", "data-i": i, style: x === null ? null : `background: ${tint(x, COLORINGS[name][1], limit)}` }, text));
  });
  const about = (i) => Object.keys(COLORINGS).slice(1).map((key) => [COLORINGS[key][0], valuesOf(sample, key)?.[i]]).filter(([, x]) => x !== null && x !== undefined).map(([label, x]) => `${label} ${shown(x)}`);
  block.addEventListener("pointermove", (event) => {
    const i = event.target.dataset.i;
    showTip(event, i === undefined ? "" : [`token ${Number(i) + 1}: ${JSON.stringify(sample.tokens.text[i])}`, ...(about(i).length ? about(i) : ["not sampled, or does not train"])].join("\n"));
  });
  block.addEventListener("pointerleave", (event) => showTip(event, ""));
  return block;
}

/** Return a text with what was searched for marked. */
function marked(text) {
  const query = (state.filters.text || "").toLowerCase();
  const parts = [];
  let from = 0;
  for (let at; query && (at = text.toLowerCase().indexOf(query, from)) >= 0; from = at + query.length) parts.push(text.slice(from, at), element("mark", {}, text.slice(at, at + query.length)));
  return [...parts, text.slice(from)];
}

function responseOf(sample, name, limit) {
  if (name !== "none" && valuesOf(sample, name)) return [coloredTokens(sample, name, limit)];
  if (sample.rejected_text !== undefined) return [element("p", { class: "label" }, "chosen"), textBlock(sample.chosen_text), element("p", { class: "label" }, "rejected"), textBlock(sample.rejected_text)];
  if (!sample.turns) return [textBlock(sample.response)];
  return sample.turns.map((turn) => element("div", { class: `turn ${turn.role}` }, element("div", { class: "who" }, turn.role + (turn.name ? ` ${turn.name}` : "")), textBlock(typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content, null, 1)),
    turn.tool_calls ? textBlock(turn.tool_calls.map((call) => JSON.stringify(call.function || call)).join("\n")) : null));
}

const textBlock = (text) => element("p", { class: "text-block" }, marked(text || ""));

function sampleCard(sample, name, limit) {
  const tags = [["step", sample.step], ...SCORES.filter((key) => sample[key] !== undefined).map((key) => [key, shown(sample[key])]), ...(sample.stop_reason ? [["ended by", sample.stop_reason]] : [])];
  return element("div", { class: "card", "data-sample": sample.id },
    element("div", { class: "sample-head" }, element("strong", {}, sample.held_out ? "evaluation" : "training", RUNS.length > 1 ? ` of ${RUNS[sample.run].name}` : ""), tags.map(([key, value]) => element("span", { class: "tag" }, element("em", {}, key), String(value)))),
    responseOf(sample, name, limit));
}

function showSample() {
  const sample = SAMPLES[state.sample];
  if (!sample) {
    $("sample").replaceChildren(element("p", { class: "empty" }, "No samples here: --log_samples writes some of each step."));
    return;
  }
  const others = byPrompt.get(sample.prompt).filter((other) => other !== sample);
  const other = others.find(({ id }) => id === state.other);
  const both = other ? [sample, other].sort((a, b) => a.step - b.step || a.id - b.id) : [sample];
  const options = Object.keys(COLORINGS).filter((name) => name === "none" || both.some((one) => valuesOf(one, name)));
  const name = options.includes(state.color) ? state.color : "none";
  const limit = bound(both, name);
  const buttons = options.length > 1 ? element("div", { class: "sample-head", id: "colorings" }, element("span", { class: "note" }, "colour by"), options.map((option) =>
    element("button", { "aria-pressed": option === name, "data-color": option, onclick: () => (remember({ color: option }), showSample()) }, COLORINGS[option][0]))) : null;
  const [kind, fade] = [COLORINGS[name][1], "linear-gradient(90deg, "];
  const scale = kind ? element("div", { class: "scale" }, kind === "signed" ? `−${shown(limit)}` : "0",
    element("i", { style: `background: ${kind === "signed" ? `${fade}${tint(-1, kind, 1)}, transparent, ${tint(1, kind, 1)})` : `${fade}transparent, ${tint(1, kind, 1)})`}` }), shown(name === "logprob" ? -limit : limit), element("span", {}, `· ${MEANING[name]}`)) : null;
  const chips = others.length ? element("div", { class: "chips", id: "same-prompt" }, "the same prompt, side by side:",
    others.slice(0, 40).map((one) => element("button", { "aria-pressed": one === other, "data-id": one.id, onclick: () => open(sample.id, one === other ? null : one.id) },
      `${RUNS.length > 1 ? `${RUNS[one.run].name} ` : ""}step ${one.step}${SCORES.length ? `: ${shown(scoreOf(one))}` : ""}`)),
    others.length > 40 ? `and ${others.length - 40} more` : null) : null;
  $("sample").replaceChildren(...[
    element("p", { class: "label" }, "prompt"), element("p", { class: "text-block prompt" }, marked(sample.prompt)),
    element("p", { class: "label" }, ""), buttons, scale,
    element("div", { class: "columns" }, both.map((one) => sampleCard(one, name, limit))), chips,
  ].filter(Boolean));
}

showHeader();
showHeadline();
showPhases();
showArguments();
showCurves();
showFilters();
showList();
