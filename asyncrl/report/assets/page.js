// The page from top to bottom.

const RUN = DATA.run;
// Before the first step there is only start-up and evaluation, which limit nothing.
const LIMIT = DATA.steps.step ? DATA.causes.strips.sentence : "";
const AGES = Object.keys(DATA.steps).filter((n) => n.startsWith("staleness/tokens@")).map((n) => Number(n.split("@")[1])).sort((a, b) => a - b);

function header() {
  const total = RUN.num_steps, done = Steps.list.length ? Steps.list[Steps.list.length - 1] + 1 : 0;
  const evals = DATA.evals;
  const strips = DATA.causes.strips;
  const waits = (kind, cause) => (strips.shares && strips.shares[kind] ? strips.shares[kind][cause] || 0 : null);
  const tile = (value, label, title) => (value === null || value === "-" ? null : el("div", { class: "tile", "data-tip": title }, el("b", null, value), el("span", null, label)));
  const rewards = metric("reward/mean");
  const times = metric("time/step_s"), trained = metric("tokens/trained");
  const known = Steps.list.map((_, i) => i).filter((i) => trained && times && isNumber(trained[i]) && times[i] > 0);
  const over = (values) => known.reduce((total, i) => total + values[i], 0);
  return [
    el("div", null, el("h1", null, RUN.name), el("span", { class: "badge " + RUN.state }, RUN.state)),
    el("p", { class: "soft" }, RUN.verdict, ". ", el("span", { class: "mono" }, RUN.folder)),
    ...RUN.restarts.map((text) => el("p", { class: "soft" }, text)),
    el("p", { class: "pairs" }, RUN.short.map(([label, value]) => el("span", null, label + " ", el("b", null, String(value))))),
    el("div", { class: "tiles" },
      tile(`${done}${total ? " / " + total : ""}`, "steps trained"),
      rewards && tile(`${show(first(rewards))} \u2192 ${show(last(rewards))}`, "reward, first and last step"),
      evals.length ? tile(`${show(evals[0].mean_score)} \u2192 ${show(evals[evals.length - 1].mean_score)}`, `held-out score, version ${evals[0].version} and ${evals[evals.length - 1].version}`) : null,
      tile(`${show(largest(metric("staleness/max")))}${isNumber(RUN.max_staleness) ? " of " + RUN.max_staleness : ""}`, `staleness, largest; mean ${show(mean(metric("staleness/mean")))}`, "versions between sampling and training; the bound is k"),
      times && tile(seconds(times.reduce((a, b) => a + (b || 0), 0)), "training time"),
      known.length ? tile(show(over(trained) / over(times)), "trained tokens a second, over all steps") : null,
      waits("learner", "wait_batch") !== null ? tile(percent(waits("learner", "wait_batch")), "learner waits for batches") : null,
      waits("generator", "wait_credit") !== null ? tile(percent(waits("generator", "wait_credit")), "generators wait for credit") : null,
      tile(String(DATA.notes.alerts.length), "alerts")),
    LIMIT ? el("p", { class: "says" }, el("b", null, "What limits it: "), LIMIT + ".") : null,
  ];
}

const line = (name, label, index, more) => ({ name: label, ys: metric(name), colour: seriesColour(index), tip: meaning(name), ...more });
const smooth = (name, label, index) => (metric(name) && Steps.list.length > 40
  ? [line(name, label, index, { faint: true }), { name: label, ys: running(metric(name)), colour: seriesColour(index), tip: meaning(name) + " (running mean)" }]
  : [line(name, label, index)]);
const aged = (name) => AGES.map((d) => ({ name: `${d} old`, ys: metric(`${name}@${d}`), colour: ageColour(d), tip: `${meaning(name)}, tokens of staleness ${d}` }));

