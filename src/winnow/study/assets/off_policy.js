"use strict";
/* The section of a run whose tokens are older than the policy they change: what fails first when it collapses. */
const offPolicy = {
  id: "off-policy", title: "Off-policy", charts: [
    ["Effective sample size, share of the rollouts", { zero: true, share: true, format: charts.percent, keys: [["ess_ratio", "effective"], ["ess_ratio/with_gradient", "of those with a gradient"], ["ess_ratio/reference", "on policy"]] }],
    ["KL of sampler to learner (log scale)", { log: true, keys: [["sampling/kl", "nats a token"]] }],
    ["Gradient norm (log scale)", { log: true, keys: [["grad_norm", "before clipping"]] }],
    ["Training reward", { keys: [["reward", "reward"]] }],
    ["Held-out pass@1", { evals: true, points: true, share: true, keys: [["eval/pass@1", "pass@1"]] }],
    ["Log ratio of rollouts", { keys: [["sampling/log_ratio/p50", "median, 5% to 95%"], ["sampling/log_ratio/max", "largest"]],
      band: ["sampling/log_ratio/p05", "sampling/log_ratio/p95"] }],
    ["Trained tokens by lag", { stacked: true, share: true, format: charts.percent,
      keys: ["0", "1", "2", "3-4", "5-8", "9-16", "17_up"].map((band, n) => [`lag/${band}`, band.replace("_", " and "), `lag${n}`]) }],
    ["Lag, optimizer steps", { zero: true, keys: [["lag/mean", "mean"], ["lag/max", "largest"]] }],
    ["Truncated or masked by the correction", { zero: true, share: true, format: charts.percent, keys: [["correction/clipped_share", "share"]] }],
    ["Learning rate", { zero: true, keys: [["effective_learning_rate", "effective"], ["learning_rate", "set"]] }],
    ["Difference of log-probabilities (log scale)", { log: true,
      keys: [["sampling/sampling_logp_difference/mean", "mean of tokens"], ["sampling/sampling_logp_difference/max", "largest"]] }],
    ["Importance ratio of tokens (log scale)", { log: true, keys: [["sampling/importance_sampling_ratio/max", "largest"],
      ["sampling/importance_sampling_ratio/min", "smallest"], ["sampling/importance_sampling_ratio/mean", "mean"]] }],
    ["Idle share of the time", { zero: true, share: true, format: charts.percent, keys: [["idle/sampler", "sampler"], ["idle/learner", "learner"]] }],
    ["Throughput", { zero: true, keys: [["throughput/tokens_per_s", "tokens/s"]] }],
  ],
};
