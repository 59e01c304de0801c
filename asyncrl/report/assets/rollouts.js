// The rollout browser: filter, sort, page, and one group side by side.

const GROUPS = DATA.rollouts.groups;
const G = Object.fromEntries(DATA.rollouts.names.group.map((name, i) => [name, i]));
const R = Object.fromEntries(DATA.rollouts.names.row.map((name, i) => [name, i]));
// What the page had no room for: "1234 in rollouts.jsonl, 16 in drops.jsonl", or "".
const LEFT_OUT = Object.entries(DATA.rollouts.left_out).filter(([, n]) => n > 0).map(([name, n]) => `${n} in ${name}`).join(", ");
const PAGE = 20, MANY_TOKENS = 600;

const ROWS = DATA.rollouts.rows.map((row) => {
  const group = GROUPS[row[R.group]];
  const spans = row[R.spans];
  return {
    row, group, step: group[G.step], score: row[R.score], advantage: row[R.advantage], num_tokens: row[R.num_tokens],
    fate: row[R.fate], staleness: spans.length ? group[G.step] - spans[0][0] : null, full: row[R.tokens] !== 0, search: null,
  };
});

const COLUMNS = [["step", "step", (r) => r.step], ["group", "group", (r) => r.group[G.id]], ["#", null, (r) => r.row[R.index]],
  ["score", "score", (r) => show(r.score)], ["advantage", "advantage", (r) => show(r.advantage)],
  ["staleness", "staleness", (r) => r.staleness ?? "-"], ["tokens", "num_tokens", (r) => r.num_tokens]];

function fateTag(fate) {
  const lost = fate.startsWith("dropped") || fate === "unscored" || fate === "aborted";
  const text = DATA.glossary.fates[fate] || DATA.glossary.reasons[fate.replace("dropped: ", "")];
  return el("span", { class: "fate" + (lost ? " lost" : fate === "trained" ? "" : " none"), "data-tip": text }, fate || "-");
}

function textOf(r) {
  if (r.search === null) r.search = `${r.group[G.prompt]}\n${r.row[R.text]}\n${r.group[G.answer]}\n${r.row[R.detail]}`.toLowerCase();
  return r.search;
}

const Browser = { sort: "step", down: false, page: 0, chosen: null, mode: "version", filters: {} };

function matches() {
  const f = Browser.filters;
  const words = (f.text || "").toLowerCase();
  const within = (x, low, high) => (low === null && high === null) || (isNumber(x) && (low === null || x >= low) && (high === null || x <= high));
  return ROWS.filter((r) =>
    within(r.step, f.stepLow, f.stepHigh) && within(r.score, f.scoreLow, f.scoreHigh) && within(r.staleness, f.staleLow, f.staleHigh) &&
    (!f.fate || r.fate === f.fate) && (!f.generator || r.group[G.generator] === f.generator) && (!f.full || r.full) &&
    (!words || textOf(r).includes(words)));
}

function ordered(rows) {
  const key = Browser.sort, sign = Browser.down ? -1 : 1;
  const value = key === "group" ? (r) => r.group[G.id] : (r) => r[key];
  return rows.map((r, i) => [r, i]).sort(([a, i], [b, j]) => {
    const x = value(a), y = value(b);
    if (!isNumber(x) || !isNumber(y)) return isNumber(y) - isNumber(x) || i - j;
    return sign * (x - y) || i - j;
  }).map((pair) => pair[0]);
}

