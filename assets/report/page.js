// What the other scripts share: the data, elements, numbers.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const $ = (id) => document.getElementById(id);

/** Return an element; attributes that start with "on" are listeners; children are elements, texts or null. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

/** Return a number with three significant digits, or without decimals. */
function format(x) {
  if (typeof x !== "number") return x ?? "–";
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)));
}

const dot = (number) => element("span", { class: "dot", style: `background: var(--c${number % 8})` });
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
