"""Groups as plain JSON values: inside a checkpoint, and on their way from a sampler to the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from ..base.packed import pack, unpack
from ..types import Fate, Group, Prompt, Rollout, Turn, Verdict, Visit

_ARRAYS = ("token_ids", "action_mask", "sampler_logp", "versions")


def visit_state(visit: Visit) -> list[Any]:
    """A visit as plain JSON values; its prompt by ordinal."""
    return [visit.number, visit.epoch, visit.prompt.ordinal, asdict(visit.verdict)]


def visit_from(state: Sequence[Any], prompts: Sequence[Prompt]) -> Visit:
    """The visit that `visit_state` was given; `prompts` are those of its data set."""
    number, epoch, ordinal, verdict = state
    return Visit(number, epoch, prompts[ordinal], Verdict(**verdict))


def group_state(group: Group) -> dict[str, Any]:
    """A finished group as plain JSON values; its prompt by ordinal."""
    return {
        "visit": visit_state(group.visit),
        "verdict": asdict(group.verdict),
        "rollouts": [_rollout_state(r) for r in group.rollouts],
    }


def group_from(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> Group:
    """The group that `group_state` was given; `prompts` are those of its data set."""
    visit = visit_from(state["visit"], prompts)
    return Group(visit, [_rollout_from(r) for r in state["rollouts"]], Verdict(**state["verdict"]))


def _rollout_state(rollout: Rollout) -> dict[str, Any]:
    state = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    state |= {name: pack(state[name]) for name in _ARRAYS}
    return state | {"turns": [asdict(t) for t in rollout.turns], "prompt_ids": list(rollout.prompt_ids)}


def _rollout_from(state: Mapping[str, Any]) -> Rollout:
    values = dict(state) | {name: unpack(state[name]) for name in _ARRAYS}
    values["prompt_ids"] = tuple(state["prompt_ids"])
    values["turns"] = [Turn(**t) for t in state["turns"]]
    values["fate"] = Fate(state["fate"]) if state["fate"] else None
    return Rollout(**values)
