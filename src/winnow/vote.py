"""Many answers to a question, one vote each: how much better than one answer, and whose vote should count more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .bootstrap import paired_bootstrap
from .build import build_task, sampling_params
from .config import ConfigError, RunConfig
from .env.base import Answering
from .evaluate import EVALUATION_STREAM, count_correct, rank_weights, roll_out, summarize, weighted_vote
from .gate.quality import trace_confidence
from .gate.quality_head import FILE, QualityHead
from .rollout import RolloutOptions, RolloutRunner
from .standalone import model_config, opened
from .types import Rollout

Weigh = Callable[[Sequence[Rollout]], np.ndarray]
TAIL = 0.1
"""Share of the tokens that are least confident, for `deepconf-tail`."""


def majority(rollouts: Sequence[Rollout]) -> np.ndarray:
    return np.ones(len(rollouts))


def deepconf(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Lowest group confidence (Fu et al. 2025)."""
    return np.array([trace_confidence(_confidence(r)) for r in rollouts])


def deepconf_tail(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Mean confidence of the least confident tenth of the tokens (Fu et al. 2025)."""
    return np.array([np.sort(c)[: max(1, round(TAIL * len(c)))].mean() for c in map(_confidence, rollouts)])


def logprob(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Rank of the mean log-probability."""
    return rank_weights([_logp(r) for r in rollouts])


WEIGHTS: dict[str, Weigh] = {
    "majority": majority,
    "deepconf": deepconf,
    "deepconf-tail": deepconf_tail,
    "logprob": logprob,
}
"""`head`, ranks of a run's quality head, comes with the run."""


def by_head(head: QualityHead) -> Weigh:
    """Rank of the head's score at the end of the answer; one that was cut off ranks lowest."""

    def weigh(rollouts: Sequence[Rollout]) -> np.ndarray:
        scores = [-np.inf if r.last_hidden is None else head.score(r.last_hidden, _logp(r)) for r in rollouts]
        return rank_weights(np.nan_to_num(scores, nan=-np.inf, neginf=-1e9))

    return weigh


def _logp(rollout: Rollout) -> float:
    return float(rollout.sampler_logp[rollout.action_mask].mean())


def _confidence(rollout: Rollout) -> np.ndarray:
    assert rollout.confidence is not None
    return np.maximum(rollout.confidence, 0)


def vote_model(model: str, values: Mapping[str, Any], weights: Sequence[str]) -> dict[str, Any]:
    """pass@k, and for each of `weights` the share of held-out prompts whose vote is right, with 95% intervals.

    `model` and `values` as for `evaluate_model`; `eval_generations` candidates a prompt. Raises ConfigError for a task
    whose answers cannot be counted, unknown weights, and `head` without a head.
    """
    c = model_config(model, values)
    task = build_task(c.env)
    prompts = task.test[: c.eval_prompts]
    if not isinstance(task, Answering):
        raise ConfigError(f"task {task.name} does not say which answers are the same (Task.answers), so none can win")
    if not prompts:
        raise ConfigError(f"task {task.name} has no held-out prompts")
    kinds = {name: _weigh(name, c) for name in dict.fromkeys(weights)}
    started = time.monotonic()
    with opened(c, task) as (policy, engine, rewarder):
        report = frozenset({"confidence", "last_hidden"})
        params = sampling_params(c, evaluation=True)
        options = RolloutOptions(params, c.max_prompt_length, c.seed, EVALUATION_STREAM, report)
        runner = RolloutRunner(engine, task, policy.tokenizer, rewarder, options)
        groups = roll_out(runner, prompts, c.eval_generations)
    won: dict[str, list[float]] = {name: [] for name in kinds}
    for group in groups:
        candidates = [r for r in group.rollouts if r.reward is not None and r.action_mask.any()]
        if candidates:
            answers = task.answers(group.prompt, [r.text for r in candidates])
            for name, weigh in kinds.items():
                won[name].append(_right(candidates, answers, weigh(candidates), c.success_reward))
    return {
        "model": c.model,
        **summarize(groups, c.success_reward),
        "votes": {name: _interval(won[name], won[next(iter(won))]) for name in won},
        "prompts": len(prompts),
        "n": c.eval_generations,
        "temperature": c.eval_temperature,
        "tokens": sum(int(r.action_mask.sum()) for g in groups for r in g.rollouts),
        "seconds": round(time.monotonic() - started, 3),
    }


def _weigh(name: str, c: RunConfig) -> Weigh:
    if name != "head":
        if name not in WEIGHTS:
            raise ConfigError(f"unknown weights '{name}'; there are {', '.join([*WEIGHTS, 'head'])}")
        return WEIGHTS[name]
    places = [Path(c.model), Path(c.model).parent]
    found = next((place for place in places if (place / FILE).is_file()), None)
    if found is None:
        raise ConfigError(f"weights: head needs {Path(c.model) / FILE}, which a run with gate arrol leaves there")
    return by_head(QualityHead.load(found))


def _right(candidates: Sequence[Rollout], answers: list[str | None], weights: np.ndarray, success: float) -> float:
    """Whether the winner is right; ties and lost votes are decided by who came first."""
    winner = weighted_vote(answers, weights)
    if winner is None:
        return 0.0
    reward = candidates[answers.index(str(winner))].reward
    return float(count_correct(np.array([reward]), success))


def _interval(won: list[float], baseline: list[float]) -> dict[str, Any]:
    """Share of votes won, and the paired difference to the first kind of weights."""
    share, difference = paired_bootstrap(won), paired_bootstrap(np.array(won) - np.array(baseline))
    return {
        "share": share.mean,
        "low": share.low,
        "high": share.high,
        "difference": difference.mean,
        "difference_low": difference.low,
        "difference_high": difference.high,
    }


def render(found: Mapping[str, Any]) -> str:
    """Lines for a terminal."""
    n = found["n"]
    lines = [f"{found['prompts']} prompts, {n} candidates each, temperature {found['temperature']}"]
    lines += [f"{name:<16} {found[name]:.3f}" for name in found if name.startswith("pass@")]
    first = next(iter(found["votes"]))
    for name, v in found["votes"].items():
        line = f"{f'{name}@{n}':<16} {v['share']:.3f}{_span(v['low'], v['high'], '.3f')}"
        gain = f"  {v['difference']:+.3f}{_span(v['difference_low'], v['difference_high'], '+.3f')} to {first}"
        lines.append(line + (gain if name != first else ""))
    return "\n".join(lines)


def _span(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
