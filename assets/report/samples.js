// The browser of samples: a list that filters narrow, and a sample beside its group, or another response to its prompt.
const NOT_SCORES = ["step", "place", "run", "length", "index", "answer"]; // the other numbers of a sample are its scores
const SAMPLES = RUNS.flatMap((run, number) => run.samples.map((row) => ({ response: row.chosen_text ?? "", ...row, run: number })));
const scoresOf = (sample) => Object.keys(sample).filter((key) => typeof sample[key] === "number" && !NOT_SCORES.includes(key));
const SCORES = [...new Set(SAMPLES.flatMap(scoresOf))];
for (const row of SAMPLES) row.id = [RUNS[row.run].name, row.held_out, row.step, row.place].join("/");
const scoreOf = (sample) => sample[$("filter-score").value];
const chosen = (id) => SAMPLES.find((sample) => sample.id === $(id).value);
const alike = (sample, ...keys) => SAMPLES.filter((one) => keys.every((key) => one[key] === sample[key]));
const nearest = (samples, step) => samples.sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step));
let pinned = null; // {tokens, at}: a click, a tap or a key has chosen a token, and the pointer shows no other

/** Return an entry of a list of samples: a radio button that is as large as its text. */
function entry(sample, name, oninput) {
  const facts = [RUNS.length > 1 && RUNS[sample.run].name, sample.held_out && "evaluation", `step ${sample.step}`];
  facts.push(`${$("filter-score").value} ${format(scoreOf(sample))}`, sample.stop_reason, sample.length && `${sample.length} tokens`);
  const line = div("facts", dot(RUNS[sample.run].group), facts.filter(Boolean).join(" · "));
  const button = element("input", { type: "radio", name, oninput, sample });
  return element("li", {}, element("label", {}, button, line, div("text", sample.response.slice(0, 200) || "(empty)")));
}

/** Fill the list with the samples that pass the filters, in the chosen order. Open the first one, or keep one that is open. */
function showList(keep = true) {
  const query = $("filter-text").value.toLowerCase();
  const passes = (...names) => (sample) =>
    names.every((name) => ["", String(sample[name])].includes($(`filter-${name}`).value)) &&
    [sample.prompt, sample.response, sample.rejected_text ?? ""].join("\n").toLowerCase().includes(query);
  const [name, sign] = $("filter-order").value.split(" "); // such as "score -1"
  const order = (sample) => sign * (name === "score" ? scoreOf(sample) ?? sign * Infinity : sample[name] ?? sample.response.length);
  const ofAnyStep = SAMPLES.filter(passes("run", "held_out", "stop_reason"));
  const samples = ofAnyStep.filter(passes("step")).sort((a, b) => order(a) - order(b)); // of equals the first one stays the first
  const [near] = samples.length ? [] : nearest(ofAnyStep, $("filter-step").value);
  $("sample-count").textContent = `${samples.length} of ${SAMPLES.length} samples of ${new Set(SAMPLES.map((sample) => sample.step)).size} steps`;
  if (near) $("sample-count").append(`; the nearest step with such samples is ${near.step}`);
  const list = $("sample-list");
  const item = (sample) => entry(sample, "sample", () => open(sample));
  const grow = () => list.append(...samples.slice(list.children.length, list.children.length + 300).map(item)); // all take seconds
  list.onscroll = () => list.scrollTop + 2 * list.clientHeight > list.scrollHeight && grow();
  list.replaceChildren();
  grow();
  list.scrollTop = 0;
  if (keep && samples.includes(chosen("selected"))) open(chosen("selected"), chosen("other"));
  else open(samples[0]);
}

/** List the samples that a metric is about, of a step or the nearest one that has some in the page; keys then move in the list. */
function openStep(step, key) {
  const held_out = key.startsWith("eval/");
  $("filter-held_out").value = held_out;
  $("filter-step").value = nearest(alike({ held_out }, "held_out"), step)[0]?.step ?? "";
  showList();
  $("samples").scrollIntoView();
  $("browser").onchange(); // scrolls to it
  focusList();
}

