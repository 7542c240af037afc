"""Votes over many answers to a question: the gain over one answer, and weights for the votes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from ..config import RunConfig
from ..env.base import Answering, Task
from ..env.rewards.pooled import completion_text
from ..env.rewards.scores import completion_of
from ..methods.gate.arrol.head import FILE, HeadWeights, mean_logp
from ..methods.intervals import mean_interval, score_interval
from ..methods.success import Success
from ..rollout.evaluate import rank_weights, summarize, weighted_vote
from ..run.checkpoint import STATE
from ..run.inputs import build_task
from ..run.standalone import model_config, opened
from ..types import Job, Prompt, Rollout, Visit

Weigh = Callable[[Sequence[Rollout]], np.ndarray]


def majority(rollouts: Sequence[Rollout]) -> np.ndarray:
    return np.ones(len(rollouts))


def by_head(head: HeadWeights) -> Weigh:
    """Return a weighting by rank of the head's score at the last token of the answer."""

    def weigh(rollouts: Sequence[Rollout]) -> np.ndarray:
        scores = [np.nan if r.last_hidden is None else head.score(r.last_hidden, mean_logp(r)) for r in rollouts]
        return rank_weights(np.nan_to_num(scores, nan=-1e9))

    return weigh


def vote_model(model: str, values: Mapping[str, Any], weights: Sequence[str]) -> dict[str, Any]:
    """Return pass@k, and for each of `weights` the share of held-out prompts with a right vote, with 95% intervals.

    `model` and `values` as for `evaluate_model`; `eval_generations` candidates per prompt. `answered`: share of the
    candidates with an answer at all; `judged`: prompts with a vote. Raises ConfigError for a task whose answers cannot
    be counted, unknown weights, `head` without a head of this model, and when no candidate has an answer.
    """
    with model_config(model, values) as (c, shown, saved):
        task = build_task(c.env)
        prompts = task.test[: c.eval_prompts]
        same_answers = _reader(task, c.reward_funcs)
        if not prompts:
            raise ConfigError(f"task {task.name} has no held-out prompts")
        head = _head_of(c) if "head" in weights else None
        kinds = {name: _weigh(name, head) for name in dict.fromkeys(weights)}
        started = time.monotonic()
        report = frozenset({"last_hidden", "raw_logp"})
        with opened(c, task, prompts, saved, report) as (policy, roll_out, _, success):
            success.require()
            if head is not None:
                _check_size(head, policy.model.config, shown)
            n = c.eval_generations
            groups = roll_out([Job(Visit(i, 0, prompt), n, "eval") for i, prompt in enumerate(prompts)])
    success.observe(r for group in groups for r in group.rollouts)
    success.require()
    won: dict[str, list[float]] = {name: [] for name in kinds}
    given: list[bool] = []
    for group in groups:
        candidates = [r for r in group.rollouts if success.right(r) is not None and r.action_mask.any()]
        if candidates:
            texts = [completion_text(completion_of(group.prompt, r)) for r in candidates]
            answers = same_answers(group.prompt, texts)
            given += [answer is not None for answer in answers]
            for name, weigh in kinds.items():
                won[name].append(_right(candidates, answers, weigh(candidates), success))
    if not given:
        raise ConfigError(
            "no completion was given a reward, so no vote can be judged; look at reward_funcs and prompts"
        )
    if not any(given):
        raise ConfigError(
            f"task {task.name} reads no answer in any of the {len(given)} completions, so there is nothing to vote on; "
            "look at what the model says (winnow eval), and how the task marks answers"
        )
    return {
        "model": shown,
        **summarize(groups, success),
        "answered": float(np.mean(given)),
        "judged": len(won[next(iter(won))]),
        "votes": {name: _interval(won[name], won[next(iter(won))]) for name in won},
        "prompts": len(prompts),
        "n": c.eval_generations,
        "temperature": c.eval_temperature,
        "tokens": sum(int(r.action_mask.sum()) for g in groups for r in g.rollouts),
        "seconds": round(time.monotonic() - started, 3),
    }


def _reader(task: Task, reward_funcs: Sequence[Any] | None) -> Callable[[Prompt, Sequence[str]], list[str | None]]:
    """Return a reader of answers: the task's, but if `exact` is the only reward, the whole text is the answer."""
    if list(reward_funcs or ()) == ["exact"]:
        return lambda _, texts: [text.strip() or None for text in texts]
    if not isinstance(task, Answering):
        raise ConfigError(f"task {task.name} does not say which answers are the same (Task.answers), so none can win")
    return task.answers


def _weigh(name: str, head: HeadWeights | None) -> Weigh:
    if name == "majority":
        return majority
    if name == "head" and head is not None:
        return by_head(head)
    raise ConfigError(f"unknown weights '{name}'; there are majority and head")


def _head_of(c: RunConfig) -> HeadWeights:
    """Return the head next to the weights, or in the checkpoint that they are part of."""
    model = Path(c.model)
    places = [model, *([model.parent] if (model.parent / STATE).is_file() else [])]
    found = next((place for place in places if (place / FILE).is_file()), None)
    if found is None:
        raise ConfigError(f"weights: head needs {model / FILE}, which a run with gate arrol leaves there")
    try:
        return HeadWeights.load(found)
    except ValueError as error:
        raise ConfigError(f"weights: {error}") from None


def _check_size(head: HeadWeights, config: Any, model: str) -> None:
    size = getattr(config.get_text_config(), "hidden_size", None)
    if size not in (None, head.hidden_size):
        raise ConfigError(
            f"weights: the head was trained on hidden states of {head.hidden_size} numbers, but {model} has {size}"
        )


def _right(candidates: Sequence[Rollout], answers: list[str | None], weights: np.ndarray, success: Success) -> float:
    """Return 1 if the winner is right, else 0; the first answer wins ties, the first with that answer is judged."""
    winner = weighted_vote(answers, weights)
    if winner is None:
        return 0.0
    return float(bool(success.right(candidates[answers.index(str(winner))])))


def _interval(won: list[float], baseline: list[float]) -> dict[str, Any]:
    """Return the share of votes won, and the paired difference to the first kind of weights."""
    low, high = score_interval(float(np.mean(won)), len(won))
    difference = mean_interval(np.array(won) - np.array(baseline))
    return {
        "share": float(np.mean(won)),
        "low": low,
        "high": high,
        "difference": difference.mean,
        "difference_low": difference.low,
        "difference_high": difference.high,
    }


def render(found: Mapping[str, Any]) -> str:
    """Return lines for a terminal."""
    n = found["n"]
    lines = [
        f"{found['judged']} of {found['prompts']} prompts judged, {n} candidates each at temperature "
        f"{found['temperature']}",
        f"{'answered':<16} {found['answered']:.3f}",
    ]
    lines += [f"{name:<16} {found[name]:.3f}" for name in found if name.startswith("pass@")]
    first = next(iter(found["votes"]))
    for name, v in found["votes"].items():
        line = f"{f'{name}@{n}':<16} {v['share']:.3f}{_span(v['low'], v['high'], '.3f')}"
        gain = f"  {v['difference']:+.3f}{_span(v['difference_low'], v['difference_high'], '+.3f')} to {first}"
        lines.append(line + (gain if name != first else ""))
    return "\n".join(lines)


def _span(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
