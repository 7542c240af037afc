"""What a pruning rule leaves of the signal: groups that ran to their end, pruned afterwards by each rule.

Groups of a finished run's model are recorded with what a gate sees at the detection token; half of them teach a head
and its calibration, the other half are pruned many times. No policy is trained, so all rules are judged on the same.

    python benchmarks/arrol_signal.py --work runs/arrol-claims --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import claims_figures as f
import numpy as np
from arms import ROOT, fill, table, write_json
from claims_tables import text

from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.gate import NamedRule
from winnow.methods.gate.arrol.head import Example, QualityHead
from winnow.methods.gate.arrol.stats import auroc
from winnow.methods.gate.calibration import BinnedPosterior, survival_factor, survival_probabilities
from winnow.rollout.evaluate import run_jobs
from winnow.rollout.runner import RolloutRunner
from winnow.run.build import build_policy, build_success, build_task, rollout_options
from winnow.run.standalone import model_config
from winnow.types import GroupView, Job, Token, Verdict, Visit

SIZE, DRAWS, FITS = 16, 20, 60
KEEP_RATE, P_MIN = 0.5, 0.05


@dataclass(frozen=True)
class Recorder:
    """A rule that notes what it is shown in its evidence and lets everybody pass."""

    at: Token
    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "logp"})

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [Verdict(True, evidence={"hidden": view.hidden, "logp": view.logp}) for view in views]


@dataclass(frozen=True)
class Recorded:
    """One row a rollout that came to the detection token."""

    group_N: np.ndarray
    right_N: np.ndarray
    hidden_NH: np.ndarray
    logp_N: np.ndarray
    """Mean so far."""
    total_N: np.ndarray
    """Sum so far."""
    alike_N: np.ndarray
    """How many siblings had sampled the same tokens by then, itself included."""


def record(run: Path, at: int, n_groups: int) -> Recorded:
    c = model_config(str(run), {})
    task = build_task(c.env)
    policy, engine = build_policy(c, None, None, None)
    rewarder = Rewarder(c.reward_funcs or task.reward_funcs, c.reward_weights, c.reward_timeout_s)
    assert engine is not None
    success = build_success(c, rewarder.aliases, c.reward_weights)
    rule = NamedRule("recorder", Recorder(Token(at)))
    runner = RolloutRunner(engine, task, policy.tokenizer, rewarder, rollout_options(c), [rule])
    try:
        groups = run_jobs(runner, [Job(Visit(i, 0, p), SIZE) for i, p in enumerate(task.train[:n_groups])])
    finally:
        rewarder.close()
    rows = []
    for group in groups:
        said = Counter(r.token_ids[:at].tobytes() for r in group.rollouts)
        for r in group.rollouts:
            if (asked := r.decision_of("recorder")) is not None and r.reward is not None:
                hidden, logp = (asked.verdict.evidence[name] for name in ("hidden", "logp"))
                right, alike = success.right(r), said[r.token_ids[:at].tobytes()]
                rows.append((group.visit.number, right, hidden, logp.mean(), logp.sum(), alike))
    return Recorded(*(np.array(column) for column in zip(*rows, strict=True)))


def predicted(seen: Recorded, teach_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Head scores and calibrated chances of success of all rows, learned on `teach_N`."""
    head = QualityHead(0)
    head._examples.capacity = len(teach_N)
    for i in np.flatnonzero(teach_N):
        head.observe(Example(seen.hidden_NH[i], float(seen.logp_N[i]), bool(seen.right_N[i]), 1.0))
    for _ in range(FITS):
        head.fit()
    score_N = head.weights.scores(seen.hidden_NH, seen.logp_N)
    rank_N = np.searchsorted(np.sort(score_N[teach_N]), score_N) / teach_N.sum()
    posterior = BinnedPosterior(capacity=len(teach_N))
    for i in np.flatnonzero(teach_N):
        posterior.observe(float(rank_N[i]), bool(seen.right_N[i]))
    return score_N, posterior.posterior(rank_N)