/** Show a sample beside another one, or beside its group: the responses to its prompt of the same step. A token may stay pinned. */
function open(sample, other, pin = null) {
  [$("selected").value, $("other").value, pinned] = [sample?.id ?? "", other?.id ?? "", pin];
  $("detail").hidden = !sample;
  if (!sample) return;
  const group = alike(sample, "prompt", "run", "step", "held_out");
  const isGroup = !other && group.length > 1;
  const shown = [sample, ...(other ? [other] : group.filter((one) => one !== sample))];
  const known = (key) => group.map((one) => one[key]).filter(Number.isFinite);
  const scores = sample.why ? [] : SCORES.filter((key) => key !== "advantage" && known(key).length); // a reason has the mean, after penalties
  const scale = showScale(shown);
  $("sample").replaceChildren(
    label("prompt"), div("prompt", textBlock(sample.prompt)),
    div("", sample.answer == null ? null : labelled("reference answer", String(sample.answer))),
    label(isGroup ? `${group.length} responses of a group at step ${sample.step}${scores.map((key) => `; mean ${key} ${format(mean(known(key)))}`).join("")}` : null),
    div("columns", shown.map((one) => card(one, scale, isGroup, one === sample && shown.length > 1))));
  const compare = (one) => entry(one, "other", () => open(sample, one === sample ? null : one));
  const hasFocus = $("same-prompt").contains(document.activeElement); // a choice in this list keeps its focus
  if (!hasFocus) $("same-prompt").replaceChildren(...nearest(alike(sample, "prompt"), sample.step).map(compare));
  for (const x of $("browser").querySelectorAll("input")) x.checked = x.sample === (x.name === "other" && other ? other : sample);
  const places = [...$("sample").querySelectorAll(".tokens")];
  const place = places.find(({ tokens }) => tokens === pin?.tokens) ?? places.at(other ? -1 : 0);
  $("token").hidden = !place?.move(place.at, pin);
}

const label = (...children) => element("p", { className: "label" }, children);
const textBlock = (text) => element("p", { className: "text-block" }, text);
const labelled = (name, text, kind = "") => div(`turn ${kind}`, label(name), textBlock(text));

/** Return a sample in a frame: its numbers, and its tokens, its turns, the two texts of a pair, or its text. */
function card(sample, scale, isGroup, chosen) {
  const kind = isGroup ? [] : [sample.held_out ? "evaluation" : "training", RUNS.length > 1 && RUNS[sample.run].name, `step ${sample.step}`];
  const scores = SCORES.filter((key) => key in sample).map((key) => `${key} ${format(sample[key])}${key === "advantage" ? sample.why ?? "" : ""}`);
  const end = sample.stop_reason === "length" ? "length, without a stop token" : sample.stop_reason;
  const facts = [chosen && "chosen in the list", ...kind, ...scores, end && `ended by ${end}`, sample.length && `${sample.length} tokens`];
  const tags = facts.filter(Boolean).map((fact) => element("span", { className: "tag" }, fact));
  const textOf = (part) => (typeof part === "string" ? part : JSON.stringify(part.function ?? part));
  const pair = ["chosen", "rejected"].map((role) => ({ role, content: sample[`${role}_text`] }));
  const turns = sample.turns ?? (sample.rejected_text === undefined ? null : pair);
  let body = turns?.map(({ role, name, content, tool_calls: calls }) =>
    labelled([role, name].filter(Boolean).join(" "), [content ?? "", ...(calls ?? [])].map(textOf).join("\n"), role));
  if (scale && sample.tokens?.texts.length) body = drawTokens(sample.tokens, scale);
  return element("div", { className: chosen ? "card chosen" : "card", id: sample.id }, div("tags", tags), body ?? textBlock(sample.response));
}
