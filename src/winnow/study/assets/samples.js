"use strict";
/* Sample rollouts: filters, and a card for each. */
const samples = ({ data, runs, several, section, runColor }) => {
  const { el, key } = dom;

  function samplesSection() {
    const all = runs.flatMap((r, n) => r.samples.map((s) => ({ ...s, run: n }))).sort((a, b) => (a.step ?? -1) - (b.step ?? -1));
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
    const node = section("samples", "Sample rollouts", el("div", { class: "filters" }, ...[run, fate, split, reward, order, search].filter(Boolean)), shades(all) || "", list, more);
    node.firstChild.append(status);
    show(8);
    return node;
  }

  /** Shades by the probability under which the sampler drew a token: the first whose limit it is under. */
  const SHADES = [[0.01, "p3"], [0.05, "p2"], [0.2, "p1"], [0.5, "p0"]];
  const shadeOf = (logp) => (SHADES.find(([limit]) => logp !== null && Math.exp(logp) < limit) || [0, ""])[1];
  const SIGNS = { kept: "▸", overridden: "▹", stopped: "■", segment: "↻" };

  /** The text, with what gates decided where they did; `tokens` are {start, end, logp, piece}. */
  function marked({ completion: text, marks }, tokens = []) {
    const parts = [];
    let at = 0;
    let next = 0;
    const until = (end) => {
      if (end > at) parts.push(text.slice(at, end));
      at = Math.max(at, end);
    };
    const chips = (limit) => {
      for (; next < marks.length && marks[next][0] <= limit; next++) {
        const [place, stand, said] = marks[next];
        until(Math.min(place, text.length));
        parts.push(el("span", { class: `mark ${stand}`, dir: "auto" }, `${place > text.length ? "… " : ""}${SIGNS[stand]} ${said}`));
      }
    };
    tokens.forEach((token, n) => {
      chips(token.start);
      until(token.start);
      parts.push(el("span", { class: `token ${shadeOf(token.logp)}${token.end > token.start ? "" : " silent"}`, "data-n": n }, text.slice(token.start, token.end)));
      at = Math.max(at, token.end);
    });
    chips(Infinity);
    until(text.length);
    return parts.length ? parts : ["(empty)"];
  }

  /** The completion; where the run has written its tokens, with the probability of the one pointed at or walked to. */
  function completion(s) {
    const tokens = s.turns.flatMap(([at, chars, logp]) => {
      let end = at;
      return chars.map((n, i) => ({ start: end, end: (end += n), logp: logp[i] }));
    });
    const pre = el("pre", { dir: "auto" }, ...marked(s, tokens));
    const said = el("span", { class: "soft said", "aria-live": "polite" });
    const shown = [el("div", { class: "textname" }, el("span", { class: "label" }, "Completion"), said), pre];
    if (!tokens.length) return shown;
    let chosen = null;
    const choose = (node) => {
      if (!node) return;
      if (chosen) chosen.classList.remove("chosen");
      chosen = node;
      chosen.classList.add("chosen");
      const { start, end, logp } = tokens[node.dataset.n];
      const text = end > start ? JSON.stringify(s.completion.slice(start, end)) : "without a character";
      said.textContent = `token ${+node.dataset.n + 1}: ${text}, ${logp === null ? "not sampled" : `${logp.toFixed(2)} nats, ${charts.percent(Math.exp(logp))}`}`;
    };
    const spans = () => [...pre.querySelectorAll(".token")];
    pre.tabIndex = 0;
    pre.classList.add("tokens");
    pre.addEventListener("pointerover", (event) => choose(event.target.closest(".token")));
    pre.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      choose(spans()[Math.max(0, Math.min(tokens.length - 1, chosen ? +chosen.dataset.n + by : 0))]);
    });
    return shown;
  }

  /** What the shades say, of runs that have written tokens. */
  function shades(all) {
    if (!all.some((s) => s.turns.length)) return null;
    return el("p", { class: "soft above shades" }, "Probability of a token when it was sampled: ",
      ...SHADES.toReversed().map(([limit, name]) => el("span", { class: name }, `under ${100 * limit}%`)), " Point at one for its number, or walk with the arrow keys.");
  }

  /** `only(s)` shows nothing but the samples of its prompt, from the first step to the last. */
  function sampleCard(s, only) {
    const shade = data.fates.includes(s.fate) ? s.fate : "soft";
    const parts = Object.entries(s.rewards || {}).map(([k, v]) => `${k} ${v == null ? "–" : charts.compact(v)}`);
    const facts = [`step ${s.step ?? "–"}`, s.prompt_id == null ? null : `prompt ${s.prompt_id}`, s.sibling == null ? null : `sibling ${s.sibling}`,
      s.tokens == null ? null : `${s.tokens} tokens`, s.segments > 1 ? `${s.segments} segments` : null, s.stop_reason ? `ended by ${s.stop_reason}` : null, s.reason || null, ...parts].filter(Boolean);
    if (s.group_rewards.length > 1) facts.push(`rewards in the group ${s.group_rewards.map((r) => (typeof r === "number" ? charts.compact(r) : "–")).join(" ")}`);
    const over = s.prompt_id == null ? null : el("button", { class: "link", onclick: () => only(s) }, "this prompt over steps");
    const siblings = s.siblings.length ? el("details", { class: "siblings" }, el("summary", {}, `${s.siblings.length} ${s.siblings.length === 1 ? "sibling" : "siblings"}`),
      el("div", { class: "grid" }, ...s.siblings.map((other) => el("div", {},
        el("div", { class: "facts" }, other.fate ? el("span", { class: "badge", swatch: data.fates.includes(other.fate) ? other.fate : "soft" }, other.fate) : null,
          el("span", { class: "reward" }, other.reward == null ? "no reward" : `reward ${charts.compact(other.reward)}`)),
        el("pre", { dir: "auto" }, ...marked(other)))))) : null;
    return el("article", { class: "card sample" },
      el("div", { class: "facts" }, s.split && s.split !== "train" ? el("span", { class: "badge", swatch: "c0" }, s.split) : null,
        s.fate ? el("span", { class: "badge", swatch: shade }, s.fate) : null,
        el("span", { class: "reward" }, s.reward == null ? "no reward" : `reward ${charts.compact(s.reward)}`),
        several ? key(runs[s.run].name, runColor(s.run)) : null,
        ...facts.map((f) => el("span", { dir: "auto" }, f)), over),
      el("div", { class: "texts" },
        el("div", {}, el("div", { class: "label" }, "Prompt"), el("pre", { dir: "auto" }, s.prompt || "(empty)")),
        el("div", {}, ...completion(s))), siblings);
  }

  return samplesSection();
};
