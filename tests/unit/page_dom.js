// Runs the script of a page against as much of a DOM as it uses, then clicks everything once.
// node page_dom.js PAGE: exit code 0 unless something is thrown; stdout has the page before any click as JSON,
// each element as {tag, class, tip, children} and each text as {text}.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");
const cut = (from, to) => page.slice(page.indexOf(from) + from.length, page.indexOf(to, page.indexOf(from)));

const clicks = [];
class Node {
  constructor(text, tag) {
    Object.assign(this, { text, tag, children: [], attributes: {}, value: "", clientWidth: 300, clientHeight: 20 });
    this.style = { setProperty() {} };
  }
  toJSON() {
    const { class: kind = "", "data-tip": tip = "" } = this.attributes;
    return this.tag ? { tag: this.tag, class: kind, tip, children: this.children } : { text: this.text };
  }
  append(...nodes) {
    for (const node of nodes) this.children.push(node instanceof Node ? node : new Node(String(node)));
  }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  replaceWith(...nodes) { nodes.map((node) => node instanceof Node || String(node)); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  addEventListener(name, call) { clicks.push([name, call, this]); }
  querySelector() { return new Node(); }
  closest() { return null; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 300, height: 20 }; }
  getContext() { return { fillRect() {} }; }
  scrollIntoView() {}
}
const known = { data: Object.assign(new Node(), { textContent: cut('<script type="application/json" id="data">', "</script>") }) };
Object.assign(globalThis, {
  Node, innerWidth: 1000, innerHeight: 800, devicePixelRatio: 1,
  document: {
    getElementById: (id) => (known[id] ??= new Node(undefined, id)),
    createElement: (tag) => new Node(undefined, tag), createElementNS: (_, tag) => new Node(undefined, tag), createTextNode: (text) => new Node(text),
    addEventListener() {}, body: new Node(), documentElement: new Node(),
  },
  addEventListener() {}, matchMedia: () => new Node(), getComputedStyle: () => ({ getPropertyValue: () => "" }),
});
(0, eval)(cut("<script>", "</script>").replace('"use strict";', ""));
process.stdout.write(JSON.stringify([known.top, known.main]));
for (const [name, call, target] of clicks.slice(0, 300)) {
  if (name === "mousemove" || name === "click") call({ target, clientX: 10, clientY: 10, key: "Enter" });
}