def rules(seen: Recorded, q_N: np.ndarray, teach_N: np.ndarray) -> dict[str, np.ndarray]:
    """Rule -> chances of survival."""

    def spread(weight_N: np.ndarray) -> np.ndarray:
        return np.clip(survival_factor(weight_N[teach_N], KEEP_RATE, P_MIN) * weight_N, P_MIN, 1)

    return {
        "none pruned": np.ones(len(q_N)),
        "random": np.full(len(q_N), KEEP_RATE),
        "target": survival_probabilities(q_N, q_N[teach_N], KEEP_RATE, p_min=P_MIN),
        "literal": survival_probabilities(q_N, q_N[teach_N], KEEP_RATE, p_min=P_MIN, balance="literal"),
        "distinct": spread(1 / (1 + (SIZE - 1) * np.exp(seen.total_N))),
        "distinct, siblings seen": spread(1 / seen.alike_N),
    }


def outcome(seen: Recorded, chance_N: np.ndarray, judged_N: np.ndarray) -> dict[str, float]:
    """Means over groups and draws. `signal`: sum of squared deviations from the group's mean reward."""
    rng, found = np.random.default_rng(0), []
    rows = [np.flatnonzero((seen.group_N == g) & judged_N) for g in np.unique(seen.group_N[judged_N])]
    for _ in range(DRAWS):
        kept_N = rng.random(len(chance_N)) < chance_N
        for row in rows:
            right = seen.right_N[row[kept_N[row]]]
            n, share = len(right), right.mean() if len(right) else 0.0
            found.append((n, n * share, share * (1 - share), 0 < share < 1, n * share * (1 - share)))
    kept, rights, balance, mixed, signal = np.array(found, dtype=np.float64).T
    means = {"kept": kept.mean() / SIZE, "right": rights.sum() / kept.sum(), "balance": balance.mean()}
    return {k: float(v) for k, v in (means | {"mixed": mixed.mean(), "signal": signal.mean()}).items()}


def judge(run: Path, at: int, n_groups: int) -> dict[str, Any]:
    seen = record(run, at, n_groups)
    teach_N = seen.group_N < n_groups // 2
    score_N, q_N = predicted(seen, teach_N)
    found: dict[str, Any] = {n: outcome(seen, p, ~teach_N) for n, p in rules(seen, q_N, teach_N).items()}
    within = [
        auroc(score_N[rows], seen.right_N[rows], np.ones(rows.sum()))
        for g in np.unique(seen.group_N[~teach_N])
        if 0 < seen.right_N[rows := seen.group_N == g].mean() < 1
    ]
    everywhere = auroc(score_N[~teach_N], seen.right_N[~teach_N], np.ones((~teach_N).sum()))
    aurocs = {"auroc": everywhere, "auroc_within": float(np.mean(within))}
    return {"at": at, "alike": float(seen.alike_N.mean()), **aurocs, "rules": found}


def signal_table(found: list[dict[str, Any]]) -> str:
    def column(rule: str, key: str, form: Callable[[Any], float]) -> str:
        return text(f.interval([form(x["rules"][rule][key]) for x in found]), "{:.3f}")

    rows = []
    for rule in found[0]["rules"]:
        cells = [column(rule, key, float) for key in ("kept", "right", "mixed", "balance")]
        ratios = [(x["rules"][rule]["signal"], x["rules"]["random"]["signal"]) for x in found]
        rows.append([rule, *cells, text(f.ratio(ratios), "{:.2f}")])
    head = ["rule", "kept", "right, of those kept", "groups with signal", "p (1 - p)", "signal, against random"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "arrol-claims", help="where arrol_claims.py ran")
    parser.add_argument("--tasks", nargs="+", default=["countdown", "chain-sum"])
    parser.add_argument("--groups", type=int, default=800, help="half of them teach, half are pruned")
    parser.add_argument("--at", type=int, help="detection token (default: half of the mean length)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    said: dict[str, Any] = {}
    for task in options.tasks:
        for run in sorted(options.work.glob(f"{task}-grpo-s[0-9]*")):
            length = json.loads((run / "claim.json").read_text(encoding="utf-8"))["deployed"]["mean_length"]
            said.setdefault(task, []).append(judge(run, options.at or max(1, round(length / 2)), options.groups))
            print(task, run.name, json.dumps(said[task][-1]), flush=True)
    if options.out:
        write_json(options.out, said)
    if options.docs:
        fill(options.docs, {f"arrol-{task}-signal": signal_table(found) for task, found in said.items()})


if __name__ == "__main__":
    main()