function curves() {
  const evals = { name: "held-out", ys: DATA.evals.map((e) => e.mean_score), xs: DATA.evals.map((e) => e.version), colour: seriesColour(2), dots: true, tip: "held-out evaluation, at its version" };
  const cards = [
    lineChart({ title: "Reward and held-out score", series: [...smooth("reward/mean", "reward", 0), evals] }),
    lineChart({ title: "Groups that teach", note: "a trained token has an advantage", low: 0, high: 1, series: [...smooth("groups/frac_teaching", "teach", 2), line("groups/frac_mixed", "scores differ", 3), line("groups/frac_solved", "solved", 0), line("groups/frac_zero_signal", "equal scores", 5)] }),
    lineChart({ title: "Policy loss", unit: "nats", series: smooth("loss/policy", "loss", 3) }),
    lineChart({ title: "Entropy", unit: "nats", low: 0, series: smooth("policy/entropy", "entropy", 1) }),
    lineChart({ title: "Gradient norm", log: true, series: smooth("optimizer/grad_norm", "norm", 5) }),
    lineChart({ title: "Completion length", unit: "tokens", low: 0, series: [...smooth("tokens/completion_mean", "mean length", 0)] }),
    lineChart({ title: "Tokens a second", low: 0, series: [line("rate/sampled_tokens_per_s", "sampled", 2), line("rate/trained_tokens_per_s", "trained", 0)] }),
    lineChart({ title: "Busy", low: 0, high: 1, series: [line("learner/busy_frac", "learner", 0), line("generator/busy_frac", "generators", 2)] }),
    anyMetric(),
  ];
  return section("curves", "Curves", "over steps; a click looks at the step", el("div", { class: "grid" }, cards));
}

function anyMetric() {
  const names = Object.keys(DATA.steps).filter((n) => n !== "step" && DATA.steps[n].some(isNumber)).sort();
  if (!names.length) return null;
  const host = el("div");
  const draw = () => {
    const name = select.value;
    const [unit] = DATA.glossary.metrics[name.split("@")[0]] || [""];
    host.replaceChildren(lineChart({ title: name, note: meaning(name).replace(name + ": ", ""), unit, series: [line(name, name, 4)] }) || "");
  };
  const select = el("select", { onchange: draw, "aria-label": "metric" }, names.map((n) => el("option", { value: n }, n)));
  select.value = names.includes("time/step_s") ? "time/step_s" : names[0];
  draw();
  return el("div", null, host, el("div", { class: "tools", style: { margin: "6px 0 0" } }, el("label", null, "any metric", select)));
}

function staleness() {
  const totals = AGES.map((d) => [d === 0 ? "0 (this version)" : `${d} version${d > 1 ? "s" : ""} old`, (metric(`staleness/tokens@${d}`) || []).reduce((a, b) => a + (b || 0), 0), ageColour(d)]);
  const byAge = (name) => AGES.map((d) => [`${d} old`, mean(metric(`${name}@${d}`)), ageColour(d)]).filter((e) => isNumber(e[1]));
  const meanRows = (name, title, note) => {
    const entries = byAge(name);
    if (!entries.length) return null;
    const top = Math.max(...entries.map((e) => Math.abs(e[1])), 1e-12);
    return card(title, note, el("div", { class: "rows" }, entries.map(([label, value, fillColour]) => [el("span", { class: "soft" }, label),
      el("div", { class: "bar" }, el("i", { style: { width: (100 * Math.abs(value)) / top + "%", background: fillColour } })), el("span", { class: "num" }, show(value))])));
  };
  return section("staleness", "Staleness and mismatch", "how old the trained tokens were, and how far the learner's policy had moved from the one that sampled them",
    el("div", { class: "grid" },
      barChart({ title: "Trained tokens by staleness", note: "whole run", entries: totals, unit: "tokens" }),
      lineChart({ title: "Staleness of trained tokens", low: 0, limit: isNumber(RUN.max_staleness) && RUN.max_staleness > 0 ? RUN.max_staleness : null, note: "dashed: k",
        series: [line("staleness/mean", "mean", 0), line("staleness/max", "largest", 1), line("staleness/bound", "bound in force", 5)] }),
      lineChart({ title: "Time in the queue", unit: "s", low: 0, series: smooth("staleness/queued_s", "seconds queued", 3) }),
      meanRows("mismatch/k3", "Mismatch by token age (k3)", "nats, mean of steps; at age 0 it is numerics alone"),
      lineChart({ title: "Mismatch k3 by token age", log: true, unit: "nats", series: aged("mismatch/k3") }),
      lineChart({ title: "|log \u03c0 - log \u03bc| by token age", log: true, unit: "nats", series: aged("mismatch/abs") }),
      lineChart({ title: "\u03c0/\u03bc of tokens", note: "1 % to 99 %", log: true, series: [
        { name: "1 % .. 99 %", ys: metric("mismatch/ratio_p1"), band: metric("mismatch/ratio_p99"), colour: seriesColour(0) }, line("mismatch/ratio_p50", "median", 0)] }),
      lineChart({ title: "Behaviour weights", note: "1 % to 99 %, after caps and masks", series: [
        { name: "1 % .. 99 %", ys: metric("correction/weight_p1"), band: metric("correction/weight_p99"), colour: seriesColour(3) }, line("correction/weight", "mean", 3)] }),
      lineChart({ title: "Effective share of tokens", low: 0, high: 1, series: [line("mismatch/ess", "before correction", 5), line("correction/ess", "after", 2), line("correction/dropped", "weight 0", 4)] })));
}

