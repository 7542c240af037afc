"use strict";
/* The section of a run with samplers or ranks of their own: a line for each. How many there are, the metrics say. */
const workers = (runs) => {
  const FIGURES = [
    ["sampler", "tokens_per_s", "Tokens per second of each sampler", { zero: true }],
    ["sampler", "idle", "Idle share of each sampler", { zero: true, share: true, format: charts.percent }],
    ["sampler", "groups", "Groups finished by each sampler", { zero: true }],
    ["sampler", "lag", "Versions behind the newest weights", { zero: true }],
    ["sampler", "restarts", "Restarts of each sampler", { zero: true }],
    ["sampler", "memory_mib", "Memory of each sampler, MiB", { zero: true }],
    ["sampler", "gpu_memory_gib", "Peak GPU memory of each sampler, GiB", { zero: true }],
    ["rank", "memory_mib", "Memory of each rank, MiB", { zero: true }],
    ["rank", "gpu_memory_gib", "Peak GPU memory of each rank, GiB", { zero: true }],
  ];
  const logged = [...new Set(runs.flatMap((r) => Object.keys(r.metrics)))];
  const keys = (kind, figure) => logged.map((k) => new RegExp(`^${kind}/(\\d+)/${figure}$`).exec(k)).filter(Boolean)
    .sort((a, b) => a[1] - b[1]).map(([k, n]) => [k, `${kind} ${n}`]);
  const SHOWN = 8;
  const drawn = FIGURES.map(([kind, figure, title, how]) => {
    const found = keys(kind, figure);
    const first = found.length > SHOWN ? ` (the first ${SHOWN} of ${found.length})` : "";
    return [title + first, { ...how, ofPicked: true, keys: found.slice(0, SHOWN) }];
  }).filter(([, spec]) => spec.keys.length);
  const all = [["Samplers that work", { zero: true, keys: [["sampler/ready", "samplers"]] }],
    ["Started once more", { zero: true, keys: [["sampler/restarts", "samplers"], ["sampler/redispatched", "groups"]] }]];
  return drawn.length ? [{ id: "workers", title: "Samplers and ranks", charts: [...drawn, ...(logged.includes("sampler/ready") ? all : [])] }] : [];
};
