"use strict";
// Elements, numbers and colours for the other parts. Text reaches the page as text nodes only.

const DATA = JSON.parse(document.getElementById("data").textContent);
for (const names of Object.values(DATA.glossary)) Object.setPrototypeOf(names, null); // a name may be "constructor"
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

function show(x, unit) {
  if (!isNumber(x)) return "-";
  const size = Math.abs(x);
  let text;
  if (x === 0) text = "0";
  else if (Number.isInteger(x) && size < 1e5) text = String(x);
  else if (size >= 1e9) text = (x / 1e9).toFixed(1) + "G";
  else if (size >= 1e6) text = (x / 1e6).toFixed(1) + "M";
  else if (size >= 1e4) text = (x / 1e3).toFixed(1) + "k";
  else if (size >= 100) text = x.toFixed(0);
  else if (size >= 0.01) text = String(+x.toPrecision(3));
  else text = x.toExponential(1);
  return unit && unit !== "1" ? text + " " + unit : text;
}
const percent = (x) => (isNumber(x) ? (100 * x).toFixed(x > 0 && x < 0.095 ? 1 : 0) + " %" : "-");

function seconds(x) {
  if (!isNumber(x)) return "-";
  if (x < 1) return (1000 * x).toFixed(0) + " ms";
  if (x < 100) return x.toFixed(1) + " s";
  if (x < 6000) return (x / 60).toFixed(1) + " min";
  return (x / 3600).toFixed(1) + " h";
}

const colour = (name) => `var(--${name}, var(--other))`;
const seriesColour = (index) => `var(--c${index % 6})`;
const ageColour = (age) => `var(--a${Math.max(0, Math.min(5, age))})`;

function legend(entries) {
  return el("div", { class: "legend" }, entries.map(([name, fillColour, title]) =>
    el("span", { "data-tip": title }, el("i", { style: { background: fillColour } }), name)));
}

// One tooltip for everything that has data-tip.
const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
const hideTip = () => { tip.hidden = true; };
document.addEventListener("mousemove", (event) => {
  const node = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (node) showTip(node.getAttribute("data-tip"), event.clientX, event.clientY);
  else if (!event.target.closest || !event.target.closest("[data-own-tip]")) hideTip();
});
document.addEventListener("scroll", hideTip, { passive: true });

// The step that is looked at; whoever draws one is told when it changes.
const Steps = { chosen: null, watchers: [], list: DATA.steps.step || [] };
Steps.index = (step) => Steps.list.indexOf(step);
Steps.choose = (step, scroll) => {
  if (!Steps.list.length) return;
  const last = Steps.list[Steps.list.length - 1];
  Steps.chosen = Steps.index(step) >= 0 ? step : Math.max(Steps.list[0], Math.min(last, step));
  if (Steps.index(Steps.chosen) < 0) Steps.chosen = last;
  for (const watcher of Steps.watchers) watcher(Steps.chosen);
  if (scroll) document.getElementById("step").scrollIntoView({ behavior: "smooth" });
};

const metric = (name) => DATA.steps[name] || null;
const meaning = (name) => {
  const found = DATA.glossary.metrics[name.split("@")[0]];
  return found ? `${name}: ${found[1]}` : name;
};
const last = (values) => {
  for (let i = (values || []).length - 1; i >= 0; i--) if (isNumber(values[i])) return values[i];
  return null;
};
const first = (values) => (values || []).find(isNumber) ?? null;
const mean = (values) => {
  const known = (values || []).filter(isNumber);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};
const largest = (values) => (values || []).reduce((a, b) => (isNumber(b) && (a === null || b > a) ? b : a), null);

function section(id, title, note, ...children) {
  return el("section", null, el("h2", { id }, title, note ? el("small", null, note) : null), children);
}
const table = (attributes, ...parts) => el("div", { class: "scroll" }, el("table", attributes, ...parts)); // wider than its card
const card = (title, note, ...children) =>
  el("div", { class: "card" }, title ? el("h3", null, title, note ? el("small", null, note) : null) : null, children);
