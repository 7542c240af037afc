"use strict";
/* Which charts the page has: sections of [title, {keys: [[metric, name], ...], ...how it is drawn}]. */
const plan = (data, { runs, several, hidden, logged, runColor }) => {
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
        keys: [["frac_zero_hard", "hard (not all right)", "hard"], ["frac_zero_easy", "easy (all right)", "easy"],
          ["frac_zero_unknown", "not known to be right", "void"]] }],
    ] },
    { id: "groups", title: "Groups and completions", charts: [
      ["Groups without signal", { several: true, share: true, format: charts.percent, keys: [["frac_reward_zero_std", "zero variance"]] }],
      ["Visits skipped before the rollout", { zero: true, keys: [["select/skipped", "a step"]] }],
      ...methodCharts(""),
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
      ["KL to the teacher", { zero: true, keys: [["teacher/kl", "nats a token"]] }],
      ["Learning rate", { zero: true, keys: [["learning_rate", "set"], ["effective_learning_rate", "effective"], ["eta_eff", "eta / (1 - f_zero)"]] }],
      ["Loss", { keys: [["loss", "loss"]] }],
      ["Importance ratio", { keys: [["sampling/importance_sampling_ratio/mean", "mean"]] }],
      ["Clipped tokens", { zero: true, format: charts.percent, keys: [["clip_ratio/region_mean", "all"], ["clip_ratio/low_mean", "low"], ["clip_ratio/high_mean", "high"]] }],
    ] },
    ...(runs.some((r) => r.offPolicy) ? [{ ...offPolicy, marks, charts: offPolicy.charts.map(([title, spec]) => [title, { ...spec, marks }]) }] : []),
    ...methodSections(),
    ...(auditedRules().length ? [{ id: "rules", title: "Rules under audit", charts: auditedRules().flatMap((rule) => [
      [`Signal lost by ${rule}`, { zero: true, share: true, format: charts.percent, keys: bounded(`audit/${rule}/signal_lost`) }],
      [`Precision of ${rule}`, { share: true, format: charts.percent, keys: bounded(`audit/${rule}/precision`) }],
      [`Removals of ${rule} carried out`, { zero: true, share: true, format: charts.percent, keys: [[`audit/${rule}/carried_out`, "share"]] }],
    ]) }] : []),
    ...workers(runs),
    { id: "time", title: "Time", charts: [
      ["Tokens per second", { zero: true, keys: [["tokens_per_second", "tokens/s"]] }],
      ["Seconds a step", { zero: true, format: charts.duration, keys: [["step_time", "step"]] }],
      ["Memory of the GPU, GiB", { zero: true, keys: [["gpu/peak_memory_gib", "peak"], ["gpu/memory_gib", "after the step"]] }],
      ["Seconds a step, by phase", { stacked: true, format: charts.duration, keys: parts("seconds/") }],
      ["Seconds of generation a step", { stacked: true, format: charts.duration, keys: parts("seconds/generate/") }],
      ["Seconds of the update a step", { stacked: true, format: charts.duration, keys: parts("seconds/update/") }],
      ...(parts("sampler/seconds/").length ? [["Seconds of all samplers a step", { stacked: true, format: charts.duration, keys: parts("sampler/seconds/") }]] : []),
    ] },
  ];

  /** Charts that methods ask for in one section, each once. */
  function methodCharts(section) {
    const found = new Map(runs.flatMap((r) => r.charts).filter((c) => c.section === section).map((c) => [c.title, c]));
    return [...found.values()].map((c) => [c.title, {
      zero: c.zero, share: c.share, ...(c.percent ? { format: charts.percent } : {}), keys: c.lines }]);
  }

  function methodSections() {
    const titles = new Set(runs.flatMap((r) => r.charts).map((c) => c.section).filter(Boolean));
    return [...titles].map((title) => ({ id: title.split(" ")[0].toLowerCase(), title, charts: methodCharts(title) }));
  }

  /** pass@1, pass@k of the largest k, and greedy; without pass@k the mean reward. */
  function passAtK() {
    if (!runs.some((r) => "eval/pass@1" in r.evals)) return [["eval/avg@n", "mean reward"]];
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

  /** Seconds by what they were spent on, without the parts of parts and the sum of all. */
  function parts(prefix) {
    const names = new Set(runs.flatMap((r) => Object.keys(r.metrics)).filter((k) => k.startsWith(prefix) && !/\/|^total$/.test(k.slice(prefix.length))));
    return [...names].map((k, n) => [k, k.slice(prefix.length), runColor(n)]);
  }

  /** Charts for what the plan does not name. */
  function rest() {
    const named = new Set([...PLAN, offPolicy].flatMap((s) => s.charts.flatMap(([, c]) => [...c.keys.map(([k]) => k), ...(c.band || [])])));
    ["step", "num_tokens", "num_decoded_tokens", "num_computed_tokens", "seconds_total", "sampler/seconds/total"].forEach((k) => named.add(k));
    const found = (evals) => [...new Set(runs.flatMap((r) => Object.keys(evals ? r.evals : r.metrics)))]
      .filter((k) => !named.has(k) && k.startsWith("eval/") === evals);
    const chart = (k, evals) => [k, { evals, points: evals, keys: [[k, k]] }];
    return [...found(false).map((k) => chart(k, false)), ...found(true).map((k) => chart(k, true))];
  }

  return { sections: PLAN, rest: rest() };
};