function bubbles() {
  const strips = DATA.causes.strips;
  const shares = strips.shares || {};
  return section("bubbles", "Where the time went", "every second of a process has one cause; waiting is orange and red",
    LIMIT ? el("p", { class: "says" }, LIMIT + ".") : el("p", { class: "soft" },
      !DATA.steps.step ? "No step is on record yet: what limits the run is not known." : DATA.causes.by_step.some((k) => k.learner) ? "No trace is on record (telemetry.trace=false): shares are those of metrics.jsonl." : "No times are on record."),
    el("div", { class: "grid two" },
      stackedSteps("learner", "Learner, seconds a step", "rank 0; \u25b2 higher than shown", false), stackedSteps("learner", "Learner, shares", "rank 0", true),
      stackedSteps("generator", "Generators, shares", "all of them together, while the step was made", true), stackedSteps("scorer", "Scoring processes, shares", "", true)),
    Object.keys(shares).length ? card("During training, as a whole", "start-up and the evaluations around it left out", el("div", { class: "rows" },
      Object.entries(shares).map(([kind, causes]) => [el("span", { class: "soft" }, kind), shareBar(causes), el("span", { class: "num soft" },
        percent(sum(Object.fromEntries([...WAITS, "idle"].map((w) => [w, causes[w] || 0])))) + " idle")]))) : null,
    stripCard());
}

function ledger(showDropped) {
  const parts = ["trained", "dropped_stale", "dropped_filtered", "failed", "queued", "in_flight"];
  const at = (name) => last(metric("ledger/" + name));
  const colours = { trained: "var(--c2)", dropped_stale: "var(--a3)", dropped_filtered: "var(--c1)", failed: "var(--c4)", queued: "var(--c0)", in_flight: "var(--c3)" };
  const admitted = at("admitted");
  const reasons = {};
  for (const drop of DATA.drops) reasons[drop.reason] = (reasons[drop.reason] || 0) + 1;
  return section("ledger", "The ledger", "every group that was started is in exactly one place",
    admitted === null ? el("p", { class: "soft" }, "No step is on record yet.") : card("Groups after the last step", `${admitted} admitted = ${parts.map((p) => `${at(p) || 0} ${p}`).join(" + ")}`,
      el("div", { class: "bar" }, parts.map((p) => el("i", { "data-tip": `${at(p) || 0} ${p}: ${meaning("ledger/" + p).split(": ")[1]}`, style: { width: (100 * (at(p) || 0)) / (admitted || 1) + "%", background: colours[p] } }))),
      legend(parts.map((p) => [`${p} ${at(p) || 0}`, colours[p], meaning("ledger/" + p)]))),
    el("div", { class: "grid two", style: { "margin-top": "12px" } },
      lineChart({ title: "Open groups", low: 0, series: [line("ledger/queued", "queued", 0), line("ledger/in_flight", "in flight", 3)] }),
      lineChart({ title: "Left untrained so far", low: 0, series: [line("ledger/dropped_filtered", "filtered", 1), line("ledger/failed", "failed", 4), line("ledger/dropped_stale", "stale", 3)] })),
    DATA.drops.length ? card("Groups that left untrained, by reason", `${DATA.drops.length} on record`, table(null, el("tbody", null,
      Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([reason, n]) => el("tr", null, el("td", { class: "num" }, n), el("td", null, fateTag("dropped: " + reason)),
        el("td", { class: "soft" }, DATA.glossary.reasons[reason] || "")))))) : admitted === null ? null : el("p", { class: "soft" }, "No group was dropped."),
    DATA.drops.length ? dropTable(showDropped) : null);
}

function dropTable(showDropped) {
  const kept = new Set(GROUPS.map((group) => group[G.id]));
  const host = el("div");
  let page = 0;
  const PER = 15;
  const draw = () => {
    const turn = (by) => () => { page += by; draw(); };
    const pages = Math.ceil(DATA.drops.length / PER);
    host.replaceChildren(table(null, el("thead", null, el("tr", null, ["at version", "group", "prompt", "attempt", "generator", "reason", "scores", ""].map((h) => el("th", null, h)))),
      el("tbody", null, DATA.drops.slice(page * PER, (page + 1) * PER).map((d) => el("tr", null, el("td", null, d.version), el("td", null, d.group_id), el("td", null, d.ordinal), el("td", null, d.attempt),
        el("td", null, d.generator), el("td", null, d.reason), el("td", { class: "mono" }, (d.scores || []).map((s) => show(s)).join(" ")), el("td", { class: "soft" }, d.again ? "its prompt is started again" : "", kept.has(d.group_id) && (d.scores || []).length
          ? el("button", { onclick: () => showDropped(d) }, "its rollouts") : null))))),
    el("div", { class: "tools", style: { margin: "8px 0 0" } }, el("button", { onclick: turn(-1), disabled: page === 0 }, "\u2039"), ` page ${page + 1} of ${pages} `, el("button", { onclick: turn(1), disabled: page >= pages - 1 }, "\u203a")));
  };
  draw();
  return card("One by one", null, host);
}

