"use strict";
/* Builds the page from the data in it. Strings of a run are only ever set as text, never as markup. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const several = runs.length > 1;
  const hidden = new Set();
  let focus = 0;
  const onFocus = [];

  function el(tag, props, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(props || {})) {
      if (key === "swatch") node.style.setProperty("--swatch", `var(--${value})`);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(key, value);
    }
    node.append(...children.filter((c) => c != null));
    return node;
  }
  const key = (name, swatch, kind = "") =>
    el("span", { class: "key" }, el("span", { class: `swatch ${kind}`, swatch }), el("span", { dir: "auto" }, name));
  const logged = (table, name) => (table[name] || []).some((v) => v !== null);
  const runColor = (n) => `c${n % 12}`;

  /* Which charts there are: [title, {keys: [[metric, name], ...], ...how it is drawn}]. */
  const PLAN = [
    { id: "learning", title: "Learning", wide: true, charts: [
      ["Training reward", { keys: [["reward", "reward"]], height: 250 }],
      ["Held-out evaluation", { evals: true, points: true, height: 250, share: true,
        keys: passAtK() }],
    ] },
    { id: "tokens", title: "Where every token went", wide: true, charts: [
      ["Sampled tokens a step, by fate", { stacked: true, height: 250,
        keys: data.fates.filter((f) => f !== "void" && f !== "skipped").map((f) => [`tokens/${f}`, f, f]) }],
      ["Groups without signal", { stacked: true, share: true, format: charts.percent, height: 250,
        keys: [["frac_zero_hard", "hard (below the maximum)", "hard"], ["frac_zero_easy", "easy (at the maximum)", "easy"]] }],
    ] },
    { id: "groups", title: "Groups and completions", charts: [
      ["Groups without signal", { several: true, share: true, format: charts.percent, keys: [["frac_reward_zero_std", "zero variance"]] }],
      ["Visits skipped before the rollout", { zero: true, keys: [["select/skipped", "a step"]] }],
      ["Base probabilities of GRESO", { share: true, zero: true, keys: [["greso/p_easy", "easy"], ["greso/p_hard", "hard"]] }],
      ["Prompts in the pass-rate band", { share: true, zero: true, format: charts.percent, keys: [["pass_rate/in_band", "share"]] }],
      ["Group size", { zero: true, keys: [["groups/size_mean", "rollouts a group"]] }],
      ["Groups that were trained on", { zero: true, keys: [["groups/effective", "effective groups"]] }],
      ["Reward spread within groups", { zero: true, keys: [["reward_std", "standard deviation"]] }],
      ["Completion length", { zero: true, keys: [["completions/mean_length", "mean"], ["completions/max_length", "maximum"]] }],
      ["Rewards by function", { zero: true, keys: rewardParts() }],
      ["Failed rollouts", { zero: true, share: true, format: charts.percent, keys: [["rollouts/failed_share", "share"]] }],
      ["Completions cut at the limit", { share: true, format: charts.percent, zero: true, keys: [["completions/clipped_ratio", "share"]] }],
      ["Length in the evaluation", { evals: true, points: true, zero: true, keys: [["eval/mean_length", "mean length"]] }],
    ] },
    { id: "update", title: "Update", charts: [
      ["Gradient norm", { zero: true, keys: [["grad_norm", "before clipping"]] }],
      ["Entropy", { keys: [["entropy", "nats a token"]] }],
      ["KL to the reference", { keys: [["kl", "KL"]] }],
      ["Learning rate", { zero: true, keys: [["learning_rate", "set"], ["effective_learning_rate", "effective"], ["eta_eff", "eta / (1 - f_zero)"]] }],
      ["Loss", { keys: [["loss", "loss"]] }],
      ["Importance ratio", { keys: [["sampling/importance_sampling_ratio/mean", "mean"]] }],
      ["Clipped tokens", { zero: true, format: charts.percent, keys: [["clip_ratio/region_mean", "all"], ["clip_ratio/low_mean", "low"], ["clip_ratio/high_mean", "high"]] }],
    ] },
    ...(runs.some((r) => r.offPolicy) ? [{ ...offPolicy, marks, charts: offPolicy.charts.map(([title, spec]) => [title, { ...spec, marks }]) }] : []),
    ...(runs.some((r) => logged(r.metrics, "gate/arrol/asked")) ? [{ id: "pruning", title: "Pruned while generated", charts: [
      ["Share of rollouts kept", { zero: true, share: true, format: charts.percent,
        keys: [["gate/arrol/keep_rate", "kept"], ["gate/arrol/expected_keep_rate", "expected"]] }],
      ["Right answers", { zero: true, share: true, format: charts.percent,
        keys: [["gate/arrol/positive_share", "of those trained"], ["gate/arrol/success", "of all asked"], ["gate/arrol/target", "target"]] }],
      ["Balance of trained groups, mean p (1 - p)", { zero: true, keys: [["gate/arrol/balance", "balance"]] }],
      ["How well success is told apart", { share: true,
        keys: [["gate/arrol/auroc", "AUROC"], ["gate/arrol/auroc_within", "AUROC among siblings"], ["gate/arrol/accuracy", "accuracy"]] }],
      ["Brier score", { zero: true, keys: [["gate/arrol/brier", "mean squared error"]] }],
      ["Tokens saved", { zero: true, keys: [["gate/arrol/tokens_saved", "a step, estimated"]] }],
      ["Where the decision falls", { zero: true, keys: [["gate/arrol/detection_length", "token"]] }],
      ["Groups by survivors", { zero: true, keys: [["gate/arrol/survivors/none", "none"], ["gate/arrol/survivors/one", "one"], ["gate/arrol/survivors/all", "all"]] }],
      ["Rollouts without a decision", { zero: true,
        keys: [["gate/arrol/ended_early", "ended before it"], ["gate/arrol/not_finite", "score not finite"]] }],
    ] }] : []),
    ...(auditedRules().length ? [{ id: "rules", title: "Rules under audit", charts: auditedRules().flatMap((rule) => [
      [`Signal lost by ${rule}`, { zero: true, share: true, format: charts.percent, keys: bounded(`audit/${rule}/signal_lost`) }],
      [`Precision of ${rule}`, { share: true, format: charts.percent, keys: bounded(`audit/${rule}/precision`) }],
      [`Removals of ${rule} carried out`, { zero: true, share: true, format: charts.percent, keys: [[`audit/${rule}/carried_out`, "share"]] }],
    ]) }] : []),
    ...workers(runs),
    { id: "time", title: "Time", charts: [
      ["Tokens per second", { zero: true, keys: [["tokens_per_second", "tokens/s"]] }],
      ["Seconds a step", { zero: true, format: charts.duration, keys: [["step_time", "step"]] }],
      ["Seconds a step, by phase", { stacked: true, format: charts.duration, keys: phases() }],
    ] },
  ];

  /** pass@1, pass@k of the largest k, and greedy. */
  function passAtK() {
    const found = runs.flatMap((r) => Object.keys(r.evals)).map((k) => /^eval\/pass@(\d+)$/.exec(k)).filter(Boolean);
    const most = Math.max(1, ...found.map((m) => +m[1]));
    return [...new Set(["pass@1", `pass@${most}`, "greedy"])].map((name) => [`eval/${name}`, name]);
  }

  function auditedRules() {
    const found = runs.flatMap((r) => Object.keys(r.metrics)).map((k) => /^audit\/(.+)\/carried_out$/.exec(k)).filter(Boolean);
    return [...new Set(found.map((m) => m[1]))];
  }

  /** An estimate with its 95% interval. */
  function bounded(k) {
    return [[k, "estimate"], [`${k}_high`, "upper bound"], [`${k}_low`, "lower bound"]];
  }

  /** Steps to mark, of the runs that are shown. */
  function marks() {
    return runs.flatMap((r, n) => hidden.has(n) ? [] : (r.offPolicy || []).map((m) => (several ? { ...m, text: `${r.name}: ${m.text}`, color: runColor(n) } : m)));
  }

  function rewardParts() {
    const names = new Set(runs.flatMap((r) => Object.keys(r.metrics)).filter((k) => /^rewards\/.+\/mean$/.test(k)));
    return [...names].map((k) => [k, k.slice(8, -5)]);
  }

  function phases() {
    const names = new Set(runs.flatMap((r) => Object.keys(r.metrics)).filter((k) => k.startsWith("seconds/")));
    return [...names].map((k, n) => [k, k.slice(8), runColor(n)]);
  }

  /** Charts for what the plan does not name. */
  function rest() {
    const named = new Set([...PLAN, offPolicy].flatMap((s) => s.charts.flatMap(([, c]) => [...c.keys.map(([k]) => k), ...(c.band || [])])));
    ["step", "num_tokens", "seconds_total"].forEach((k) => named.add(k));
    const found = (evals) => [...new Set(runs.flatMap((r) => Object.keys(evals ? r.evals : r.metrics)))]
      .filter((k) => !named.has(k) && k.startsWith("eval/") === evals);
    const chart = (k, evals) => [k, { evals, points: evals, keys: [[k, k]] }];
    return [...found(false).map((k) => chart(k, false)), ...found(true).map((k) => chart(k, true))];
  }

  /** Of several runs the chart shows the one that is picked. */
  const ofPicked = (spec) => several && (spec.stacked || spec.ofPicked);

  function curvesOf(spec) {
    const table = (r) => (spec.evals ? r.evals : r.metrics);
    if (ofPicked(spec) || !several) {
      const run = runs[several ? focus : 0];
      return spec.keys.map(([k, name, shade], n) => ({ table: table(run), key: k, name, color: shade || runColor(n), band: n ? undefined : spec.band }))
        .filter((c) => logged(c.table, c.key));
    }
    const keys = spec.keys.filter(([k]) => runs.some((r) => logged(table(r), k))).slice(0, 2);
    return runs.flatMap((r, n) => hidden.has(n) ? [] : keys.map(([k, name], j) => ({
      table: table(r), key: k, color: runColor(n), dash: j ? [5, 4] : undefined, band: j ? undefined : spec.band,
      name: keys.length > 1 ? `${r.name} ${name}` : r.name,
    }))).filter((c) => logged(c.table, c.key));
  }

  function legendOf(spec) {
    if (several && !ofPicked(spec)) {
      const keys = spec.keys.filter(([k]) => runs.some((r) => logged(spec.evals ? r.evals : r.metrics, k))).slice(0, 2);
      return keys.length > 1 ? keys.map(([, name], j) => key(name, "soft", j ? "line dash" : "line")) : [];
    }
    const curves = curvesOf(spec);
    if (curves.length < 2) return [];
    const shown = spec.stacked ? curves.filter((c) => c.table[c.key].some((v) => v > 0)) : curves;
    return shown.map((c) => key(c.name, c.color, spec.stacked ? "" : "line"));
  }

  function chartCard(title, spec, mounts) {
    const plot = el("div", { class: "plot" });
    const legend = el("div", { class: "legend" }, ...legendOf(spec));
    mounts.push(() => charts.mount(plot, spec, () => curvesOf(spec)));
    if (ofPicked(spec)) onFocus.push(() => legend.replaceChildren(...legendOf(spec)));
    return el("div", { class: "card chart" }, el("div", { class: "top" }, el("h3", {}, title), legend), plot);
  }

  function picker() {
    if (!several) return null;
    const menu = el("select", { "aria-label": "Run shown in this section", onchange: () => setFocus(+menu.value) },
      ...runs.map((r, n) => el("option", { value: n }, r.name)));
    onFocus.push(() => (menu.value = focus));
    return menu;
  }

  function setFocus(n) {
    focus = n;
    onFocus.forEach((f) => f());
    charts.redraw();
  }

  const section = (id, title, ...children) => el("section", { id }, el("div", { class: "head" }, el("h2", {}, title)), ...children);

  function chartSection(plan, mounts) {
    const wanted = plan.charts.filter(([, spec]) => !spec.several || several);
    const drawn = wanted.filter(([, spec]) =>
      runs.some((r) => spec.keys.some(([k]) => logged(spec.evals ? r.evals : r.metrics, k))));
    const missing = wanted.filter((c) => !drawn.includes(c)).map(([title]) => title);
    const node = section(plan.id, plan.title, ...(plan.marks ? plan.marks() : []).map((m) => el("p", { class: "above" }, key(m.text, m.color, "line dash"))),
      drawn.length ? el("div", { class: plan.wide ? "grid wide" : "grid" }, ...drawn.map(([t, s]) => chartCard(t, s, mounts))) : null,
      missing.length ? el("p", { class: "soft below" }, `Not logged by ${several ? "these runs" : "this run"}: ${missing.join(" · ")}.`) : null);
    if (drawn.some(([, s]) => s.stacked || s.ofPicked)) node.firstChild.append(picker() || "");
    return node;
  }

  function folded(node, count) {
    const grid = node.querySelector(".grid");
    const fold = el("details", { class: "fold" }, el("summary", {}, count === 1 ? "One more chart" : `${count} more charts`));
    grid.replaceWith(fold);
    fold.append(grid);
    return node;
  }

  function stackBar(run) {
    const total = data.fates.reduce((sum, f) => sum + (run.tokens[f] || 0), 0);
    if (!total) return el("p", { class: "soft" }, `${several ? `${run.name}: n` : "N"}o tokens are booked by fate.`);
    const fates = data.fates.filter((f) => run.tokens[f] > 0);
    const share = (f) => (100 * run.tokens[f]) / total;
    const percent = (v) => (v >= 0.95 ? `${v.toFixed(v < 9.95 ? 1 : 0)}%` : "<1%");
    return el("div", {},
      el("div", { class: "stackname" }, el("b", { dir: "auto" }, several ? run.name : "The whole run"), el("span", { class: "soft" }, `${charts.compact(total)} tokens${run.tokens.void > 0 ? ", void included" : ""}`)),
      el("div", { class: "stack", role: "img", "aria-label": fates.map((f) => `${f} ${percent(share(f))}`).join(", ") },
        ...fates.map((f) => el("div", { class: f, style: `flex:${share(f)} 1 0`, swatch: f, title: `${f}: ${charts.compact(run.tokens[f])} tokens, ${percent(share(f))}` },
          share(f) >= 7 ? percent(share(f)) : ""))),
      el("div", { class: "legend below" }, ...fates.map((f) => key(`${f} ${percent(share(f))}`, f))));
  }

  /** `kind` is how it fits a phone: "cards" makes a block of each row, "narrow" leaves out the prompt tokens. */
  function table(head, rows, first, kind) {
    return el("div", { class: "scroll" }, el("table", { class: kind },
      el("thead", {}, el("tr", {}, ...head.map((h) => el("th", {}, h)))),
      el("tbody", {}, ...rows.map((row, n) => el("tr", {}, el("td", {}, first(row, n)), ...row.slice(1).map((cell, i) =>
        el("td", { class: cell.best ? "best" : false, "data-label": head[i + 1] }, cell.text ?? cell)))))));
  }

  function totalsCard() {
    const box = el("div", {});
    const show = () => {
      const { totals } = runs[focus];
      const name = (row) => (data.fates.includes(row[0]) ? key(row[0], row[0]) : row[0].replace("_", " "));
      box.replaceChildren(totals ? table(totals.head, totals.rows, name, "narrow") : el("p", { class: "soft" }, "No ledger, so no table of totals."));
    };
    onFocus.push(show);
    show();
    return el("div", { class: "card" }, box);
  }

  function proofSection() {
    return section("proof", "Proof of the ledger", ...runs.map((run) => el("div", { class: "card", style: "margin-bottom:10px" },
      several ? el("h3", { dir: "auto" }, run.name) : null,
      run.proof ? el("p", { class: run.proof.ok ? "good" : "bad" }, run.proof.verdict) : el("p", { class: "soft" }, "No proof: there is no readable ledger."),
      run.proof && run.proof.problems.length ? el("ul", { class: "notes" }, ...run.proof.problems.map((p) => el("li", {}, p))) : null,
      run.proof && run.proof.rules ? el("div", { class: "rules" },
        el("h3", {}, "What the rules got wrong"), table(run.proof.rules.head, run.proof.rules.rows, (row) => row[0], "cards"),
        el("p", { class: "soft" }, "Estimates from removals that were overridden at random, with 95% intervals.")) : null,
      run.proof && run.proof.again ? el("div", { class: "rules" },
        el("h3", {}, "Prompts without signal, visited again"), table(run.proof.again.head, run.proof.again.rows, (row) => row[0], "cards"),
        el("p", { class: "soft" }, "Of the visits of a prompt whose groups had no signal at its visit before: the share that had none again.")) : null,
      run.notes.length ? el("ul", { class: "notes" }, ...run.notes.map((n) => el("li", {}, n))) : null)));
  }

  function configSection() {
    const pairs = (list) => el("div", { class: "config" }, ...list.flatMap(([k, v]) => [el("span", {}, k), el("span", { dir: "auto" }, v)]));
    const differing = Object.entries(data.differences);
    return section("config", "Configuration", el("div", { class: "card" },
      several && differing.length ? table(["differs in", ...runs.map((r) => r.name)], differing.map(([k, v]) => [k, ...v]), (row) => row[0], "cards") : null,
      several && !differing.length ? el("p", { class: "soft" }, "The runs have the same configuration.") : null,
      ...runs.map((run) => run.config.length
        ? el("details", {}, el("summary", { dir: "auto" }, several ? run.name : `All ${run.config.length} settings`), pairs(run.config))
        : el("p", { class: "soft" }, `${several ? `${run.name}: n` : "N"}o configuration to show.`))));
  }

  function comparison() {
    if (!data.comparison) return null;
    const { head, rows } = data.comparison;
    return el("div", { class: "card", style: "margin-top:20px" },
      table(["run", ...head], rows.map((row, n) => [runs[n].name, ...row]), (row, n) => key(row[0], runColor(n)), "cards"));
  }

  /** Pass rates of the training prompts that the selector went by, for the runs that have such a profile. */
  function profileSection() {
    const shown = runs.filter((r) => r.profile);
    if (!shown.length) return null;
    const color = (n, last) => (n === 0 ? "hard" : n === last ? "easy" : "trained");
    const name = (label, n, last) => (n === 0 ? "dead 0" : n === last ? "solved 1" : label);
    return section("profile", "Pass rates before training", ...shown.map(({ name: run, profile: p }) => el("div", { class: "card" },
      several ? el("h3", { dir: "auto" }, run) : null,
      p.counts ? bars.histogram(p.counts.map((count, n) => ({ count, label: name(p.labels[n], n, p.counts.length - 1), color: color(n, p.counts.length - 1) }))) : null,
      el("p", { class: "soft below", dir: "auto" }, p.note || p.caption))));
  }

  /** What the pruning gate predicted and what came true, over the whole run. */
  function reliabilitySection() {
    const shown = runs.filter((r) => r.reliability);
    if (!shown.length) return null;
    return section("reliability", "Predicted and realised success", ...shown.map(({ name, reliability: found }) => el("div", { class: "card" },
      several ? el("h3", { dir: "auto" }, name) : null,
      reliability.diagram(found.points, runColor(runs.findIndex((r) => r.name === name))),
      el("p", { class: "soft below" }, found.caption))));
  }

  function toolbar() {
    const choice = (label, options, pick) => {
      const buttons = options.map(([value, name], n) => el("button", { "aria-pressed": n === 0, onclick: (e) => {
        buttons.forEach((b) => b.setAttribute("aria-pressed", b === e.currentTarget));
        pick(value);
      } }, name));
      return el("span", { class: "seg" }, el("span", { class: "hint" }, label), el("div", { role: "group", "aria-label": label || "Smoothing" }, ...buttons));
    };
    const titles = [...document.querySelectorAll("section")].map((s) => [s.id, s.id[0].toUpperCase() + s.id.slice(1)]);
    const chips = several ? el("div", { class: "legend" }, ...runs.map((r, n) => el("label", { class: "key" },
      el("input", { type: "checkbox", checked: "", onchange: (e) => { e.target.checked ? hidden.delete(n) : hidden.add(n); charts.redraw(); } }),
      key(r.name, runColor(n))))) : null;
    return el("div", { class: "bar" },
      el("nav", {}, ...titles.map(([id, title]) => el("a", { href: `#${id}` }, title))), chips,
      choice("x axis", [["step", "step"], ["tokens", "tokens"], ["seconds", "time"]], charts.setAxis),
      choice("", [[true, "smooth"], [false, "raw"]], charts.setSmoothing),
      el("button", { onclick: toggleTheme, "aria-label": "Light or dark", title: "Light or dark" }, "◐"));
  }

  function toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    charts.redraw();
  }

  function page() {
    const mounts = [];
    const averaged = Math.max(...runs.map((r) => r.averaged));
    const sections = PLAN.map((plan) => chartSection(plan, mounts));
    sections[1].append(el("div", { class: "totals" }, el("div", { class: "card totals", style: "margin:0" }, ...runs.map(stackBar)), totalsCard()));
    const other = rest();
    if (other.length) sections.push(folded(chartSection({ id: "more", title: "Everything else that was logged", charts: other }, mounts), other.length));
    const app = document.getElementById("app");
    app.append(
      el("header", {}, el("div", { class: "brand" }, "Winnow"), el("h1", { dir: "auto" }, several ? `${runs.length} runs compared` : runs[0].name)),
      several ? comparison() : el("div", { class: "cards" }, ...data.cards.map((c) => el("div", { class: "card" },
        el("div", { class: "label" }, c.label), el("div", { class: `value ${c.state}` }, c.value), el("div", { class: "note" }, c.note)))),
      ...sections, reliabilitySection() || "", profileSection() || "", samplesSection(), proofSection(), configSection(),
      el("footer", {}, "Drag over a chart to zoom, double-click to see all of it. ",
        averaged > 1 ? `Long series are means over up to ${averaged} steps.` : ""));
    app.insertBefore(toolbar(), sections[0]);
    mounts.forEach((mount) => mount());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts.redraw);
  }

  function samplesSection() {
    const all = runs.flatMap((r, n) => r.samples.map((s) => ({ ...s, run: n })));
    const list = el("div", { class: "samples" });
    const status = el("span", { class: "soft" });
    const more = el("button", { class: "more", onclick: () => show(shown + 12) }, "Show more");
    const options = (name, values, label) => el("select", { "aria-label": name, onchange: () => show(8) },
      el("option", { value: "" }, label), ...values.map((v) => el("option", { value: v }, v)));
    const distinct = (k) => [...new Set(all.map((s) => s[k]).filter((v) => v != null))].map(String);
    const run = several ? options("Run", runs.map((r) => r.name), "all runs") : null;
    const fate = options("Fate", distinct("fate"), "every fate");
    const split = options("Split", distinct("split"), "every split");
    const best = Math.max(...all.map((s) => s.reward ?? -Infinity));
    const reward = options("Reward", ["best reward", "below the best", "no reward"], "every reward");
    const order = el("select", { "aria-label": "Order", onchange: () => show(8) }, el("option", { value: "new" }, "newest first"), el("option", { value: "old" }, "oldest first"));
    const search = el("input", { type: "search", placeholder: "Search in prompts and completions", "aria-label": "Search", oninput: () => show(8) });
    let shown = 8;

    const fits = (s) => (!run || !run.value || runs[s.run].name === run.value)
      && (!fate.value || String(s.fate) === fate.value) && (!split.value || String(s.split) === split.value)
      && (!reward.value || (reward.value === "no reward" ? s.reward == null : s.reward != null && (s.reward >= best) === (reward.value === "best reward")))
      && (!search.value || `${s.prompt}\n${s.completion}\n${s.prompt_id}`.toLowerCase().includes(search.value.toLowerCase()));
    function show(n) {
      shown = n;
      const found = all.filter(fits);
      if (order.value === "new") found.reverse();
      list.replaceChildren(...found.slice(0, n).map(sampleCard));
      status.textContent = `${found.length} of ${all.length} samples`;
      more.hidden = found.length <= n;
    }
    if (!all.length) return section("samples", "Sample rollouts", el("p", { class: "soft" }, "No samples were written (samples.jsonl is missing or empty)."));
    const node = section("samples", "Sample rollouts", el("div", { class: "filters" }, ...[run, fate, split, reward, order, search].filter(Boolean)), list, more);
    node.firstChild.append(status);
    show(8);
    return node;
  }

  function sampleCard(s) {
    const shade = data.fates.includes(s.fate) ? s.fate : "soft";
    const parts = Object.entries(s.rewards || {}).map(([k, v]) => `${k} ${v == null ? "–" : charts.compact(v)}`);
    const facts = [`step ${s.step ?? "–"}`, s.prompt_id == null ? null : `prompt ${s.prompt_id}`, s.sibling == null ? null : `sibling ${s.sibling}`,
      s.tokens == null ? null : `${s.tokens} tokens`, s.stop_reason ? `ended by ${s.stop_reason}` : null, s.reason || null, ...parts].filter(Boolean);
    if (s.group_rewards.length > 1) facts.push(`rewards in the group ${s.group_rewards.map((r) => (typeof r === "number" ? charts.compact(r) : "–")).join(" ")}`);
    const text = (label, value) => el("div", {}, el("div", { class: "label" }, label), el("pre", { dir: "auto" }, value || "(empty)"));
    return el("article", { class: "card sample" },
      el("div", { class: "facts" }, s.split && s.split !== "train" ? el("span", { class: "badge", swatch: "c0" }, s.split) : null,
        s.fate ? el("span", { class: "badge", swatch: shade }, s.fate) : null,
        el("span", { class: "reward" }, s.reward == null ? "no reward" : `reward ${charts.compact(s.reward)}`),
        several ? key(runs[s.run].name, runColor(s.run)) : null,
        ...facts.map((f) => el("span", { dir: "auto" }, f))),
      el("div", { class: "texts" }, text("Prompt", s.prompt), text("Completion", s.completion)));
  }

  page();
})();
