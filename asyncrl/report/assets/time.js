// Where the time went: stacked bars a step, strips of every process, one step against the usual.

const WAITS = ["wait_batch", "wait_credit", "wait_score", "wait_weights"];
const ORDER = ["forward", "backward", "optimizer", "build", "decode", "prefill", "score", "snapshot", "adopt", "probe",
  "canary", "checkpoint", "record", "eval", "start", "other", "idle", ...WAITS];
const doing = (cause) => (DATA.glossary.causes[cause] ? `${cause}: ${DATA.glossary.causes[cause]}` : cause);
const byOrder = (causes) => Object.keys(causes).sort((a, b) => place(a) - place(b));
const place = (cause) => (ORDER.indexOf(cause) < 0 ? ORDER.indexOf("other") - 0.5 : ORDER.indexOf(cause));
const sum = (causes) => Object.values(causes).reduce((a, b) => a + b, 0);

function causeLegend(names) {
  return legend([...names].sort((a, b) => place(a) - place(b)).map((c) => [c, colour(c), doing(c)]));
}

function added(list) {
  const total = {};
  for (const causes of list) for (const [c, s] of Object.entries(causes || {})) total[c] = (total[c] || 0) + s;
  return total;
}

// One column a step, or a few steps, of all seconds of a kind; as seconds or as shares.
function stackedSteps(kind, title, note, asShares) {
  const all = DATA.causes.by_step.map((kinds) => kinds[kind] || null);
  if (!all.some(Boolean)) return null;
  const steps = Steps.list;
  const each = Math.ceil(steps.length / 220);
  const columns = [];
  for (let i = 0; i < steps.length; i += each) {
    const inside = all.slice(i, i + each).filter(Boolean);
    const causes = added(inside);
    const count = asShares ? sum(causes) : Math.max(1, inside.length);
    columns.push({ step: steps[i], causes, count, seconds: sum(causes) / Math.max(1, inside.length) });
  }
  // A start-up of seconds must not flatten a run of milliseconds: what is far above the rest is cut off.
  const sizes = columns.map((c) => sum(c.causes) / (c.count || 1)).sort((a, b) => a - b);
  const top = asShares ? 1 : Math.min(sizes[sizes.length - 1], 2.5 * sizes[Math.floor(0.9 * (sizes.length - 1))]) || 1e-9;
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "click", "data-own-tip": true, role: "img", "aria-label": title });
  const py = (v) => TOP + (1 - v / top) * (H - TOP - BOTTOM);
  for (const t of ticks(0, top, 4)) {
    root.append(svg("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: py(t), y2: py(t) }),
      svg("text", { x: LEFT - 5, y: py(t) + 4, "text-anchor": "end" }, asShares ? percent(t) : seconds(t)));
  }
  const xLow = steps[0], xHigh = Math.max(steps[steps.length - 1], xLow + 1);
  const room = (W - LEFT - RIGHT) / columns.length;
  columns.forEach((column, i) => {
    let from = 0;
    for (const cause of byOrder(column.causes)) {
      const size = Math.min(column.causes[cause] / (column.count || 1), top - from);
      root.append(svg("rect", { x: LEFT + i * room, width: Math.max(0.5, room - (room > 4 ? 1 : 0)), y: py(from + size),
        height: Math.max(0, py(from) - py(from + size)), style: { fill: colour(cause) } }));
      from += size;
    }
    if (!asShares && sum(column.causes) / (column.count || 1) > top * 1.001) {
      const x = LEFT + (i + 0.5) * room;
      root.append(svg("path", { d: `M${x - 4} ${TOP - 1}L${x + 4} ${TOP - 1}L${x} ${TOP - 7}Z`, style: { fill: "var(--c4)" } }));
    }
  });
  const px = (step) => LEFT + ((Steps.index(step) / each) + 0.5 / each) * room;
  for (const t of ticks(xLow, steps[steps.length - 1], 6).filter((s) => Steps.index(s) >= 0)) {
    root.append(svg("text", { x: px(t), y: H - 5, "text-anchor": "middle" }, t));
  }
  const mark = svg("line", { class: "mark", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  root.append(mark, cursor);
  const text = (step) => {
    const causes = all[Steps.index(step)] || {};
    const total = sum(causes) || 1;
    return [`step ${step}: ${seconds(total)}`, ...byOrder(causes).reverse().filter((c) => causes[c] > 0.005 * total)
      .map((c) => `${c} ${percent(causes[c] / total)} (${seconds(causes[c])})`)].join("\n");
  };
  followSteps(root, mark, cursor, { xLow, xHigh: steps[steps.length - 1], px, x: "step", text });
  return card(title, note, root, causeLegend(Object.keys(added(all))));
}

const drawers = [];

// Every process over the whole run, or over its training.
function stripCard() {
  const strips = DATA.causes.strips;
  if (!strips.processes || !strips.processes.length) return null;
  const names = new Set(strips.views.flatMap((view) => view.bins.flatMap((bins) => bins.flatMap((bin) => Object.keys(bin)))));
  let view = strips.views[strips.views.length - 1];
  const at = (canvas, event) => {
    const box = canvas.getBoundingClientRect();
    const part = Math.max(0, Math.min(0.9999, (event.clientX - box.left) / box.width));
    const time = view.start + part * view.seconds;
    return { part, time, step: strips.steps.find((s) => s[1] <= time && time < s[2]) };
  };
  const rows = strips.processes.map((process, i) => {
    const canvas = el("canvas", { "data-own-tip": true, "aria-label": process.name, class: "click" });
    drawers.push(() => paint(canvas, view.bins[i]));
    canvas.addEventListener("mousemove", (event) => {
      const { part, time, step } = at(canvas, event);
      const causes = view.bins[i][Math.floor(part * view.bins[i].length)];
      showTip([`${process.name} at ${seconds(time)}${step ? `, step ${step[0]}` : ""}`, ...byOrder(causes).reverse()
        .filter((c) => causes[c] >= 0.01).map((c) => `${c} ${percent(causes[c])}`)].join("\n"), event.clientX, event.clientY);
    });
    canvas.addEventListener("mouseleave", hideTip);
    canvas.addEventListener("click", (event) => {
      const { step } = at(canvas, event);
      if (step) Steps.choose(step[0], true);
    });
    return el("div", { class: "strip" }, el("span", null, process.name), canvas);
  });
  const scale = el("div", { class: "scale-row" });
  const buttons = strips.views.map((v) => el("button", { onclick: () => { view = v; draw(); } }, v.name));
  const draw = () => {
    buttons.forEach((button, i) => { button.className = strips.views[i] === view ? "on" : ""; });
    scale.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((f) => el("span", { class: "faint" }, seconds(view.start + f * view.seconds))));
    paintAll();
  };
  draw();
  return card("Every process", "empty: not running; orange and red: waiting; a click goes to the step",
    el("div", { class: "tools" }, el("span", null, buttons)), rows, el("div", { class: "strip" }, el("span"), scale), causeLegend(names));
}

function paint(canvas, bins) {
  if (!canvas.clientWidth) return; // not on the page yet
  const ratio = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const context = canvas.getContext("2d");
  const styles = getComputedStyle(document.documentElement);
  const room = canvas.width / bins.length;
  bins.forEach((bin, i) => {
    let from = 0;
    for (const cause of byOrder(bin)) {
      const size = Math.min(1, bin[cause]) * canvas.height;
      context.fillStyle = styles.getPropertyValue("--" + cause).trim() || styles.getPropertyValue("--other").trim();
      context.fillRect(i * room, canvas.height - from - size, room + 0.5, size);
      from += size;
    }
  });
}
function paintAll() { for (const draw of drawers) draw(); }

function shareBar(causes) {
  const total = sum(causes) || 1;
  return el("div", { class: "bar" }, byOrder(causes).map((c) =>
    el("i", { "data-tip": `${doing(c)}\n${percent(causes[c] / total)}, ${seconds(causes[c])}`,
      style: { width: (100 * causes[c]) / total + "%", background: colour(c) } })));
}

// One step: how long, why, and everything else that is known of it.
function stepCard(showRollouts) {
  if (!Steps.list.length) return null;
  const input = el("input", { type: "number", "aria-label": "step", onchange: () => Steps.choose(Number(input.value)) });
  const go = (by) => () => {
    const index = Math.max(0, Math.min(Steps.list.length - 1, Steps.index(Steps.chosen) + by));
    Steps.choose(Steps.list[index]);
  };
  const body = el("div");
  const slowest = DATA.notes.times.map((t, i) => [t[0], i]).filter((t) => t[0] > 0).sort((a, b) => b[0] - a[0]).slice(0, 6);
  Steps.watchers.push((step) => {
    input.value = step;
    body.replaceChildren(...stepBody(step, showRollouts));
  });
  return card(null, null, el("div", { class: "tools" },
    el("button", { onclick: go(-1), "aria-label": "previous step" }, "\u2039"), el("label", null, "step", input),
    el("button", { onclick: go(1), "aria-label": "next step" }, "\u203a"),
    el("label", null, "the slowest", el("div", null, slowest.map(([s, i]) =>
      el("button", { onclick: () => Steps.choose(Steps.list[i]) }, `${Steps.list[i]} (${seconds(s)})`))))), body);
}

const FACTS = ["reward/mean", "groups/frac_teaching", "groups/frac_mixed", "tokens/trained", "tokens/completion_mean", "staleness/mean", "staleness/max",
  "mismatch/k3", "correction/ess", "optimizer/grad_norm", "policy/entropy", "rate/trained_tokens_per_s", "staleness/queued_s"];

// As slow.py has it: cause by cause the median of up to 10 steps on each side that took any time.
function usualCauses(index) {
  const around = DATA.causes.by_step.map((kinds) => kinds.learner || {})
    .filter((causes, i) => i !== index && Math.abs(i - index) <= 10 && sum(causes) > 0);
  return Object.fromEntries(Object.keys(added(around)).map((c) => [c, median(around.map((causes) => causes[c] || 0))]));
}

function stepBody(step, showRollouts) {
  const index = Steps.index(step);
  const [, usual_s, slow, why] = DATA.notes.times[index];
  const kinds = DATA.causes.by_step[index];
  const value = (name) => (metric(name) ? metric(name)[index] : null);
  const alerts = DATA.notes.alerts.filter((a) => a.step === step);
  const usual = usualCauses(index);
  const row = (label, causes, total) => causes && sum(causes) > 0 ? [el("span", { class: "soft" }, label), shareBar(causes),
    el("span", { class: "num" }, seconds(total ?? sum(causes)))] : null;
  return [
    el("p", { class: "says" + (slow ? " bad" : "") }, el("b", null, `Step ${step} took `), why,
      DATA.causes.exact[index] ? null : el("span", { class: "soft" }, " (without a trace a short step's times are those of a second)")),
    el("div", { class: "rows" }, row("learner", kinds.learner), row("usual (\u00b1 10 steps)", usual, usual_s),
      row("generators meanwhile", kinds.generator), row("scorers", kinds.scorer)),
    el("p", { class: "pairs" }, FACTS.filter((name) => isNumber(value(name))).map((name) =>
      el("span", { "data-tip": meaning(name) }, name + " ", el("b", null, show(value(name)))))),
    DATA.notes.skipped[index] ? el("p", { class: "bad" }, `No weight changed: ${DATA.notes.skipped[index]}.`) : null,
    alerts.map((a) => el("p", { class: "bad" }, a.text)),
    showRollouts && DATA.rollouts.rows.length ? el("p", null, el("button", { onclick: () => showRollouts(step) }, `rollouts of step ${step}`)) : null,
  ].flat().filter(Boolean);
}