function rolloutSection() {
  const list = el("div"), count = el("span", { class: "soft" }), detail = el("div");
  const pager = el("span");
  const inputs = {};
  const refresh = (keepPage) => {
    if (!keepPage) Browser.page = 0;
    const found = ordered(matches());
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    Browser.page = Math.min(Browser.page, pages - 1);
    count.replaceChildren(`${found.length} of ${ROWS.length} rollouts` + (LEFT_OUT ? `; left out (--max-mb): ${LEFT_OUT}` : ""));
    const turn = (by) => () => { Browser.page += by; refresh(true); };
    pager.replaceChildren(el("button", { onclick: turn(-1), disabled: Browser.page === 0 }, "\u2039"),
      ` page ${Browser.page + 1} of ${pages} `, el("button", { onclick: turn(1), disabled: Browser.page >= pages - 1 }, "\u203a"));
    list.replaceChildren(rolloutTable(found.slice(Browser.page * PAGE, (Browser.page + 1) * PAGE), refresh, open));
  };
  const open = (r) => {
    Browser.chosen = r;
    detail.replaceChildren(groupCard(r, open));
    refresh(true);
  };
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(refresh, 150); };
  const field = (name, label, node) => { inputs[name] = node; return el("label", null, label, node); };
  const numberField = (name, label) => field(name, label, el("input", { type: "number", step: "any", oninput: (e) => {
    Browser.filters[name] = e.target.value === "" ? null : Number(e.target.value); later(); } }));
  const choice = (name, label, values) => field(name, label, el("select", { onchange: (e) => { Browser.filters[name] = e.target.value; refresh(); } },
    el("option", { value: "" }, "all"), values.map((v) => el("option", { value: v }, v))));
  const distinct = (value) => [...new Set(ROWS.map(value))].filter(Boolean).sort();
  for (const name of ["stepLow", "stepHigh", "scoreLow", "scoreHigh", "staleLow", "staleHigh"]) Browser.filters[name] = null;
  const tools = el("div", { class: "tools" },
    field("text", "text of prompt or completion", el("input", { type: "search", oninput: (e) => { Browser.filters.text = e.target.value; later(); } })),
    numberField("stepLow", "step from"), numberField("stepHigh", "to"), numberField("scoreLow", "score from"), numberField("scoreHigh", "to"),
    numberField("staleLow", "staleness from"), numberField("staleHigh", "to"), choice("fate", "what became of it", distinct((r) => r.fate)),
    choice("generator", "generator", distinct((r) => r.group[G.generator])),
    el("label", null, "every token", el("input", { type: "checkbox", "data-tip": "only rollouts of which every token is on record (telemetry.num_detailed_groups)",
      onchange: (e) => { Browser.filters.full = e.target.checked; refresh(); } })),
    el("button", { onclick: () => clearFilters() }, "clear"));
  const clearFilters = (filters = {}) => {
    for (const [name, node] of Object.entries(inputs)) {
      node.value = filters[name] ?? "";
      Browser.filters[name] = filters[name] ?? (["text", "fate", "generator"].includes(name) ? "" : null);
    }
    Browser.filters.full = false;
    tools.querySelector("[type=checkbox]").checked = false;
    refresh();
  };
  const showOnly = (filters, groupId) => {
    clearFilters(filters);
    const chosen = ordered(matches()).find((r) => groupId === undefined || r.group[G.id] === groupId);
    if (chosen) open(chosen);
    document.getElementById("rollouts").scrollIntoView({ behavior: "smooth" });
  };
  refresh();
  const start = ROWS.find((r) => r.full && r.advantage && r.row[R.spans].length > 1) || ROWS.find((r) => r.full && r.advantage) || ROWS.find((r) => r.full) || ROWS[0];
  if (start) open(start);
  const node = section("rollouts", "Rollouts", "every completion with the policy versions that sampled it; choose one to see its group",
    ROWS.length ? [card(null, null, tools, list, el("div", { class: "tools" }, pager, count)), detail]
      : el("p", { class: "soft" }, LEFT_OUT ? `All rollouts are left out (--max-mb): ${LEFT_OUT}.` : "No rollouts are on record (rollouts.jsonl is empty or missing)."));
  return [node, showOnly];
}

