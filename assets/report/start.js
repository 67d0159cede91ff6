// The start: choices that depend on the samples, what was open before a reload, listeners.
const add = (id, names) => $(id).append(...[...new Set(names)].map((name) => element("option", { value: name }, name)));
add("filter-stop_reason", SAMPLES.map((sample) => sample.stop_reason).filter(Boolean));
add("filter-score", SCORES);
const ROWS = SAMPLES.map((sample) => sample.tokens).filter(Boolean);
add("colour", ROWS.flatMap(Object.keys).filter((name) => ![...$("colour").options].some(({ value }) => value === name)));
const isKnown = (name) => ROWS.some((tokens) => tokens.texts.some((_, i) => Number.isFinite(numberOf(tokens, name, i))));
for (const option of [...$("colour").options]) if (option.value && !isKnown(option.value)) option.remove(); // "": plain text

const KEPT = JSON.parse(sessionStorage.getItem(location.pathname) ?? '{"controls": [], "scrolled": [0, 0]}');
for (const [id, value, checked, open] of KEPT.controls) if ($(id)) Object.assign($(id), { value, checked, open });
if (SAMPLES.length) window.addEventListener("pagehide", () => { // without samples some controls have no value to keep
  const states = [...document.querySelectorAll("input[id], select, details")].map(({ id, value, checked, open }) => [id, value, checked, open]);
  sessionStorage.setItem(location.pathname, JSON.stringify({ controls: states, scrolled: [scrollY, $("sample-list").scrollTop] }));
});

$("curves").addEventListener("input", showCards);
$("more").ontoggle = window.onresize = matchMedia("print").onchange = showCards;
$("filter-step").oninput = ({ target }) => { // of an earlier click, the list may be of another kind than the step has
  const kinds = SAMPLES.filter((sample) => String(sample.step) === target.value).map((sample) => String(sample.held_out));
  if (!kinds.includes($("filter-held_out").value)) $("filter-held_out").value = "";
};
$("filters").addEventListener("input", ({ target }) => showList(target.id !== "filter-order"));
$("colour").addEventListener("input", () => open(chosen("selected"), chosen("other")));
$("browser").onkeydown = (event) => { // move among the tokens in focus, or those of the response that was chosen last
  const place = event.target.closest(".tokens") ?? [...document.querySelectorAll(".tokens")].at($("other").value ? 1 : 0);
  const to = { ArrowRight: place?.at + 1, ArrowLeft: place?.at - 1, Home: 0, End: -1 }[event.key];
  if (!place || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  place.move(to)?.scrollIntoView({ block: "nearest" });
};
showCards();
showList();
scrollTo(0, KEPT.scrolled[0]);
$("sample-list").scrollTop = KEPT.scrolled[1];
