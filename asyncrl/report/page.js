"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLORS = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => `var(--c${i})`);
const PER_PAGE = 50;

// Elements; texts are text nodes, so nothing of a run can become markup.
function make(tag, options = {}, ...children) {
  const svg = ["svg", "path", "rect", "text", "line", "title", "circle"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(options)) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}
const show = (x) => x === null || x === undefined ? "–" : Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(2) : +x.toPrecision(4) + "";

function figure(name, drawing, note = "") {
  const [unit, meaning] = DATA.meanings[name] || ["", note];
  return make("figure", {}, make("figcaption", {}, name, make("small", {}, meaning + (unit && unit !== "1" ? ` (${unit})` : ""))), drawing);
}

function lineChart(xs, ys) {
  const W = 300, H = 120, L = 44, B = 16;
  const points = xs.map((x, i) => [x, ys[i]]).filter(([, y]) => y !== null && y !== undefined);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  if (!points.length) return svg;
  const values = points.map(([, y]) => y);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const first = points[0][0], last = points[points.length - 1][0];
  const px = (x) => L + (W - L - 6) * (last === first ? 0.5 : (x - first) / (last - first));
  const py = (y) => 6 + (H - B - 10) * (1 - (y - low) / (high - low));
  for (const y of [low, (low + high) / 2, high]) {
    svg.append(make("line", { x1: L, x2: W - 6, y1: py(y), y2: py(y), stroke: "var(--line)" }));
    svg.append(make("text", { x: L - 4, y: py(y) + 3, "text-anchor": "end" }, show(y)));
  }
  svg.append(make("text", { x: L, y: H - 3 }, show(first)), make("text", { x: W - 6, y: H - 3, "text-anchor": "end" }, show(last)));
  const path = points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`).join("");
  svg.append(make("path", { d: path, fill: "none", stroke: COLORS[0], "stroke-width": 1.6 }));
  if (points.length < 200) for (const [x, y] of points) {
    const dot = make("circle", { cx: px(x), cy: py(y), r: 3, fill: "transparent" });
    dot.append(make("title", {}, `${x}: ${show(y)}`)); svg.append(dot);
  }
  return svg;
}

function barChart(bars) {
  const W = 300, H = 120, B = 16, entries = Object.entries(bars);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  const high = Math.max(...entries.map(([, y]) => y), 1e-12), wide = (W - 20) / Math.max(entries.length, 1);
  entries.forEach(([x, y], i) => {
    const tall = Math.max(0, (H - B - 18) * y / high);
    svg.append(make("rect", { x: 10 + i * wide + wide * 0.12, y: H - B - tall, width: wide * 0.76, height: tall, fill: COLORS[0], rx: 2 }));
    svg.append(make("text", { x: 10 + (i + 0.5) * wide, y: H - 4, "text-anchor": "middle" }, x));
    svg.append(make("text", { x: 10 + (i + 0.5) * wide, y: H - B - tall - 4, "text-anchor": "middle" }, show(y)));
  });
  return svg;
}

function stacked(kind) {
  const rows = DATA.shares.map((share) => share[kind] || {}), W = 1180, H = 110, L = 44;
  const causes = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const known = rows.filter((row) => Object.keys(row).length).length || 1;
  const mean = (cause) => rows.reduce((sum, row) => sum + (row[cause] || 0), 0) / known;
  causes.sort((a, b) => mean(b) - mean(a));
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" }), wide = (W - L - 6) / rows.length;
  rows.forEach((row, i) => {
    let at = 4;
    causes.forEach((cause, c) => {
      const tall = (H - 22) * (row[cause] || 0);
      if (!tall) return;
      const bar = make("rect", { x: L + i * wide, y: at, width: Math.max(wide - (wide > 4 ? 1 : 0), 0.4), height: tall, fill: COLORS[c % 8], opacity: c < 8 ? 1 : 0.55 });
      bar.append(make("title", {}, `step ${DATA.steps[i]}, ${cause}: ${(100 * row[cause]).toFixed(1)} %`));
      svg.append(bar); at += tall;
    });
  });
  svg.append(make("text", { x: L, y: H - 4 }, `step ${DATA.steps[0]}`), make("text", { x: W - 6, y: H - 4, "text-anchor": "end" }, DATA.steps[rows.length - 1] + ""));
  svg.append(make("text", { x: L - 4, y: 12, "text-anchor": "end" }, "100 %"));
  const legend = make("div", { class: "legend" });
  causes.forEach((cause, c) => legend.append(make("span", {}, make("i", { style: `background:${COLORS[c % 8]};opacity:${c < 8 ? 1 : 0.55}` }), `${cause} ${(100 * mean(cause)).toFixed(1)} %`)));
  return make("div", {}, make("h3", {}, kind), legend, svg);
}

function table(node, head, rows) {
  node.replaceChildren(make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))));
  const body = make("tbody");
  for (const row of rows) body.append(make("tr", {}, ...row.map((cell) => make("td", { class: typeof cell === "number" ? "number" : "text" }, typeof cell === "number" ? show(cell) : cell))));
  node.append(body);
}

function overview() {
  const { run, summary } = DATA;
  document.title = $("title").textContent = `${DATA.name}: asyncrl report`;
  const parts = [`${DATA.steps.length} steps`, summary.outcome ? `ended: ${summary.outcome}` : "not ended, or ended without a summary"];
  if (DATA.evals.length) parts.push(`held-out ${show(DATA.evals[0][1])} → ${show(DATA.evals[DATA.evals.length - 1][1])}`);
  if (run.started) parts.push(`started ${run.started}`);
  $("outcome").textContent = parts.join(" · ");
  if (DATA.evals.length) $("curves").append(figure("eval/score", lineChart(DATA.evals.map((e) => e[0]), DATA.evals.map((e) => e[1]))));
  for (const [name, ys] of Object.entries(DATA.curves)) $("curves").append(figure(name, lineChart(DATA.steps, ys)));
  $("diagnosis").textContent = DATA.diagnosis;
  for (const kind of ["learner", "generator", "scorer", "broker"]) if (DATA.shares.some((share) => share[kind])) $("shares").append(stacked(kind));
  const causes = [...new Set(Object.values(DATA.processes).flatMap((p) => Object.keys(p)))];
  table($("processes"), ["process", "all", ...causes], Object.entries(DATA.processes).map(([name, seconds]) =>
    [name, Object.values(seconds).reduce((a, b) => a + b, 0), ...causes.map((cause) => seconds[cause] || 0)]));
  const slow = [...DATA.why].sort((a, b) => b.seconds - a.seconds);
  table($("why"), ["step", "seconds", "limited by", "learner; generators", "skipped"], slow.map((w) => [w.step, w.seconds, w.limit, w.text, w.skipped]));
  $("ages").append(figure("tokens trained by staleness", barChart(DATA.staleness), "versions between sampling and training"));
  for (const [name, bars] of Object.entries(DATA.by_staleness)) if (Object.keys(bars).length) $("ages").append(figure(`${name} by staleness`, barChart(bars), `${(DATA.meanings[name] || ["", ""])[1]}; mean over steps`));
  const last = (name) => { const ys = DATA.ledger[name] || []; return ys.length ? ys[ys.length - 1] : 0; };
  $("balance").textContent = `Of ${last("ledger/admitted")} groups started, ${last("ledger/trained")} were trained, ${last("ledger/dropped_stale")} dropped as too old, ` +
    `${last("ledger/dropped_filtered")} dropped without signal, ${last("ledger/failed")} failed; ${last("ledger/queued")} wait, ${last("ledger/in_flight")} are being sampled or scored.`;
  for (const [name, ys] of Object.entries(DATA.ledger)) $("books").append(figure(name, lineChart(DATA.steps, ys)));
  const columns = [...new Set(DATA.drops.flatMap((d) => Object.keys(d)))];
  if (columns.length) table($("drops"), columns, [...DATA.drops].reverse().map((d) => columns.map((c) => typeof d[c] === "number" ? d[c] : d[c] === undefined || d[c] === null ? "" : String(d[c]))));
  else $("drops").parentNode.parentNode.hidden = true;
  for (const [step, text] of DATA.alerts) $("alarms").append(make("li", {}, `step ${step}: ${text}`));
  if (!DATA.alerts.length) $("alarms").append(make("li", {}, "none"));
  $("origin").textContent = JSON.stringify(run, null, 1);
  $("config").textContent = DATA.config;
}

// Rollouts.
const versions = (r) => r.version_spans.map((s) => s[0]);
const stale = (r) => r.step - Math.min(...versions(r));
const KEYS = { step: (r) => r.step, score: (r) => r.score ?? Infinity, "-score": (r) => -(r.score ?? -Infinity), "-tokens": (r) => -r.num_tokens, "-stale": (r) => -stale(r), logprob: (r) => r.mean_behaviour_logprob };
let found = [], page = 0, chosen = null, mode = "likelihood";

function search() {
  const form = $("filter").elements, text = form.text.value.toLowerCase();
  const bound = (field, none) => form[field].value === "" ? none : +form[field].value;
  const from = bound("from", -Infinity), to = bound("to", Infinity), low = bound("low", null), high = bound("high", null);
  found = DATA.rollouts.filter((r) => r.step >= from && r.step <= to && (low === null || (r.score !== null && r.score >= low)) && (high === null || (r.score !== null && r.score <= high)) &&
    (!text || r.text.toLowerCase().includes(text) || r.prompt.toLowerCase().includes(text)));
  const key = KEYS[form.sort.value];
  found = found.map((r, i) => [key(r), i, r]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((item) => item[2]);
  page = 0; list();
}

function list() {
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  const left = DATA.num_rollouts - DATA.rollouts.length;
  $("count").textContent = `${found.length} of ${DATA.rollouts.length} trained rollouts` + (left ? `; ${left} more are in rollouts.jsonl (--max-rollouts)` : "") + ". Click one for its tokens and its group.";
  $("page").textContent = `${page + 1} / ${pages}`;
  const shown = found.slice(page * PER_PAGE, (page + 1) * PER_PAGE);
  table($("list"), ["step", "group", "score", "advantage", "fate", "versions", "staleness", "tokens", "end", "prompt", "completion"], shown.map((r) =>
    [r.step, r.group_id, r.score ?? r.verdict, r.advantage ?? "", r.fate ?? "", [...new Set(versions(r))].join(", "), stale(r), r.num_tokens, r.finish_reason, r.prompt.slice(-120), r.text.slice(0, 240)]));
  [...$("list").tBodies[0].rows].forEach((row, i) => { row.onclick = () => { chosen = shown[i]; detail(); [...row.parentNode.rows].forEach((r) => r.classList.toggle("chosen", r === row)); }; });
}

function tokens(r, oldest) {
  const pre = make("pre"), t = r.tokens;
  if (!t) { pre.append(r.text); return pre; }
  t.text.forEach((text, i) => {
    const version = (r.version_spans.find((s) => i >= s[1] && i < s[2]) || [0])[0], mu = t.behaviour_logprobs[i], pi = t.proximal_logprobs[i];
    const heat = by => Math.min(0.65, Math.max(0, by)).toFixed(2);
    const gap = mu === null || pi === null ? null : pi - mu;
    const color = mode === "ratio" ? (gap === null ? "transparent" : gap > 0 ? `rgba(42,157,92,${heat(gap)})` : `rgba(201,55,44,${heat(-gap)})`) : `rgba(217,130,43,${heat(mu === null ? 0 : -mu / 9)})`;
    const facts = [`token ${i}`, `version ${version}, staleness ${r.step - version}`, `log mu ${show(mu)}`, `log pi ${show(pi)}`, `ratio ${gap === null ? "–" : show(Math.exp(gap))}`, `weight ${show(t.behaviour_weights[i])}`];
    pre.append(make("span", { class: "token", style: `background:${color};border-color:${COLORS[(version - oldest) % 8]}`, title: facts.join("\n") }, text));
  });
  return pre;
}

function detail() {
  const mates = DATA.rollouts.filter((r) => r.step === chosen.step && r.group_id === chosen.group_id);
  const all = [...new Set(mates.flatMap(versions))].sort((a, b) => a - b), legend = make("div", { class: "legend" });
  for (const v of all) legend.append(make("span", {}, make("i", { style: `background:${COLORS[(v - all[0]) % 8]}` }), `sampled by version ${v} (staleness ${chosen.step - v})`));
  const scored = mates.map((r) => r.score).filter((s) => s !== null), mean = scored.reduce((a, b) => a + b, 0) / Math.max(scored.length, 1);
  const box = [make("h3", {}, `Group ${chosen.group_id}, trained in step ${chosen.step}; mean score ${show(mean)} of ${mates.length}`), make("p", {}, "Prompt"), make("pre", {}, chosen.prompt), make("p", {}, `Answer: ${chosen.answer}`), legend];
  if (mates.some((r) => r.tokens)) {
    const other = make("button", { type: "button" }, mode === "ratio" ? "shade by likelihood" : "shade by ratio pi / mu");
    other.onclick = () => { mode = mode === "ratio" ? "likelihood" : "ratio"; detail(); };
    const shade = mode === "ratio" ? "green where the learner finds the token likelier than the sampler did, red where less likely" : "the darker, the less likely it was";
    box.push(make("p", {}, `Underline: the version that sampled the token. Shade: ${shade}. Hover for figures. `, other));
  }
  for (const r of mates) box.push(make("div", { class: "mate" + (r === chosen ? " chosen" : "") }, make("p", {}, `#${r.index} · score ${r.score ?? r.verdict} (${r.score === null ? r.detail : "advantage " + show(r.advantage)}) · ${r.fate} · ${r.num_tokens} tokens · ${r.finish_reason} · mean log mu ${show(r.mean_behaviour_logprob)} · ` + r.version_spans.map(([v, a, b]) => `version ${v}: tokens ${a}–${b - 1}`).join(", ")), tokens(r, all[0])));
  $("detail").replaceChildren(...box);
}

overview();
$("filter").oninput = search;
$("filter").onsubmit = (event) => event.preventDefault();
$("back").onclick = () => { page -= 1; list(); };
$("next").onclick = () => { page += 1; list(); };
search();
if (found.length) { chosen = found.find((r) => r.tokens && new Set(versions(r)).size > 1) || found.find((r) => r.tokens) || found[0]; detail(); }
