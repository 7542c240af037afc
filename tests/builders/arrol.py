"""Build rollouts and a learned rule of the gate `arrol`."""

from __future__ import annotations

from typing import Any

import numpy as np

from winnow.methods.gate.arrol.gate import Arrol, ArrolGate
from winnow.methods.gate.base import GateContext
from winnow.types import Decision, Fate, Group, GroupView, Prompt, Rollout, Token, Turn, Verdict, Visit

H = 6


def built(options: Arrol, seed: int = 0) -> ArrolGate:
    return options.build(GateContext("arrol", seed))


def view(
    number: int,
    sibling: int,
    size: int,
    hidden: np.ndarray,
    *,
    logp: float = -0.5,
    model_logp: float | None = None,
    n: int = 4,
) -> GroupView:
    """`model_logp`: before temperature, top-k and top-p; None: `logp`."""
    return GroupView(
        visit=Visit(number, 0, Prompt(f"p{number}", number, text="x")),
        at=Token(n),
        actions=((),) * size,
        observations=((),) * size,
        running=(True,) * size,
        sibling=sibling,
        hidden=hidden.astype(np.float32),
        logp=np.full(n, logp, np.float32),
        raw_logp=np.full(n, logp if model_logp is None else model_logp, np.float32),
    )


def rollout(
    sibling: int,
    reward: float | None,
    survival_p: float = 1.0,
    hidden: np.ndarray | None = None,
    verdict: Verdict | None = None,
) -> Rollout:
    """`verdict`: what the gate said about it at its fourth token; None: it was not asked."""
    ids, mask = np.arange(8), np.ones(8, bool)
    turns = [Turn("a", None, 0, 8, "eos")]
    versions = np.zeros(8, np.int32)
    logp = np.full(8, -0.5, np.float32)
    fate = None if reward is not None else Fate.PRUNED
    return Rollout(
        sibling, (1,), ids, mask, logp, versions, turns, reward=reward, fate=fate, survival_p=survival_p,
        last_hidden=hidden, decisions=[] if verdict is None else [Decision("arrol", Token(4), verdict)],
    )  # fmt: skip


def group_of(number: int, members: list[Rollout]) -> Group:
    return Group(Visit(number, 0, Prompt(f"p{number}", number, text="x")), members)


def play(gate: Any, steps: int, *, groups: int = 12, size: int = 8, seed: int = 0, order: int = 1) -> list[Verdict]:
    """Optimizer steps with rollouts whose success shows in the first component of the hidden state."""
    verdicts = []
    for step in range(steps):
        finished, rule = [], gate.rule()
        for g in range(groups)[::order]:
            number = step * groups + g
            rng = np.random.default_rng([seed, number])
            hidden, noise = rng.normal(size=(size, H)), rng.random(size)
            members = []
            for i in range(size)[::order]:
                (verdict,) = rule.decide([view(number, i, size, hidden[i])])
                verdicts.append(verdict)
                label = float(noise[i] < 1 / (1 + np.exp(1.5 - 2 * hidden[i, 0])))
                kept = (label, verdict.probability) if verdict.keep else (None, 1.0)
                members.append(rollout(i, *kept, hidden[i].astype(np.float32), verdict))
            finished.append(group_of(number, sorted(members, key=lambda r: r.sibling)))
        for group in finished[::order]:
            gate.observe_group(group)
        gate.end_step()
    return verdicts
