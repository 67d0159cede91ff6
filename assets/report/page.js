// What the other scripts share: the data, elements, numbers.
const { runs: RUNS } = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

/** Return an element with some properties; its children are elements, texts or null. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

/** Return a number with some significant digits, or without decimals. */
function format(x, digits = 3) {
  if (typeof x !== "number") return x ?? "–";
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
}

const div = (className, ...children) => element("div", { className }, ...children);
const dot = (number) => element("span", { className: "dot", style: `background: var(--c${number % 8})` });
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const deviation = (values) => Math.sqrt((mean(values.map((x) => (x - mean(values)) ** 2)) * values.length) / (values.length - 1));