function rolloutTable(rows, refresh, open) {
  const sortBy = (key) => () => {
    Browser.down = Browser.sort === key ? !Browser.down : key !== "step";
    Browser.sort = key;
    refresh();
  };
  return table(null,
    el("thead", null, el("tr", null, COLUMNS.map(([label, key]) => el("th", { class: "num" + (key ? " sort" : ""), onclick: key && sortBy(key) },
      label + (Browser.sort === key ? (Browser.down ? " \u25be" : " \u25b4") : ""))), el("th", null, "became"), el("th", null, "prompt \u2192 completion"))),
    el("tbody", null, rows.map((r) => el("tr", { class: "click" + (r === Browser.chosen ? " open" : ""), tabindex: 0, onclick: () => open(r),
      onkeydown: (e) => { if (e.key === "Enter") open(r); } },
    COLUMNS.map(([, , value]) => el("td", { class: "num" }, value(r))), el("td", null, fateTag(r.fate)),
    el("td", { class: "cut mono" }, r.group[G.prompt].slice(-60), " \u2192 ", el("b", null, r.row[R.text].slice(0, 160)))))));
}

const MODES = {
  version: ["version", "which policy version sampled the token, by its age in the step that trained it"],
  surprise: ["log \u03bc", "log-prob under the behaviour policy: the darker, the less likely when it was sampled"],
  ratio: ["\u03c0/\u03bc", "proximal over behaviour policy: blue, the learner finds it likelier than the sampler did; red, less"],
  weight: ["weight", "what the correction multiplies the token's loss with; struck out: 0"],
};

function groupCard(chosen, open) {
  const { group } = chosen;
  const mates = ROWS.filter((r) => r.group === group);
  const body = el("div", { class: "mates" });
  const scale = el("span", { class: "scale" });
  const buttons = {};
  const draw = (mode) => {
    Browser.mode = mode;
    for (const [name, button] of Object.entries(buttons)) button.className = name === mode ? "on" : "";
    scale.replaceChildren(...scaleOf(mode, mates));
    body.replaceChildren(...mates.map((r) => mateCard(r, r === chosen, mode, open)));
  };
  const modes = el("span", null, Object.entries(MODES).map(([mode, [label, text]]) =>
    (buttons[mode] = el("button", { "data-tip": text, onclick: () => draw(mode) }, label))));
  const node = card(`Group ${group[G.id]} of step ${group[G.step]}`,
    `prompt ${group[G.ordinal]} of the stream${group[G.generator] ? `, sampled by ${group[G.generator]}` : ""}, ${mates.length} rollouts`,
    el("div", { class: "text mono", style: { "max-height": "220px" } }, group[G.prompt]),
    el("p", { class: "pairs" }, el("span", null, "answer ", el("b", { class: "mono" }, group[G.answer] || "-"))),
    el("div", { class: "tools" }, el("span", { class: "soft" }, "colour tokens by"), modes, scale), body);
  draw(Browser.mode);
  return node;
}

function scaleOf(mode, mates) {
  const swatch = (background, label) => [el("i", { style: { background } }), label];
  if (mode === "version") {
    const ages = [...new Set(mates.flatMap((r) => r.row[R.spans].map((s) => r.step - s[0])))].sort((a, b) => a - b);
    return ages.flatMap((age) => swatch(tint(ageColour(age), 55), age === 0 ? "this version" : `${age} version${age > 1 ? "s" : ""} old`));
  }
  if (mode === "surprise") return [...swatch(tint("var(--c3)", 0), "0"), ...swatch(tint("var(--c3)", 45), "-3"), ...swatch(tint("var(--c3)", 90), "-6 nats")];
  if (mode === "ratio") return [...swatch(tint("var(--c4)", 80), "1/e"), ...swatch("transparent", "1"), ...swatch(tint("var(--c0)", 80), "e")];
  return [...swatch(tint("var(--c4)", 80), "0"), ...swatch("transparent", "1"), ...swatch(tint("var(--c0)", 80), "2")];
}

const tint = (base, share) => `color-mix(in srgb, ${base} ${Math.round(share)}%, transparent)`;

