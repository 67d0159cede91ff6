// A response as its tokens, coloured by one of their numbers.
/** Return a number of token i of a row of tokens.jsonl; a derived one is made of others. NaN: there is none. */
function numberOf(tokens, name, i) {
  const of = (other) => tokens[other]?.[i] ?? NaN;
  if (name === "push") return of("advantages") * of("weights") * (1 - Math.exp(of("start_logprobs")));
  if (name === "shift") return of("start_logprobs") - of("ref_logprobs");
  if (name === "mismatch") return of("start_logprobs") - of("rollout_logprobs");
  return of(name);
}

/** Show and return the scale of some samples: the size of number that has the full colour. 0: tokens are not shown. */
function showScale(samples) {
  const name = $("colour").value;
  const sizes = samples.flatMap(({ tokens }) => tokens?.texts.map((_, i) => Math.abs(numberOf(tokens, name, i))) ?? []);
  const known = Float64Array.from(sizes.filter((x) => !Number.isNaN(x))).sort();
  const scale = known[Math.floor(0.98 * known.length)] || known.at(-1) || 0; // a few larger ones do not make the rest pale
  $("scale").hidden = !scale;
  [$("lowest").textContent, $("highest").textContent] = [`≤ ${format(-scale)}`, `≥ ${format(scale)}`];
  return name && known.length ? scale || 1 : 0;
}

/** Return the tokens of a response in blocks, which the browser lays out only where they are seen. */
function drawTokens(tokens, scale) {
  const name = $("colour").value;
  const place = element("div", { class: "text-block tokens", tabindex: 0, "aria-label": "tokens; the arrow keys move" });
  let block = null;
  place.spans = tokens.texts.map((text, i) => {
    const full = block?.children.length >= (tokens.texts[i - 1]?.endsWith("\n") ? 100 : 1000); // a block ends its line
    if (!block || full) place.append((block = element("div", { class: "block" })));
    const x = numberOf(tokens, name, i);
    const kind = [Number.isNaN(x) ? "none" : x < 0 ? "down" : "up", tokens.clipped?.[i] ? "clipped" : ""].join(" ");
    const size = Math.min(1, Math.abs(x) / scale) || 0;
    const shown = text.replaceAll("\n", "↵\n") || "·"; // "·": a part of a character
    block.append(element("span", { class: kind, style: `--w: ${Math.round(75 * size)}%` }, shown));
    return block.lastChild;
  });
  const move = (i) => {
    if (!place.spans[i]) return null;
    $("samples").querySelector(".at")?.classList.remove("at");
    place.spans[i].classList.add("at");
    place.at = i;
    showToken(tokens, i);
    return place.spans[i];
  };
  const step = { ArrowRight: 1, ArrowLeft: -1 };
  place.addEventListener("mouseover", (event) => move(place.spans.indexOf(event.target)));
  place.addEventListener("focus", () => move(place.at ?? 0));
  place.addEventListener("keydown", (event) => move(place.at + step[event.key])?.scrollIntoView({ block: "nearest" }));
  return place;
}

/** Show the numbers of a token in the line at the bottom of the window. */
function showToken(tokens, i) {
  const facts = [...$("colour").options].map(({ value, text }) => [text, numberOf(tokens, value, i)]);
  const known = facts.filter(([, x]) => !Number.isNaN(x)).map(([title, x]) => element("span", {}, `${title} `, element("b", {}, format(x))));
  $("token").replaceChildren(element("b", {}, `${i + 1}: ${JSON.stringify(tokens.texts[i])}`), ...known);
}
