// Line charts over steps and plain bars, as SVG.

const W = 520, H = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((u) => u * power >= rough) * power;
  const found = [];
  // By number, not by adding: of two values that are a last digit apart the unit adds nothing.
  for (let i = Math.ceil(low / unit), n = 0; i * unit <= high + unit * 1e-9 && n <= 2 * count; i++, n++) {
    found.push(Math.abs(i * unit) < unit * 1e-9 ? 0 : +(i * unit).toPrecision(12));
  }
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.ceil(low); e <= Math.floor(high); e++) found.push(e);
  return found.length ? found.filter((_, i) => i % Math.ceil(found.length / 5) === 0) : [low];
}

// At most two points a pixel: the lowest and the highest of each slice, so that no spike is lost.
function thinned(xs, ys) {
  const points = [];
  for (let i = 0; i < xs.length; i++) if (isNumber(ys[i])) points.push([xs[i], ys[i]]);
  const slices = 450;
  if (points.length <= 2 * slices) return points;
  const size = points.length / slices;
  const kept = [];
  for (let s = 0; s < slices; s++) {
    const slice = points.slice(Math.floor(s * size), Math.floor((s + 1) * size));
    let low = slice[0], high = slice[0];
    for (const p of slice) { if (p[1] < low[1]) low = p; if (p[1] > high[1]) high = p; }
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function running(ys) {
  const width = Math.max(3, Math.round(ys.length / 25));
  let sum = 0, count = 0;
  return ys.map((y, i) => {
    if (isNumber(y)) { sum += y; count++; }
    const old = ys[i - width];
    if (isNumber(old)) { sum -= old; count--; }
    return count ? sum / count : null;
  });
}

// series: {name, ys, colour, xs?, dots?, faint?, band? (ys of the other edge)}
function lineChart({ title, note, series, log = false, low = null, high = null, limit = null, unit = "", x = "step" }) {
  const drawn = series.filter((s) => s.ys && s.ys.some(isNumber));
  if (!drawn.length) return null;
  const steps = Steps.list;
  const transform = (y) => (log ? Math.log10(y) : y);
  const good = (y) => isNumber(y) && (!log || y > 0);
  let yLow = Infinity, yHigh = -Infinity, xLow = Infinity, xHigh = -Infinity;
  for (const s of drawn) {
    const xs = s.xs || steps;
    for (const list of s.band ? [s.ys, s.band] : [s.ys]) {
      list.forEach((y, i) => {
        if (!good(y)) return;
        yLow = Math.min(yLow, transform(y)); yHigh = Math.max(yHigh, transform(y));
        xLow = Math.min(xLow, xs[i]); xHigh = Math.max(xHigh, xs[i]);
      });
    }
  }
  if (yLow === Infinity) return null;
  if (low !== null && !log) yLow = Math.min(yLow, low);
  if (high !== null && !log) yHigh = Math.max(yHigh, high);
  if (limit !== null) yHigh = Math.max(yHigh, transform(limit));
  if (yLow === yHigh) { yHigh += Math.abs(yHigh) * 0.1 || (log ? 0.5 : 1); yLow -= log ? 0.5 : 0; }
  if (xLow === xHigh) xHigh = xLow + 1;
  const px = (v) => LEFT + ((v - xLow) / (xHigh - xLow)) * (W - LEFT - RIGHT);
  const py = (v) => TOP + (1 - (transform(v) - yLow) / (yHigh - yLow)) * (H - TOP - BOTTOM);
  const raw = (v) => TOP + (1 - (v - yLow) / (yHigh - yLow)) * (H - TOP - BOTTOM);

  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "click", "data-own-tip": true, role: "img", "aria-label": title });
  for (const t of log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, 4)) {
    root.append(svg("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: raw(t), y2: raw(t) }),
      svg("text", { x: LEFT - 5, y: raw(t) + 4, "text-anchor": "end" }, show(log ? 10 ** t : t)));
  }
  for (const t of ticks(xLow, xHigh, 6).filter(Number.isInteger)) {
    root.append(svg("text", { x: px(t), y: H - 5, "text-anchor": "middle" }, t));
  }
  if (limit !== null) root.append(svg("line", { class: "limit", x1: LEFT, x2: W - RIGHT, y1: py(limit), y2: py(limit) }));
  for (const s of drawn) drawSeries(root, s, steps, px, py, good);
  const mark = svg("line", { class: "mark", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  root.append(mark, cursor);
  followSteps(root, mark, cursor, { xLow, xHigh, px, x, text: (step) => tipOf(drawn, steps, step, unit, x) });
  const entries = drawn.filter((s) => s.name && !s.faint).map((s) => [s.name, s.colour, s.tip]);
  return card(title, note, root, entries.length > 1 || (entries[0] && entries[0][0] !== title) ? legend(entries) : null);
}

function drawSeries(root, s, steps, px, py, good) {
  const xs = s.xs || steps;
  const points = thinned(xs, s.ys).filter((p) => good(p[1]));
  const path = (list) => list.map(([a, b], i) => `${i ? "L" : "M"}${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join("");
  if (s.band) {
    const other = thinned(xs, s.band).filter((p) => good(p[1])).reverse();
    const area = path(points) + other.map(([a, b]) => `L${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join("") + "Z";
    root.append(svg("path", { d: area, style: { fill: s.colour, opacity: 0.18 } }));
    return;
  }
  if (s.dots || points.length === 1) {
    for (const [a, b] of points) root.append(svg("circle", { cx: px(a), cy: py(b), r: 3.5, style: { fill: s.colour } }));
  }
  if (points.length > 1) {
    root.append(svg("path", { d: path(points), style: {
      fill: "none", stroke: s.colour, "stroke-width": s.faint ? 1 : 1.8, opacity: s.faint ? 0.35 : 1,
      "stroke-dasharray": s.dots ? "3 3" : "none" } }));
  }
}

function tipOf(drawn, steps, step, unit, x) {
  const lines = [`${x} ${step}`];
  for (const s of drawn) {
    if (s.faint || !s.name) continue;
    const at = (s.xs || steps).indexOf(step);
    if (at < 0 || !isNumber(s.ys[at])) continue;
    lines.push(s.band ? `${s.name}: ${show(s.ys[at])} .. ${show(s.band[at])}` : `${s.name}: ${show(s.ys[at], unit)}`);
  }
  return lines.join("\n");
}

// The cursor under the mouse, the mark at the chosen step, a click to choose.
function followSteps(root, mark, cursor, { xLow, xHigh, px, x, text, width = W, left = LEFT, right = RIGHT }) {
  const at = (event) => {
    const box = root.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * width;
    return Math.round(Math.max(xLow, Math.min(xHigh, xLow + ((inside - left) / (width - left - right)) * (xHigh - xLow))));
  };
  root.addEventListener("mousemove", (event) => {
    const step = at(event);
    for (const a of ["x1", "x2"]) cursor.setAttribute(a, px(step));
    cursor.setAttribute("visibility", "visible");
    showTip(text(step), event.clientX, event.clientY);
  });
  root.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  root.addEventListener("click", (event) => Steps.choose(at(event), true));
  if (x !== "step") return;
  Steps.watchers.push((step) => {
    const inside = step >= xLow && step <= xHigh;
    for (const a of ["x1", "x2"]) mark.setAttribute(a, px(step));
    mark.setAttribute("visibility", inside ? "visible" : "hidden");
  });
}

// entries: [label, value, colour]; one bar each.
function barChart({ title, note, entries, unit = "" }) {
  const total = entries.reduce((sum, e) => sum + e[1], 0);
  if (!total) return null;
  const top = Math.max(...entries.map((e) => e[1]));
  return card(title, note, el("div", { class: "rows" }, entries.map(([label, value, fillColour]) => [
    el("span", { class: "soft" }, label),
    el("div", { class: "bar", "data-tip": `${label}: ${show(value, unit)}, ${percent(value / total)}` },
      el("i", { style: { width: (100 * value) / top + "%", background: fillColour } })),
    el("span", { class: "num" }, percent(value / total)),
  ])));
}