function mateCard(r, chosen, mode, open) {
  const { row } = r;
  const spans = row[R.spans];
  return el("div", { class: "mate" + (chosen ? " chosen" : "") },
    el("div", { class: "top click", onclick: () => open(r) }, el("span", null, "#" + row[R.index]), el("span", null, "score ", el("b", null, show(r.score))),
      el("span", null, "advantage ", el("b", null, show(r.advantage))), el("span", null, r.num_tokens, " tokens, ", row[R.finish]),
      el("span", null, "mean log \u03bc ", show(row[R.mean_behaviour_logprob])), fateTag(r.fate)),
    el("div", { class: "top" }, spans.map(([version, from, to]) => el("span", null, el("b", null, `version ${version}`),
      spans.length > 1 ? ` tokens ${from}\u2013${to - 1}` : "", ` (${r.step - version} old)`))),
    el("div", { class: "versions" }, spans.map(([version, from, to]) => el("i", { "data-tip": `version ${version}: tokens ${from} to ${to - 1}`,
      style: { flex: to - from, background: ageColour(r.step - version) } }))),
    el("div", { class: "text mono" }, row[R.tokens] ? tokenSpans(r, mode) : row[R.text] || el("span", { class: "faint" }, "(empty)")),
    row[R.tokens] ? null : el("p", { class: "faint" }, "single tokens are not on record"),
    row[R.detail] ? el("p", { class: "soft" }, `${row[R.verdict]}: ${row[R.detail]}`) : null);
}

function tokenSpans(r, mode) {
  const texts = r.row[R.tokens][0];
  const shown = texts.slice(0, MANY_TOKENS).map((_, i) => tokenSpan(r, i, mode));
  if (texts.length <= MANY_TOKENS) return shown;
  const more = el("button", { onclick: () => more.replaceWith(...texts.slice(MANY_TOKENS).map((_, i) => tokenSpan(r, i + MANY_TOKENS, mode))) },
    `${texts.length - MANY_TOKENS} more tokens`);
  return [...shown, more];
}

function tokenSpan(r, i, mode) {
  const [texts, mu, pi, weights] = r.row[R.tokens];
  const span = r.row[R.spans].find((s) => s[1] <= i && i < s[2]);
  const version = span ? span[0] : null;
  const age = version === null ? null : r.step - version;
  const logRatio = isNumber(pi[i]) && isNumber(mu[i]) ? pi[i] - mu[i] : null;
  let background = null;
  if (mode === "version" && age !== null) background = tint(ageColour(age), 40);
  if (mode === "surprise" && isNumber(mu[i])) background = tint("var(--c3)", Math.min(90, -mu[i] * 15));
  if (mode === "ratio" && logRatio !== null) background = tint(logRatio > 0 ? "var(--c0)" : "var(--c4)", Math.min(80, Math.abs(logRatio) * 80));
  if (mode === "weight" && isNumber(weights[i])) background = tint(weights[i] > 1 ? "var(--c0)" : "var(--c4)", Math.min(80, Math.abs(weights[i] - 1) * 80));
  const lines = [`token ${i}: ${JSON.stringify(texts[i] ?? "")}`,
    version === null ? "version unknown" : `sampled by version ${version}, trained in step ${r.step}: ${age} version${age === 1 ? "" : "s"} old`,
    `log \u03bc ${show(mu[i])}, log \u03c0 ${isNumber(pi[i]) ? show(pi[i]) : "not computed"}`];
  if (logRatio !== null) lines.push(`\u03c0/\u03bc ${show(Math.exp(logRatio))}, weight ${show(weights[i])}`);
  const gone = mode === "weight" && weights[i] === 0;
  return el("span", { class: "tok" + (gone ? " gone" : "") + (texts[i] ? "" : " empty"), "data-tip": lines.join("\n"),
    style: background ? { background } : {} }, texts[i]);
}