function alerts() {
  const began = DATA.notes.alerts;
  const onNow = DATA.notes.on.length ? DATA.notes.on[DATA.notes.on.length - 1] : [];
  const open = (step) => () => Steps.choose(step, true);
  const rows = (list) => table(null, el("tbody", null, list.map((a) => el("tr", { class: "click", tabindex: 0, onclick: open(a.step) }, el("td", { class: "num" }, `step ${a.step}`), el("td", null, a.text)))));
  return section("alerts", "Alerts", onNow.length ? `on in the last step: ${onNow.join(", ")}` : null,
    began.length ? card(null, null, rows(began.slice(0, 30)), began.length > 30 ? el("details", null, el("summary", null, `${began.length - 30} more`), rows(began.slice(30))) : null) : el("p", { class: "soft" }, "None."));
}

function evaluations() {
  if (!DATA.evals.length) return section("evals", "Evaluations", null, el("p", { class: "soft" }, "None on record."));
  return section("evals", "Evaluations", "held-out problems, each evaluation under exactly one version", card(null, null, table({ class: "narrow" },
    el("thead", null, el("tr", null, ["version", "score", "prompts", "samples scored", "unscored", "mean tokens", "took"].map((h) => el("th", { class: "num" }, h)))),
    el("tbody", null, DATA.evals.map((e) => el("tr", null, [e.version, show(e.mean_score), e.num_prompts, e.num_samples, e.num_unscored, show(e.mean_tokens), seconds(e.seconds)].map((v) => el("td", { class: "num" }, v ?? "-"))))))));
}

function origin() {
  const facts = [];
  const walk = (value, path) => {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) for (const [k, v] of Object.entries(value)) walk(v, path ? path + "." + k : k);
    else facts.push([path, Array.isArray(value) ? value.join(", ") || "none" : String(value)]);
  };
  walk(RUN.provenance, "");
  return section("origin", "Where it comes from", null, el("div", { class: "grid two" },
    card("Provenance", null, facts.length ? table(null, el("tbody", null, facts.map(([k, v]) => el("tr", null, el("td", { class: "soft" }, k), el("td", { class: "mono" }, v))))) : el("p", { class: "soft" }, "run.json is missing.")),
    card("Configuration", "every setting; reproduces the run", el("details", null, el("summary", null, "config.toml"), el("pre", null, RUN.config || "missing")))));
}

function stepSection(showRollouts) {
  const body = stepCard(showRollouts);
  return section("step", "One step", "how long it took and why", body || el("p", { class: "soft" }, "No step is on record yet."));
}

function start() {
  document.getElementById("top").append(...header().filter(Boolean));
  const [rollouts, showOnly] = rolloutSection();
  const showStep = (step) => showOnly({ stepLow: step, stepHigh: step });
  const showDropped = (drop) => showOnly({ stepLow: drop.version, stepHigh: drop.version, fate: "dropped: " + drop.reason }, drop.group_id);
  document.getElementById("main").append(curves(), staleness(), bubbles(), stepSection(showStep), ledger(showDropped), alerts(), evaluations(), rollouts, origin());
  const links = [["curves", "Curves"], ["staleness", "Staleness"], ["bubbles", "Time"], ["step", "One step"], ["ledger", "Ledger"], ["alerts", "Alerts"], ["evals", "Evaluations"], ["rollouts", "Rollouts"], ["origin", "Origin"]];
  document.getElementById("nav").append(el("div", null, links.map(([id, name]) => el("a", { href: "#" + id }, name))));
  document.body.append(el("footer", null, `Written by asyncrl report, ${RUN.written}.`));
  paintAll();
  addEventListener("resize", paintAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
  const slow = DATA.notes.times.map((t, i) => [t[2] ? t[0] : 0, i]).sort((a, b) => b[0] - a[0])[0];
  Steps.choose(slow && slow[0] > 0 ? Steps.list[slow[1]] : last(Steps.list) ?? 0);
}

start();
