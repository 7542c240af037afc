"""Groups, decisions and visits as they travel: nothing is lost between sampler, learner and checkpoint."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.gate import GateContext
from winnow.methods.gate.arrol.gate import Arrol
from winnow.methods.select.trace import EASY
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.sampler.codec import group_from, group_state, job_from, job_state, prompts_of, visit_from, visit_state
from winnow.types import Decision, EnvStep, Fate, Group, Job, Prompt, Rollout, Segment, Token, Turn, Verdict, Visit

from ..builders.audited import answered, build
from ..builders.groups import make_group
from ..builders.toy_rollouts import ToyTask
from ..gates import named

PROMPTS = [Prompt(f"p{i}", i, text=str(i)) for i in range(5)]


def travelled(value: Any) -> Any:
    """As it comes out of a file or a pipe."""
    return json.loads(json.dumps(value, allow_nan=False))


def same(a: Any, b: Any) -> None:
    """Types, and numbers to the last bit."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, Group | Rollout | Decision | Verdict | Visit | Turn | Segment):
        for field in fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


def decided(keep: bool, **more: Any) -> Verdict:
    evidence = {"score": 0.1 + 0.2, "hidden": np.array([1.5, -0.0, 1e-45], np.float32), "note": "near"}
    return Verdict(keep, "said so", 0.25, evidence=evidence, **more)


def test_a_group_keeps_all_it_has() -> None:
    full = Rollout(
        sibling=0,
        prompt_ids=(3, 4),
        token_ids=np.array([5, 6, 7]),
        action_mask=np.array([True, False, True]),
        sampler_logp=np.array([-0.1, 0, -0.3], np.float32),
        versions=np.array([4, -1, 5], np.int32),
        turns=[Turn("a", "b", 0, 1, "stop", canonical="A", progress=0.5), Turn("c", None, 2, 3, "eos")],
        stop_reason="env",
        text="a b c",
        reward=1 / 3,
        rewards={"f": 1 / 3, "g": None},
        fate=Fate.TRAINED,
        reason="because",
        survival_p=0.3,
        seconds=0.7,
        barrier_wait_s=0.2,
        raw_logp=np.array([-0.2, -0.7], np.float32),
        last_hidden=np.array([1.0, np.float32(1) / 3], np.float32),
        decisions=[Decision("arrol", Token(2), decided(True, override_probability=0.1), 1)],
        agent="solver",
        later_segments=[Segment(1, (3, 4, 5, 9), "critic"), Segment(2, (8,))],
    )
    bare = Rollout(1, (), *(np.empty(0, t) for t in (np.int64, bool, np.float32, np.int32)), greedy=True)
    verdict = Verdict(True, "audit: too easy", 0.4, override_probability=0.2)
    group = Group(
        Visit(7, 2, PROMPTS[3], verdict),
        [full, bare, replace(full, sibling=2, agent="", later_segments=[Segment(2, (7,) * 9)])],
        [Decision("divergence", EnvStep(3), decided(False), 3), Decision("random", EnvStep(4), Verdict(True), 4)],
        "eval",
    )
    state = travelled(group_state(group))
    again = group_from(state, {"train": PROMPTS[:1], "eval": {3: PROMPTS[3]}})
    same(again, group)
    assert again.prompt is PROMPTS[3]
    assert again.rollouts[0].decisions[0].verdict.evidence["hidden"].flags.writeable
    assert travelled(group_state(again)) == state


def test_a_group_without_tokens_travels() -> None:
    nothing = [np.empty(0, t) for t in (np.int64, bool, np.float32, np.int32)]
    for rollouts in ([], [Rollout(0, (1,), *nothing), Rollout(1, (2, 3), *nothing)]):
        group = Group(Visit(0, 0, PROMPTS[0]), rollouts)
        same(group_from(travelled(group_state(group)), {"train": PROMPTS}), group)


