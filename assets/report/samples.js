// The browser of samples: a list that filters narrow, and a sample beside its group, or another response to its prompt.
const NOT_SCORES = ("step place id run held_out prompt response chosen_text rejected_text answer stop_reason turns length tokens " +
  "index dataset stopped extracted").split(" "); // the last ones are of scripts/evaluate.py
const SAMPLES = RUNS.flatMap((run, number) => run.samples.map((row) => ({ response: row.chosen_text ?? "", ...row, run: number })));
for (const row of SAMPLES) row.id = [RUNS[row.run].name, row.held_out, row.step, row.place].join("/");
const SCORES = [...new Set(SAMPLES.flatMap((sample) => Object.keys(sample).filter((key) => !NOT_SCORES.includes(key))))];
const scoreOf = (sample) => sample[$("filter-score").value];

/** Return the samples that pass the filters, in the chosen order. */
function filtered() {
  const query = $("filter-text").value.toLowerCase();
  const passes = (sample) =>
    [sample.prompt, sample.response, sample.rejected_text ?? ""].join("\n").toLowerCase().includes(query) &&
    ["", String(sample.run)].includes($("filter-run").value) &&
    ["", sample.held_out ? "held-out" : "training"].includes($("filter-kind").value) &&
    ["", sample.stop_reason].includes($("filter-reason").value);
  const [name, sign] = $("filter-order").value.split(" "); // such as "score -1"
  const order = (sample) => sign * (name === "score" ? scoreOf(sample) ?? sign * Infinity : sample[name] ?? sample.response.length);
  return SAMPLES.filter(passes).sort((a, b) => order(a) - order(b)); // of equals the first one stays the first
}

function showList() {
  const samples = filtered();
  const steps = new Set(SAMPLES.map((sample) => sample.step)).size; // of a long run, others are not in the page
  $("sample-count").textContent = `${samples.length} of ${SAMPLES.length} samples of ${steps} steps`;
  const items = samples.slice(0, 300).map((sample) => {
    const facts = [`step ${sample.step}`, format(scoreOf(sample)), sample.stop_reason, sample.length && `${sample.length} tokens`];
    const line = element("div", { class: "facts" }, dot(RUNS[sample.run].group), facts.filter(Boolean).join(" · "));
    const text = element("div", { class: "text" }, sample.response.slice(0, 200) || "(empty)");
    return element("li", { "data-id": sample.id, onclick: () => open(sample) }, line, text);
  });
  $("sample-list").replaceChildren(...(items.length ? items : [element("li", { class: "label" }, "no sample")]));
  const chosen = (name) => SAMPLES.find((sample) => sample.id === $(name).value);
  if (samples.includes(chosen("selected"))) open(chosen("selected"), chosen("other"));
  else open(samples[0]);
}

/** Show a sample beside another one, or beside its group: the responses to its prompt of the same step. */
function open(sample, other) {
  [$("selected").value, $("other").value] = [sample?.id ?? "", other?.id ?? ""];
  for (const item of $("sample-list").children) item.setAttribute("aria-selected", item.dataset.id === sample?.id);
  for (const id of ["sample", "token"]) $(id).replaceChildren();
  if (!sample) return;
  const alike = SAMPLES.filter((one) => one.prompt === sample.prompt);
  alike.sort((a, b) => Math.abs(a.step - sample.step) - Math.abs(b.step - sample.step));
  const inGroup = (one) => one !== sample && ["run", "step", "held_out"].every((key) => one[key] === sample[key]);
  const shown = [sample, ...(other ? [other] : alike.filter(inGroup))];
  const scores = SCORES.filter((key) => alike.some((one) => key in one));
  const rows = alike.slice(0, 40).map((one) => {
    const facts = [one.step, ...scores.map((key) => format(one[key])), one.stop_reason ?? "", one.response.slice(0, 80)];
    const cells = [RUNS[one.run].name, ...facts].map((fact) => element("td", {}, fact));
    const click = () => open(sample, one === other || one === sample ? null : one);
    return element("tr", { "aria-selected": one === sample || one === other, onclick: click }, cells);
  });
  const head = ["run", "step", ...scores, "ended by", "response"].map((cell) => element("th", {}, cell));
  const table = element("table", { id: "same-prompt" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
  const scale = showScale(shown);
  $("sample").append(
    element("p", { class: "label" }, "prompt"), element("p", { class: "text-block prompt" }, marked(sample.prompt)),
    element("div", {}, sample.answer == null ? null : labelled("reference answer", sample.answer)),
    element("div", { class: "columns" }, shown.map((one) => card(one, scale))),
    element("p", { class: "label" }, "responses to this prompt, nearest step first; click on one to compare it alone"),
    element("div", { class: "wide" }, table));
}

/** Return a text whose parts that were searched for are marked. */
function marked(text) {
  const query = $("filter-text").value.replace(/[^\w\s]/g, "\\$&");
  const parts = query ? text.split(new RegExp(`(${query})`, "i")) : [text];
  return parts.map((part, i) => (i % 2 ? element("mark", {}, part) : part));
}

const textBlock = (text) => element("p", { class: "text-block" }, marked(text ?? ""));
const labelled = (label, text, kind = "") =>
  element("div", { class: `turn ${kind}` }, element("p", { class: "label" }, label), textBlock(text));

function card(sample, scale) {
  const facts = [["", `${sample.held_out ? "evaluation" : "training"}, ${RUNS[sample.run].name}`], ["step", sample.step]];
  facts.push(...SCORES.filter((key) => key in sample).map((key) => [key, format(sample[key])]));
  facts.push(["ended by", sample.stop_reason], ["tokens", sample.length]);
  const tags = facts.filter(([, x]) => x !== undefined).map(([key, x]) => element("span", { class: "tag" }, `${key} ${x}`));
  let body = [textBlock(sample.response)];
  if (scale && sample.tokens) body = [drawTokens(sample.tokens, scale)];
  else if (sample.rejected_text !== undefined)
    body = [labelled("chosen", sample.chosen_text, "tool"), labelled("rejected", sample.rejected_text, "user")];
  else if (sample.turns)
    body = sample.turns.map((turn) => {
      const parts = [turn.content ?? "", ...(turn.tool_calls ?? []).map((call) => call.function ?? call)];
      const text = parts.map((part) => (typeof part === "string" ? part : JSON.stringify(part))).join("\n");
      return labelled([turn.role, turn.name].filter(Boolean).join(" "), text, turn.role);
    });
  return element("div", { class: "card", "data-sample": sample.id }, element("div", { class: "tags" }, tags), body);
}
