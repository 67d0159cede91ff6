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
  const known = samples.flatMap(({ tokens }) => tokens?.texts.map((_, i) => numberOf(tokens, value, i)) ?? []).filter((x) => !Number.isNaN(x));
  const scale = known.reduce((largest, x) => Math.max(largest, Math.abs(x)), 0);
  const [low, high] = [known.some((x) => x < 0), known.some((x) => x > 0)];
  [$("scale").hidden, $("ends").hidden] = [!value, !scale];
  [$("lowest").textContent, $("highest").textContent] = [low ? format(-scale) : 0, high ? format(scale) : 0];
  $("ramp").style.background = `linear-gradient(to right, ${[low && "var(--down)", "var(--card)", high && "var(--up)"].filter(Boolean)})`;
  const none = known.length ? "0 at each of these tokens" : `no such number${samples[0].held_out ? ", as nothing trains on an evaluation" : ""}`;
  $("meaning").textContent = `${scale ? title.split(" | ")[0] || "orange: below 0; blue: above 0" : none}.`;
  return value && (scale || 1);
}

/** Return the tokens of a response in blocks, which the browser lays out only where they are seen. */
function drawTokens(tokens, scale) {
  const place = element("div", { className: "text-block tokens", tokens });
  const numbers = tokens.texts.map((_, i) => numberOf(tokens, $("colour").value, i));
  const sizes = numbers.map((x) => Math.sqrt(Math.abs(x) / scale) || 0); // a root keeps small numbers visible
  let block = null;
  const spans = tokens.texts.map((text, i) => {
    const full = block?.children.length >= (tokens.texts[i - 1]?.endsWith("\n") ? 100 : 1000); // a block ends its line
    if (!block || full) place.append((block = div("block")));
    const kind = [Number.isNaN(numbers[i]) ? "none" : numbers[i] < 0 ? "down" : "up", tokens.clipped?.[i] ? "clipped" : ""].join(" ");
    const shown = text.replaceAll("\n", "↵\n") || "·"; // "·": a part of a character
    return block.appendChild(element("span", { className: kind, style: `--w: ${Math.round(75 * sizes[i])}%` }, shown));
  });
  place.at = pinned?.tokens === tokens ? pinned.at : sizes.indexOf(sizes.reduce((largest, x) => Math.max(largest, x), 0));
  place.move = (i, pin) => {
    place.at = (i + spans.length) % spans.length;
    pinned = pin ? { tokens, at: place.at } : null;
    $("sample").querySelector(".at")?.classList.remove("at");
    spans[place.at].classList.add("at");
    showToken(tokens, place.at);
    return spans[place.at];
  };
  const go = (span, pin) => span.localName === "span" && place.move(spans.indexOf(span), pin);
  place.onmousemove = ({ target }) => !pinned && go(target); // not by scrolling
  place.onclick = ({ target }) => go(target, !pinned || !target.matches(".at")); // a second click unpins
  return place;
}

/** Show the number of a token that its colour stands for at the bottom of the window, and unfolded all, with what they mean. */
function showToken(tokens, i) {
  const small = (x) => (x && Math.abs(x) < 1e-4 ? "≈ 0" : format(x));
  const of = (name) => numberOf(tokens, name, i);
  const text = (name) => {
    if (["clipped", "trains"].includes(name)) return of(name) ? "yes" : "no";
    if (name.endsWith("logprobs")) return `${small(of(name))} (${of(name) > -5e-4 ? "over 99.9" : format(100 * Math.exp(of(name)))}%)`;
    if (name !== "push") return small(of(name));
    const rest = small(1 - Math.exp(of("start_logprobs")));
    return `${small(of(name))}: advantage ${small(of("advantages"))} × weight ${small(of("weights"))} × (1 - probability) ${rest}`;
  };
  const known = [...$("colour").options].filter((option) => !Number.isNaN(of(option.value)));
  const unbroken = (says) => says.split(/(--\w+)/).map((part, i) => (i % 2 ? element("span", { className: "flag" }, part) : part));
  const fact = ({ text: name, value }) => `${name} ${text(value)}`;
  $("number").replaceChildren(element("b", {}, `${i + 1}: ${JSON.stringify(tokens.texts[i])} `), ...known.filter(({ selected }) => selected).map(fact));
  $("numbers").replaceChildren(...known.map((option) => div("", element("b", {}, fact(option)), unbroken(option.title.replace(/.* \|/, ":")))));
}
