// The browser of samples: a list that filters narrow, and a sample beside its group, or another response to its prompt.
const NOT_SCORES = ["step", "place", "run", "length", "index", "answer"]; // the other numbers of a sample are its scores
const SAMPLES = RUNS.flatMap((run, number) => run.samples.map((row) => ({ response: row.chosen_text ?? "", ...row, run: number })));
const scoresOf = (sample) => Object.keys(sample).filter((key) => typeof sample[key] === "number" && !NOT_SCORES.includes(key));
const SCORES = [...new Set(SAMPLES.flatMap(scoresOf))];
for (const row of SAMPLES) row.id = [RUNS[row.run].name, row.held_out, row.step, row.place].join("/");
const scoreOf = (sample) => sample[$("filter-score").value];
const chosen = (id) => SAMPLES.find((sample) => sample.id === $(id).value);

/** Fill the list with the samples that pass the filters, in the chosen order. */
function showList() {
  const query = $("filter-text").value.toLowerCase();
  const passes = (sample) =>
    ["step", "run", "held_out", "stop_reason"].every((name) => ["", String(sample[name])].includes($(`filter-${name}`).value)) &&
    [sample.prompt, sample.response, sample.rejected_text ?? ""].join("\n").toLowerCase().includes(query);
  const [name, sign] = $("filter-order").value.split(" "); // such as "score -1"
  const order = (sample) => sign * (name === "score" ? scoreOf(sample) ?? sign * Infinity : sample[name] ?? sample.response.length);
  const samples = SAMPLES.filter(passes).sort((a, b) => order(a) - order(b)); // of equals the first one stays the first
  const steps = new Set(SAMPLES.map((sample) => sample.step)).size; // of a long run, others are not in the page
  $("sample-count").textContent = `${samples.length} of ${SAMPLES.length} samples of ${steps} steps`;
  const item = (sample) => {
    const facts = [RUNS.length > 1 && RUNS[sample.run].name, sample.held_out && "evaluation", `step ${sample.step}`];
    facts.push(`${$("filter-score").value} ${format(scoreOf(sample))}`, sample.stop_reason, sample.length && `${sample.length} tokens`);
    const line = div("facts", dot(RUNS[sample.run].group), facts.filter(Boolean).join(" · "));
    const button = element("input", { type: "radio", name: "sample", oninput: () => open(sample), sample });
    return element("li", {}, element("label", {}, button, line, div("text", sample.response.slice(0, 200) || "(empty)")));
  };
  const list = $("sample-list");
  const grow = () => list.append(...samples.slice(list.children.length, list.children.length + 300).map(item)); // all take seconds
  list.onscroll = () => list.scrollTop + 2 * list.clientHeight > list.scrollHeight && grow();
  list.replaceChildren();
  grow();
  list.scrollTop = 0;
  if (samples.includes(chosen("selected"))) open(chosen("selected"), chosen("other"));
  else open(samples[0]);
}

/** List the samples that a metric is about, of a step or the nearest one that has some in the page. */
function openStep(step, key) {
  $("filter-held_out").value = key.startsWith("eval/");
  const steps = SAMPLES.filter((sample) => String(sample.held_out) === $("filter-held_out").value).map((sample) => sample.step);
  $("filter-step").value = steps.sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0] ?? "";
  showList();
  $("samples").scrollIntoView();
}

/** Show a sample beside another one, or beside its group: the responses to its prompt of the same step. */
function open(sample, other) {
  [$("selected").value, $("other").value] = [sample?.id ?? "", other?.id ?? ""];
  for (const button of document.getElementsByName("sample")) button.checked = button.sample === sample;
  for (const id of ["sample", "token"]) $(id).replaceChildren();
  if (!sample) return;
  const distance = (one) => Math.abs(one.step - sample.step);
  const alike = SAMPLES.filter((one) => one.prompt === sample.prompt).sort((a, b) => distance(a) - distance(b));
  const group = alike.filter((one) => ["run", "step", "held_out"].every((key) => one[key] === sample[key]));
  const shown = [sample, ...(other ? [other] : group.filter((one) => one !== sample))];
  const lacking = RUNS.filter((_, i) => alike.every((one) => one.run !== i || group.includes(one))).map((run) => run.name).join(", ");
  const rows = alike.map((one) => {
    const text = element("button", {}, one.response.slice(0, 80) || "(empty)");
    const facts = [RUNS[one.run].name, one.step, ...SCORES.map((key) => format(one[key])), one.stop_reason ?? "", text];
    const onclick = () => open(sample, one === other || one === sample ? null : one);
    return element("tr", { ariaSelected: one === sample || one === other, onclick }, facts.map((fact) => element("td", {}, fact)));
  });
  const head = ["run", "step", ...SCORES, "ended by", "response"].map((cell) => element("th", {}, cell));
  const table = element("table", { id: "same-prompt" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
  const scale = showScale(shown);
  $("sample").append(
    element("p", { className: "label" }, "prompt"), div("prompt", textBlock(sample.prompt)),
    element("div", {}, sample.answer == null ? null : labelled("reference answer", String(sample.answer))),
    element("p", { className: "label" }, other || group.length < 2 ? null : summary(group)),
    div("columns", shown.map((one) => card(one, scale, one === sample && shown.length > 1))),
    element("p", { className: "label" }, "responses to this prompt, nearest step first; choose one to compare it alone"), div("wide", table),
    element("p", { className: "label" }, lacking && `Besides this group, the page has no response to this prompt from ${lacking}.`));
}

/** Return the line above a group, of which the log may have a part. */
function summary(group) {
  const values = (key) => group.map((one) => one[key]).filter((x) => typeof x === "number");
  const fact = (key) => `mean ${key} ${format(mean(values(key)))} ± ${format(Math.sqrt(unbiasedVariance(values(key))))}`;
  const facts = SCORES.filter((key) => key !== "advantage" && values(key).length > 1).map(fact);
  return [`${group.length} responses of a group at step ${group[0].step}`, ...facts].join("; ");
}

/** Return a paragraph, in which what was searched for is marked. */
function textBlock(text) {
  const query = $("filter-text").value.replace(/[^\w\s]/g, "\\$&");
  const parts = query ? text.split(new RegExp(`(${query})`, "i")) : [text];
  return element("p", { className: "text-block" }, parts.map((part, i) => (i % 2 ? element("mark", {}, part) : part)));
}

const labelled = (label, text, kind = "") => div(`turn ${kind}`, element("p", { className: "label" }, label), textBlock(text));

function card(sample, scale, chosen) {
  const kind = `${sample.held_out ? "evaluation" : "training"}, ${RUNS[sample.run].name}`;
  const facts = [["chosen", chosen ? "in the list" : undefined], ["", kind], ["step", sample.step]];
  facts.push(...SCORES.filter((key) => key in sample).map((key) => [key, format(sample[key])]));
  facts.push(["ended by", sample.stop_reason], ["tokens", sample.length]);
  const tags = facts.filter(([, x]) => x !== undefined).map(([key, x]) => element("span", { className: "tag" }, `${key} ${x}`));
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
  return element("div", { className: chosen ? "card chosen" : "card", id: sample.id }, div("tags", tags), body);
}
