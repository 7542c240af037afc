"""Jobs and groups as plain JSON values, for checkpoints and for messages between sampler and learner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ..base.array_json import pack, pack_all, unpack, unpack_all
from ..base.state import STRICT
from ..env.base import Task
from ..env.prompt_store import StoredPrompts
from ..types import (
    Decision,
    Draft,
    EnvStep,
    Fate,
    Group,
    GroupKind,
    Job,
    Prompt,
    Purpose,
    Rollout,
    Segment,
    Token,
    Turn,
    Verdict,
    Visit,
)

Prompts = Sequence[Prompt] | Mapping[int, Prompt]
"""Prompts by ordinal."""
PACKED = "packed"
ARRAYS = ("token_ids", "action_mask", "sampler_logp", "versions", "raw_logp", "last_hidden")
"""Array fields of a rollout. Those of a whole group are packed as one."""
_TURN = tuple(f.name for f in fields(Turn))
_VERDICT = tuple(f.name for f in fields(Verdict))
_PLAIN = tuple(
    f.name for f in fields(Rollout) if f.name not in (*ARRAYS, "prompt_ids", "turns", "decisions", "later_segments")
)

_GROUPS: TypeAdapter[list[Group]] = TypeAdapter(list[Group], config=STRICT)


def prompts_of(task: Task) -> dict[Purpose, Prompts]:
    """Return the prompts of each purpose, by ordinal."""
    stored = isinstance(task.test, StoredPrompts)
    held_out: Prompts = task.test if stored else {prompt.ordinal: prompt for prompt in task.test}
    return {"train": task.train, "profile": task.train, "probe": task.train, "eval": held_out, "greedy": held_out}


def job_state(job: Job) -> dict[str, Any]:
    """Encode a job as plain JSON values; its prompt by ordinal."""
    turns = [np.array(turn, np.int32) for draft in job.drafts for turn in draft]
    drafts = {"turns": [len(draft) for draft in job.drafts], "tokens": pack_all(turns)} if turns else None
    plain = {"size": job.size, "purpose": job.purpose, "first": job.first}
    return {"visit": visit_state(job.visit), "drafts": drafts} | plain


def job_from(state: Mapping[str, Any], prompts: Mapping[Purpose, Prompts]) -> Job:
    """Decode what `job_state` encoded."""
    visit = visit_from(state["visit"], prompts[state["purpose"]])
    drafts: tuple[Draft, ...] = ()
    if packed := state["drafts"]:
        turns = iter([tuple(turn.tolist()) for turn in unpack_all(packed["tokens"]) if turn is not None])
        drafts = tuple(tuple(islice(turns, n)) for n in packed["turns"])
    return Job(visit, state["size"], state["purpose"], state["first"], drafts)


def visit_state(visit: Visit) -> list[Any]:
    """Encode a visit as plain JSON values; its prompt by ordinal."""
    return [visit.number, visit.epoch, visit.prompt.ordinal, _verdict_state(visit.verdict)]


def visit_from(state: Sequence[Any], prompts: Prompts) -> Visit:
    """Decode what `visit_state` encoded; `prompts` are those of its data set."""
    number, epoch, ordinal, verdict = state
    return Visit(number, epoch, prompts[ordinal], _verdict_from(verdict))


def group_state(group: Group) -> dict[str, Any]:
    """Encode a finished group as plain JSON values; its prompt by ordinal."""
    prompt_ids = group.rollouts[0].prompt_ids if group.rollouts else ()
    return {
        "visit": visit_state(group.visit),
        "decisions": [_decision_state(d) for d in group.decisions],
        "purpose": group.purpose,
        "prompt_ids": list(prompt_ids),
        "rollouts": [_rollout_state(r, prompt_ids) for r in group.rollouts],
        "arrays": pack_all([array for r in group.rollouts for array in _arrays_of(r)]),
    }


def group_from(state: Mapping[str, Any], prompts: Mapping[Purpose, Prompts]) -> Group:
    """Decode what `group_state` encoded."""
    visit = visit_from(state["visit"], prompts[state["purpose"]])
    decisions = [_decision_from(d) for d in state["decisions"]]
    arrays = iter(unpack_all(state["arrays"]))
    prompt_ids = tuple(state["prompt_ids"])
    rollouts = [_rollout_from(r, prompt_ids, arrays) for r in state["rollouts"]]
    return Group(visit, rollouts, decisions, state["purpose"])


def saved_groups(states: Sequence[Mapping[str, Any]], prompts: Mapping[Purpose, Prompts]) -> list[Group]:
    """Decode groups of a checkpoint. Raises ValueError on one that no run can have sampled."""
    groups = [group_from(state, prompts) for state in states]
    _GROUPS.validate_python(groups)
    for group in groups:
        _require_possible(group)
    return groups


def _require_possible(group: Group) -> None:
    """Raise ValueError for a group that no run can have sampled."""
    for rollout in group.rollouts:
        if not np.isfinite(rollout.sampler_logp).all():
            raise ValueError(f"visit {group.visit.number}: non-finite log-probabilities")
        starts, tokens = [segment.start for segment in rollout.segments], len(rollout.token_ids)
        if any(start >= after for start, after in pairwise([*starts, tokens + 1])):
            raise ValueError(
                f"visit {group.visit.number}: segments of sibling {rollout.sibling} start at {starts}, which do not "
                f"ascend within its {tokens} tokens"
            )


def _arrays_of(rollout: Rollout) -> list[np.ndarray | None]:
    """Return its arrays and the prompts of later segments, whose repetitions compress well as arrays."""
    prompts = [np.array(segment.prompt_ids, np.int32) for segment in rollout.later_segments]
    return [getattr(rollout, name) for name in ARRAYS] + prompts


def _rollout_state(rollout: Rollout, prompt_ids: tuple[int, ...]) -> dict[str, Any]:
    state = {name: _plain(getattr(rollout, name)) for name in _PLAIN}
    if rollout.prompt_ids != prompt_ids:
        state["prompt_ids"] = list(rollout.prompt_ids)
    state["turns"] = [_turn_state(t) for t in rollout.turns]
    state["decisions"] = [_decision_state(d) for d in rollout.decisions]
    state["later_segments"] = [[segment.start, segment.agent] for segment in rollout.later_segments]
    return state


def _turn_state(turn: Turn) -> dict[str, Any]:
    """Encode a turn; of an observation of messages its text, and a message as text, as a call may have any number."""
    state = {name: getattr(turn, name) for name in _TURN}
    state["message"] = None if turn.message is None else json.dumps(turn.message)
    return state | {"observation": None if turn.observation is None else str(turn.observation)}


def _turn_from(state: Mapping[str, Any]) -> Turn:
    message = state["message"]
    return Turn(**{**state, "message": json.loads(message) if isinstance(message, str) else message})


def _rollout_from(state: Mapping[str, Any], prompt_ids: tuple[int, ...], left: Iterator[Any]) -> Rollout:
    """`left`: arrays of this rollout and of those after it."""
    arrays = list(islice(left, len(ARRAYS)))
    kinds = [None if a is None else (a.dtype.kind, a.shape) for a in arrays[:4]]
    if kinds != [(kind, (len(arrays[0]),)) for kind in "ibfi"]:
        raise ValueError("rollout: shapes or dtypes of tokens, mask, log-probabilities and versions do not match")
    values = {**state, **dict(zip(ARRAYS, arrays, strict=True))}
    values["prompt_ids"] = tuple(state["prompt_ids"]) if "prompt_ids" in state else prompt_ids
    values["turns"] = [_turn_from(t) for t in state["turns"]]
    values["decisions"] = [_decision_from(d) for d in state["decisions"]]
    values["fate"] = Fate(state["fate"]) if state["fate"] else None
    later = state["later_segments"]
    prompts = [tuple(ids.tolist()) for ids in islice(left, len(later))]
    values["later_segments"] = [Segment(start, ids, agent) for (start, agent), ids in zip(later, prompts, strict=True)]
    return Rollout(**values)


def _decision_state(decision: Decision) -> dict[str, Any]:
    at = ["token", decision.at.n] if isinstance(decision.at, Token) else ["step", decision.at.k]
    return {"gate": decision.gate, "at": at, "verdict": _verdict_state(decision.verdict), "turn": decision.turn}


def _decision_from(state: Mapping[str, Any]) -> Decision:
    kind, n = state["at"]
    at = Token(n) if kind == "token" else EnvStep(n)
    return Decision(state["gate"], at, _verdict_from(state["verdict"]), state["turn"])


def _verdict_state(verdict: Verdict) -> dict[str, Any]:
    return {name: _plain(getattr(verdict, name)) for name in _VERDICT}


def _verdict_from(state: Mapping[str, Any]) -> Verdict:
    verdict = Verdict(**_real(state))
    return replace(verdict, counts_as=GroupKind(verdict.counts_as))


def _plain(value: Any) -> Any:
    """Pack arrays at any depth."""
    if isinstance(value, np.ndarray):
        return {PACKED: pack(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _real(value: Any) -> Any:
    """Undo `_plain`."""
    if isinstance(value, Mapping) and set(value) == {PACKED}:
        return unpack(value[PACKED])
    if isinstance(value, Mapping):
        return {key: _real(inner) for key, inner in value.items()}
    return value