def test_what_prompts_of_segments_repeat_takes_little_room() -> None:
    """30 segments, each with a prompt of the same 3,000 random tokens and 20 more than the one before."""
    ids = np.random.default_rng(0).integers(0, 50_000, 3_600)
    ones = np.ones(ids.size, np.int32)
    later = [Segment(20 * n, tuple(ids[: 3_000 + 20 * n].tolist())) for n in range(1, 30)]
    rollout = Rollout(
        0, tuple(ids[:3_000].tolist()), ids, ones > 0, -ones.astype(np.float32), ones, later_segments=later
    )
    sizes = [
        len(json.dumps(group_state(Group(Visit(0, 0, PROMPTS[0]), [r]))))
        for r in (rollout, replace(rollout, later_segments=[]))
    ]
    assert sizes[0] < 3 * sizes[1]


def test_jobs_find_their_prompts_by_purpose() -> None:
    task = ToyTask(train=PROMPTS, test=[Prompt("held out", 11, text="x")])
    prompts = prompts_of(task)
    for purpose in ("train", "profile", "probe"):
        job = Job(Visit(5, 1, PROMPTS[2]), 8, purpose)
        assert job_from(travelled(job_state(job)), prompts) == job
    for purpose in ("eval", "greedy"):
        job = Job(Visit(0, 0, task.test[0]), 1, purpose)
        assert job_from(travelled(job_state(job)), prompts) == job


def test_a_sampled_group_of_a_gate_comes_back_whole_and_teaches_the_same(tiny_model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    task, context = ToyTask(), GateContext("arrol")
    direct, through = (Arrol(at=3, cold_start=1, min_survivors=0).build(context) for _ in range(2))
    rewarder = Rewarder(task.reward_funcs)
    options = RolloutOptions(SamplingParams(12), 32, seed=0)
    runner = RolloutRunner(LocalEngine(*policy, slots=8), task, policy[1], rewarder, {"train": options})
    for _ in range(3):
        runner.set_rules(named([direct]))
        for number, prompt in enumerate(task.train[:4]):
            runner.launch(Job(Visit(number, 0, prompt), 4))
        groups: list[Group] = []
        while runner.pending:
            groups += runner.poll()
        again = [group_from(travelled(group_state(group)), {"train": task.train}) for group in groups]
        for a, b in zip(again, groups, strict=True):
            same(a, b)
            direct.observe_group(b)
            through.observe_group(a)
        for gate in (direct, through):
            gate.end_step()
    rewarder.close()
    rollouts = [r for g in again for r in g.rollouts]
    assert any(r.fate == Fate.PRUNED for r in rollouts)
    assert any(r.last_hidden is not None for r in rollouts)
    assert any(len(r.decisions) == 1 for r in rollouts)
    assert through.state_dict() == direct.state_dict()


def test_an_overridden_visit_in_flight_keeps_its_override() -> None:
    """It is rolled out again after a resume, and is then an audited one."""
    selector = build("backoff", PROMPTS, epsilon=1.0)
    selector.part.z_N[:], selector.part.kind_N[:] = 9, EASY
    visits = selector.select(3)
    assert [v.verdict.override_probability for v in visits] == [1.0] * 3
    resumed = build("backoff", PROMPTS, epsilon=1.0)
    resumed.load_state_dict(travelled(selector.state_dict()))
    for visit in visits:
        again = visit_from(travelled(visit_state(visit)), PROMPTS)
        assert again == visit
        resumed.observe_group(answered(again, teaches=False))
        selector.observe_group(answered(visit, teaches=False))
    assert resumed.metrics()["audit/backoff/audited"] == 3
    assert resumed.state_dict() == selector.state_dict()


@pytest.mark.parametrize("name", ["greso", "backoff"])
def test_every_verdict_of_a_selector_travels(name: str) -> None:
    selector = build(name, PROMPTS, epsilon=0.5)
    selector.part.z_N[::2] = 3
    if name == "greso":
        selector.part.kind_N[::2] = 1
    for visit in selector.select(12):
        assert visit_from(travelled(visit_state(visit)), PROMPTS) == visit


def test_calls_of_any_numbers_travel() -> None:
    arguments = {"a": 12345678901234567890, "b": float("inf")}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    group = make_group(0, [1.0, 0.0])
    group.rollouts[0].turns = [Turn("f", None, 0, 1, "stop", message=message)]
    back = group_from(travelled(group_state(group)), {"train": [group.prompt]})
    assert back.rollouts[0].turns[0].message == message
