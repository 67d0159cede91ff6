// A response as its tokens, coloured by one of their numbers.
/** Return a number of token i of a row of tokens.jsonl; a derived one is made of others. NaN: there is none. */
function numberOf(tokens, name, i) {
  const of = (other) => tokens[other]?.[i] ?? NaN;
  if (name === "push") return of("advantages") * of("weights") * (1 - Math.exp(of("start_logprobs")));
  if (name === "shift") return of("start_logprobs") - of("ref_logprobs");
  if (name === "mismatch") return of("start_logprobs") - of("rollout_logprobs");
  return of(name);
}

/** Show and return the scale of some samples: their largest number without its sign. "": tokens are not shown. */
function showScale(samples) {
  const [{ value, title }] = $("colour").selectedOptions;
  const sizes = samples.flatMap(({ tokens }) => tokens?.texts.map((_, i) => Math.abs(numberOf(tokens, value, i))) ?? []);
  const known = sizes.filter((x) => !Number.isNaN(x));
  const scale = known.reduce((largest, x) => Math.max(largest, x), 0);
  $("scale").hidden = !value;
  [$("lowest").textContent, $("highest").textContent] = [format(-scale), format(scale)];
  const meaning = scale ? title || "orange: below 0; blue: above 0." : "none: 0 at each of these tokens.";
  $("meaning").textContent = known.length ? meaning : `none: these responses have no such number${samples[0].held_out ? ", as nothing trains on an evaluation" : ""}.`;
  return value && (scale || 1);
}

/** Return the tokens of a response in blocks, which the browser lays out only where they are seen. */
function drawTokens(tokens, scale) {
  const name = $("colour").value;
  const place = element("div", { className: "text-block tokens", tabIndex: 0, ariaLabel: "tokens; the arrow keys move" });
  let block = null;
  const spans = tokens.texts.map((text, i) => {
    const full = block?.children.length >= (tokens.texts[i - 1]?.endsWith("\n") ? 100 : 1000); // a block ends its line
    if (!block || full) place.append((block = div("block")));
    const x = numberOf(tokens, name, i);
    const kind = [Number.isNaN(x) ? "none" : x < 0 ? "down" : "up", tokens.clipped?.[i] ? "clipped" : ""].join(" ");
    const size = Math.sqrt(Math.abs(x) / scale) || 0; // a root keeps small numbers visible
    const shown = text.replaceAll("\n", "↵\n") || "·"; // "·": a part of a character
    block.append(element("span", { className: kind, style: `--w: ${Math.round(75 * size)}%` }, shown));
    return block.lastChild;
  });
  let at = 0;
  const move = (i) => {
    if (!spans[i]) return null;
    $("samples").querySelector(".at")?.classList.remove("at");
    spans[i].classList.add("at");
    at = i;
    showToken(tokens, i);
    return spans[i];
  };
  place.addEventListener("mouseover", (event) => move(spans.indexOf(event.target)));
  place.addEventListener("focus", () => move(at));
  place.addEventListener("keydown", (event) => move(at + { ArrowRight: 1, ArrowLeft: -1 }[event.key])?.scrollIntoView({ block: "nearest" }));
  return place;
}

/** Show the numbers of a token, of which the log has four digits, at the bottom of the window: log-probs with their probability. */
function showToken(tokens, i) {
  const text = (name, x = numberOf(tokens, name, i)) => {
    if (["clipped", "trains"].includes(name)) return x ? "yes" : "no";
    return format(x, 4) + (name.endsWith("logprobs") ? ` (${format(100 * Math.exp(x))}%)` : "");
  };
  const known = [...$("colour").options].filter((option) => !Number.isNaN(numberOf(tokens, option.value, i)));
  const parts = ({ title, text: name, value }) => element("span", { title }, `${name}: `, element("b", {}, text(value)));
  $("token").replaceChildren(element("b", {}, `${i + 1}: ${JSON.stringify(tokens.texts[i])}`), ...known.map(parts));
}
