"use strict";
/* Sample rollouts: filters, and a card for each. */
const samples = ({ data, runs, several, section, runColor }) => {
  const { el, key } = dom;

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
    const search = el("input", { type: "search", placeholder: "Search in prompts and completions", "aria-label": "Search", oninput: () => { prompt = null; show(8); } });
    let prompt = null;
    const only = (s) => {
      search.value = prompt = s.prompt_id;
      order.value = "old";
      show(8);
      search.focus();
    };
    let shown = 8;

    const fits = (s) => (!run || !run.value || runs[s.run].name === run.value)
      && (!fate.value || String(s.fate) === fate.value) && (!split.value || String(s.split) === split.value)
      && (!reward.value || (reward.value === "no reward" ? s.reward == null : s.reward != null && (s.reward >= best) === (reward.value === "best reward")))
      && (prompt === null || s.prompt_id === prompt)
      && (!search.value || prompt !== null || `${s.prompt}\n${s.completion}\n${s.prompt_id}`.toLowerCase().includes(search.value.toLowerCase()));
    function show(n) {
      shown = n;
      const found = all.filter(fits);
      if (order.value === "new") found.reverse();
      list.replaceChildren(...found.slice(0, n).map((s) => sampleCard(s, only)));
      status.textContent = `${found.length} of ${all.length} samples`;
      more.hidden = found.length <= n;
    }
    if (!all.length) return section("samples", "Sample rollouts", el("p", { class: "soft" }, "No samples were written (samples.jsonl is missing or empty)."));
    const node = section("samples", "Sample rollouts", el("div", { class: "filters" }, ...[run, fate, split, reward, order, search].filter(Boolean)), list, more);
    node.firstChild.append(status);
    show(8);
    return node;
  }

  /** `only(s)` shows nothing but the samples of its prompt, from the first step to the last. */
  function sampleCard(s, only) {
    const shade = data.fates.includes(s.fate) ? s.fate : "soft";
    const parts = Object.entries(s.rewards || {}).map(([k, v]) => `${k} ${v == null ? "–" : charts.compact(v)}`);
    const facts = [`step ${s.step ?? "–"}`, s.prompt_id == null ? null : `prompt ${s.prompt_id}`, s.sibling == null ? null : `sibling ${s.sibling}`,
      s.tokens == null ? null : `${s.tokens} tokens`, s.stop_reason ? `ended by ${s.stop_reason}` : null, s.reason || null, ...parts].filter(Boolean);
    if (s.group_rewards.length > 1) facts.push(`rewards in the group ${s.group_rewards.map((r) => (typeof r === "number" ? charts.compact(r) : "–")).join(" ")}`);
    const text = (label, value) => el("div", {}, el("div", { class: "label" }, label), el("pre", { dir: "auto" }, value || "(empty)"));
    const over = s.prompt_id == null ? null : el("button", { class: "link", onclick: () => only(s) }, "this prompt over steps");
    const siblings = s.siblings.length ? el("details", { class: "siblings" }, el("summary", {}, `${s.siblings.length} siblings`),
      el("div", { class: "grid" }, ...s.siblings.map((other) => el("div", {},
        el("div", { class: "facts" }, other.fate ? el("span", { class: "badge", swatch: data.fates.includes(other.fate) ? other.fate : "soft" }, other.fate) : null,
          el("span", { class: "reward" }, other.reward == null ? "no reward" : `reward ${charts.compact(other.reward)}`)),
        el("pre", { dir: "auto" }, other.completion || "(empty)"))))) : null;
    return el("article", { class: "card sample" },
      el("div", { class: "facts" }, s.split && s.split !== "train" ? el("span", { class: "badge", swatch: "c0" }, s.split) : null,
        s.fate ? el("span", { class: "badge", swatch: shade }, s.fate) : null,
        el("span", { class: "reward" }, s.reward == null ? "no reward" : `reward ${charts.compact(s.reward)}`),
        several ? key(runs[s.run].name, runColor(s.run)) : null,
        ...facts.map((f) => el("span", { dir: "auto" }, f)), over),
      el("div", { class: "texts" }, text("Prompt", s.prompt), text("Completion", s.completion)), siblings);
  }

  return samplesSection();
};
