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
$("filter-step").oninput = () => ($("filter-held_out").value = ""); // of an earlier click on a curve, which the step may not have
$("filters").addEventListener("input", ({ target }) => showList(target.id !== "filter-order"));
$("colour").addEventListener("input", () => open(chosen("selected"), chosen("other"), pinned));
const focusList = () => document.querySelector("[name=sample]:checked")?.focus({ preventScroll: true });
$("browser").onchange = () => [...document.querySelectorAll(".tags")].at($("other").value ? -1 : 0)?.scrollIntoView({ block: "nearest" });
$("samples").addEventListener("click", ({ target, detail }) => detail && !target.closest("label, input, select") && focusList()); // no detail: a key
$("browser").onkeydown = (event) => { // move among the tokens; a list that has the focus moves by itself
  const place = document.querySelector(".at")?.closest(".tokens");
  const to = { ArrowRight: place?.at + 1, ArrowLeft: place?.at - 1, Home: 0, End: -1 }[event.key];
  if (!place || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  place.move(to, true).scrollIntoView({ block: "nearest" });
};
showCards();
showList();
scrollTo(0, KEPT.scrolled[0]);
$("sample-list").scrollTop = KEPT.scrolled[1];
