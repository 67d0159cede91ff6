// The start: choices that depend on the samples, what was open before a reload, listeners.
const add = (id, names) => $(id).append(...[...new Set(names)].map((name) => element("option", { value: name }, name)));
add("filter-reason", SAMPLES.map((sample) => sample.stop_reason).filter(Boolean));
add("filter-score", SCORES);
const ROWS = SAMPLES.map((sample) => sample.tokens).filter(Boolean);
const listed = ["step", "sample", "place", "texts", ...[...$("colour").options].map((option) => option.value)];
add("colour", ROWS.flatMap(Object.keys).filter((name) => !listed.includes(name)));
const colours = (tokens, name) => tokens.texts.some((_, i) => !Number.isNaN(numberOf(tokens, name, i)));
for (const option of [...$("colour").options]) // "": plain text
  if (option.value && !ROWS.some((tokens) => colours(tokens, option.value))) option.remove();

const KEPT = JSON.parse(sessionStorage.getItem(location.pathname) ?? '{"controls": [], "scrolled": [0, 0]}');
for (const [id, value, checked] of KEPT.controls) if ($(id)) Object.assign($(id), { value, checked });
$("more").open = KEPT.more;
window.addEventListener("pagehide", () => {
  const controls = [...document.querySelectorAll("input, select")].map((each) => [each.id, each.value, each.checked]);
  const scrolled = [scrollY, $("sample-list").scrollTop];
  sessionStorage.setItem(location.pathname, JSON.stringify({ controls, more: $("more").open, scrolled }));
});

$("curves").addEventListener("input", showCards);
const events = [[$("more"), "toggle"], [window, "resize"], [matchMedia("print"), "change"]];
for (const [target, name] of events) target.addEventListener(name, redraw);
$("samples").addEventListener("input", showList);
showCards();
showList();
scrollTo(0, KEPT.scrolled[0]);
$("sample-list").scrollTop = KEPT.scrolled[1];
