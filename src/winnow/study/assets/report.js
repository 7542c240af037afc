"use strict";
/* Builds the page from `data`. `view` is what a page that is built again keeps: which runs are hidden, which is picked. */
const report = (data, view) => {
  const { el, key } = dom;
  const { runs } = data;
  const several = runs.length > 1;
  const { hidden } = view;
  let focus = Math.min(view.focus, runs.length - 1);
  const onFocus = [];
  const logged = (table, name) => (table[name] || []).some((v) => v !== null);
  const runColor = (n) => `c${n % 24}`;
  /** With so many runs, what is shown of each takes one line. */
  const many = runs.length > 6;
  const { sections: PLAN, rest } = plan(data, { runs, several, hidden, logged, runColor });

  /** Of several runs the chart shows the one that is picked. */
  const ofPicked = (spec) => several && (spec.stacked || spec.ofPicked);

  function curvesOf(spec) {
    const kind = spec.evals ? "evals" : "metrics";
    const from = (r) => ({ table: r[kind], averaged: r.averaged[kind] });
    if (ofPicked(spec) || !several) {
      const run = runs[several ? focus : 0];
      return spec.keys.map(([k, name, shade], n) => ({ ...from(run), key: k, name, color: shade || runColor(n), band: n ? undefined : spec.band }))
        .filter((c) => logged(c.table, c.key));
    }
    const keys = spec.keys.filter(([k]) => runs.some((r) => logged(r[kind], k))).slice(0, 2);
    return runs.flatMap((r, n) => hidden.has(n) ? [] : keys.map(([k, name], j) => ({
      ...from(r), key: k, color: runColor(n), dash: j ? [5, 4] : undefined, band: j ? undefined : spec.band,
      name: keys.length > 1 ? `${r.name} ${name}` : r.name,
    }))).filter((c) => logged(c.table, c.key));
  }

  function chartCard(title, spec, mounts) {
    const plot = el("div", { class: "plot" });
    const legend = el("div", { class: "legend" });
    const tools = el("div", { class: "tools" });
    mounts.push(() => charts.mount({ plot, legend, tools, title }, spec, () => curvesOf(spec)));
    return el("div", { class: "card chart" }, el("div", { class: "top" }, el("h3", {}, title), tools), plot, legend);
  }

  /** Whether nothing of a chart ever changes. */
  function flat(spec) {
    const curves = curvesOf(spec).map((c) => c.table[c.key].filter((v) => v !== null));
    return !spec.evals && curves.length > 0 && curves.every((v) => v.length > 2 && v.every((x) => x === v[0]));
  }

  function picker() {
    if (!several) return null;
    const menu = el("select", { "aria-label": "Run shown in this section", onchange: () => setFocus(+menu.value) },
      ...runs.map((r, n) => el("option", { value: n }, r.name)));
    onFocus.push(() => (menu.value = focus));
    return menu;
  }

  function setFocus(n) {
    focus = view.focus = n;
    onFocus.forEach((f) => f());
    charts.redraw();
  }

  const section = (id, title, ...children) => el("section", { id }, el("div", { class: "head" }, el("h2", {}, title)), ...children);

  function chartSection(plan, mounts) {
    const wanted = plan.charts.filter(([, spec]) => !spec.several || several);
    const drawn = wanted.filter(([, spec]) =>
      runs.some((r) => spec.keys.some(([k]) => logged(spec.evals ? r.evals : r.metrics, k))));
    const missing = wanted.filter((c) => !drawn.includes(c)).map(([title]) => title);
    const still = several ? [] : drawn.filter(([, spec]) => flat(spec));
    const moving = drawn.filter((c) => !still.includes(c));
    const grid = (list) => el("div", { class: plan.wide ? "grid wide" : "grid" }, ...list.map(([t, s]) => chartCard(t, s, mounts)));
    const node = section(plan.id, plan.title, ...(plan.marks ? plan.marks() : []).map((m) => el("p", { class: "above" }, key(m.text, m.color, "line dash"))),
      moving.length ? grid(moving) : null,
      still.length ? el("details", { class: "fold below" }, el("summary", {}, `Never changed: ${still.map(([t]) => t).join(" · ")}`), grid(still)) : null,
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
    return el("div", { class: many ? "line" : false },
      el("div", { class: "stackname" }, el("b", { dir: "auto" }, several ? run.name : "The whole run"), el("span", { class: "soft" }, `${charts.compact(total)} tokens${run.tokens.void > 0 ? ", void included" : ""}`)),
      el("div", { class: "stack", role: "img", "aria-label": fates.map((f) => `${f} ${percent(share(f))}`).join(", ") },
        ...fates.map((f) => el("div", { class: f, style: `flex:${share(f)} 1 0`, swatch: f, title: `${f}: ${charts.compact(run.tokens[f])} tokens, ${percent(share(f))}` },
          share(f) >= 7 ? percent(share(f)) : ""))),
      many ? null : el("div", { class: "legend below" }, ...fates.map((f) => key(`${f} ${percent(share(f))}`, f))));
  }

  /** A bar for each run; of many runs the colours are said once. */
  function stackBars() {
    const fates = data.fates.filter((f) => runs.some((r) => r.tokens[f] > 0));
    return el("div", { class: "card totals", style: "margin:0" }, ...runs.map(stackBar), many ? el("div", { class: "legend" }, ...fates.map((f) => key(f, f))) : null);
  }

  /** `kind` is how it fits a phone: "cards" makes a block of each row, "narrow" leaves out the prompt tokens. */
  function table(head, rows, first, kind) {
    return el("div", { class: "scroll" }, el("table", { class: kind },
      el("thead", {}, el("tr", {}, ...head.map((h) => el("th", {}, h)))),
      el("tbody", {}, ...rows.map((row, n) => el("tr", {}, el("td", {}, first(row, n)), ...row.slice(1).map((cell, i) =>
        el("td", { "data-label": head[i + 1] }, cell)))))));
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

  /** Seconds and tokens by what they were spent on. */
  function costsCard() {
    const box = el("div", { class: "costs" });
    const show = () => box.replaceChildren(...runs[focus].costs.map((found) => table(found.head, found.rows, (row) => row[0], "")));
    onFocus.push(show);
    show();
    return runs.some((r) => r.costs.length) ? el("div", { class: "card below" }, el("h3", {}, "What seconds and tokens were spent on"), box) : "";
  }

  function proofSection() {
    const tables = ({ rules, again }) => [
      ...(rules ? [el("h3", {}, "What the rules got wrong"), table(rules.head, rules.rows, (row) => row[0], "cards"),
        el("p", { class: "soft" }, "Estimates from removals that were overridden at random, with 95% intervals.")] : []),
      ...(again ? [el("h3", {}, "Prompts without signal, visited again"), table(again.head, again.rows, (row) => row[0], "cards"),
        el("p", { class: "soft" }, "Of the visits of a prompt whose groups had no signal at its visit before: the share that had none again.")] : [])];
    const more = (proof) => {
      const found = proof ? tables(proof) : [];
      if (!found.length) return null;
      const names = found.filter((node) => node.tagName === "H3").map((node) => node.textContent);
      return several ? el("details", { class: "rules" }, el("summary", {}, names.join(" · ")), ...found) : el("div", { class: "rules" }, ...found);
    };
    return section("proof", "Proof of the ledger", ...runs.map((run) => el("div", { class: "card" },
      several ? el("h3", { dir: "auto" }, run.name) : null,
      run.proof ? el("p", { class: run.proof.ok ? "good" : "bad" }, run.proof.verdict) : el("p", { class: "soft" }, "No proof: there is no readable ledger."),
      run.proof && run.proof.problems.length ? el("ul", { class: "notes" }, ...run.proof.problems.map((p) => el("li", {}, p))) : null,
      more(run.proof),
      run.notes.length ? el("ul", { class: "notes" }, ...run.notes.map((n) => el("li", {}, n))) : null)));
  }

  /** What went wrong while a run went on. */
  function warnings() {
    const said = runs.flatMap((run) => run.warnings.map((w) => el("li", { dir: "auto" }, several ? `${run.name}: ${w}` : w)));
    return said.length ? el("div", { class: "card warnings" }, el("h3", { class: "bad" }, "Warnings"), el("ul", { class: "notes" }, ...said)) : "";
  }

  /** A prompt as the model got it, of each run that has kept one. */
  function promptSection() {
    const shown = runs.filter((r) => r.prompt);
    if (!shown.length) return null;
    return section("prompt", "A prompt as the model got it", ...shown.map(({ name, prompt }) => el("div", { class: "card" },
      several ? el("h3", { dir: "auto" }, name) : null,
      el("pre", { class: "prompt", dir: "auto" }, prompt.text),
      el("p", { class: "soft below", dir: "auto" }, prompt.caption))));
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

  /** The headline figures: tiles of one run, a table of several. */
  function figures() {
    if (!several) {
      return el("div", { class: "cards" }, ...data.cards[0].map((c) => el("div", { class: "card" },
        el("div", { class: "label" }, c.label), el("div", { class: `value ${c.state}` }, c.value), el("div", { class: "note" }, c.note))));
    }
    const labels = [...new Set(data.cards.flat().map((c) => c.label))];
    const value = (cards, label) => cards.find((c) => c.label === label)?.value ?? "–";
    const rows = data.cards.map((cards, n) => [runs[n].name, ...labels.map((label) => value(cards, label))]);
    return el("div", { class: "card", style: "margin-top:20px" },
      table(["run", ...labels], rows, (row, n) => key(row[0], runColor(n)), "cards"));
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
    const choice = (label, options, current, pick) => {
      const buttons = options.map(([value, name]) => el("button", { "aria-pressed": String(value === current), onclick: (e) => {
        buttons.forEach((b) => b.setAttribute("aria-pressed", b === e.currentTarget));
        pick(value);
      } }, name));
      return el("span", { class: "seg" }, el("span", { class: "hint" }, label), el("div", { role: "group", "aria-label": label || "Smoothing" }, ...buttons));
    };
    const titles = [...document.querySelectorAll("#app > section")].map((s) => [s.id, s.id[0].toUpperCase() + s.id.slice(1)]);
    const chips = several ? el("div", { class: "legend" }, ...runs.map((r, n) => el("label", { class: "key" },
      el("input", { type: "checkbox", checked: hidden.has(n) ? null : "", onchange: (e) => { e.target.checked ? hidden.delete(n) : hidden.add(n); charts.redraw(); } }),
      key(r.name, runColor(n))))) : null;
    const bar = el("div", { class: "bar" },
      el("nav", {}, ...titles.map(([id, title]) => el("a", { href: `#${id}` }, title))), chips,
      choice("x axis", [["step", "step"], ["tokens", "tokens"], ["seconds", "time"]], charts.axis(), charts.setAxis),
      choice("", [[true, "smooth"], [false, "raw"]], charts.smooth(), charts.setSmoothing),
      el("button", { onclick: toggleTheme, "aria-label": "Light or dark", title: "Light or dark" }, "◐"));
    new ResizeObserver(() => clear(bar)).observe(bar);
    return bar;
  }

  /** What is jumped to comes to stand below the bar, where the bar stays at the top. */
  function clear(bar) {
    if (!bar.isConnected) return;
    const height = getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0;
    document.documentElement.style.setProperty("--bar", `${height}px`);
  }

  function toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    charts.redraw();
  }

  function page() {
    const mounts = [];
    const averaged = Math.max(...runs.map((r) => r.averaged.metrics));
    const sections = PLAN.map((plan) => chartSection(plan, mounts));
    sections[1].append(el("div", { class: "totals" }, stackBars(), totalsCard()));
    sections.find((node) => node.id === "time").append(costsCard());
    if (rest.length) sections.push(folded(chartSection({ id: "more", title: "Everything else that was logged", charts: rest }, mounts), rest.length));
    const app = document.getElementById("app");
    const [{ heading }] = runs;
    app.replaceChildren(
      el("header", {}, el("div", { class: "brand" }, "Winnow"), el("h1", { dir: "auto" }, several ? `${runs.length} runs compared` : heading.title),
        several ? null : el("p", { class: "soft", dir: "auto" }, heading.note)),
      figures(),
      warnings(), ...sections, reliabilitySection() || "", profileSection() || "", samples({ data, runs, several, section, runColor }), promptSection() || "", proofSection(), configSection(),
      el("footer", {}, "Drag over a chart to zoom, double-click to see all of it; arrow keys move along it. A legend's entries can be switched off. ",
        averaged > 1 ? `Long series are means over up to ${averaged} steps.` : ""));
    app.insertBefore(toolbar(), app.querySelector(".warnings") || sections[0]);
    mounts.forEach((mount) => mount());
  }

  page();
};
