"""Rewards of several agents in one rollout: who is compared with whom, what is refused, and what is trained."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error

import numpy as np
import pytest
import torch

from winnow.config import validate
from winnow.learner.rows import rows_of
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.agents import by_agent, filter_without_row
from winnow.methods.group_kind import BY_REWARDS, GroupJudge
from winnow.methods.select.bayes import Bayes
from winnow.methods.size.sequential import Sequential
from winnow.methods.success import Success
from winnow.record.failures import truncated_of
from winnow.record.ledger import Ledger
from winnow.record.ledger_file import LEDGER, rollout_row
from winnow.record.proof import sampled_tokens
from winnow.record.step_metrics import Tally
from winnow.record.watchdogs import Watchdogs
from winnow.tasks.agents import conversation, with_agent
from winnow.types import Fate, Group, GroupKind, Prompt, Segment, Turn, Visit

from ..builders.groups import make_group
from ..builders.requests import ask, text_of, user
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def proposer_and_solver(base_url, prompt):
    question = text_of(ask(base_url, [user("Ask.")], model="policy/proposer"))
    answer = text_of(ask(base_url, [user(question)], model="policy/solver"))
    right = float(answer == "right")
    return {"proposer": 1 - right, "solver": right}


def test_agents_with_rewards_of_their_own_are_compared_with_their_own(tokenizer):
    task = with_agent(OneTurn(), proposer_and_solver)
    rollouts, _ = roll(tokenizer, task, [["q", "right"], ["qq", "wrong"], ["q", "right"]])
    assert [r.agent for r in rollouts] == ["proposer"] * 3
    assert [[segment.agent for segment in r.later_segments] for r in rollouts] == [["solver"]] * 3
    assert [r.reward for r in rollouts] == [0.5] * 3
    assert rollouts[0].rewards == {"env": 0.5, "env/proposer": 0.0, "env/solver": 1.0}
    group = Group(Visit(0, 0, task.train[0]), rollouts)
    assert BY_REWARDS.kind(group) is GroupKind.SIGNAL, "equal in sum, but not for any agent"
    proposer, solver = by_agent([group])
    assert [r.reward for r in proposer.rollouts] == [0.0, 1.0, 0.0]
    assert [r.reward for r in solver.rollouts] == [1.0, 0.0, 1.0]
    assert [tokenizer.decode(r.token_ids) for r in solver.rollouts] == ["right<e>", "wrong<e>", "right<e>"]
    rows = rows_of([proposer, solver], ADVANTAGES["rloo"](), "grpo", max_completion_length=64)
    assert [row.advantage for row in rows] == [-0.5, 1.0, -0.5, 0.5, -1.0, 0.5]


def test_an_agent_without_a_turn_has_no_part_in_its_group(tokenizer):
    def agent(base_url, prompt):
        if text_of(ask(base_url, [user("Ask.")], model="policy/proposer")) == "none":
            return {"proposer": 0.0}
        return {"proposer": 1.0, "solver": float(text_of(ask(base_url, prompt, model="policy/solver")) == "yes")}

    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), [["none"], ["q", "yes"], ["q", "no"]])
    _, solver = by_agent([Group(Visit(0, 0, OneTurn().train[0]), rollouts)])
    assert [r.reward for r in solver.rollouts] == [None, 1.0, 0.0]


def test_a_truncated_rollout_counts_for_all_its_agents(tokenizer):
    """Running out of the context costs them something."""

    def agent(base_url, prompt):
        ask(base_url, [user("Ask.")], model="policy/proposer")
        answer = text_of(ask(base_url, prompt, model="policy/solver"))
        if answer == "more":
            ask(base_url, [user("a" * 400)])
        return {"proposer": 1.0, "solver": 1.0}

    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), [["q", "more", "x"], ["q", "ok"]], context_length=200)
    assert [(r.stop_reason, r.reward) for r in rollouts] == [("context", 0.0), ("env", 1.0)]
    proposer, solver = by_agent([Group(Visit(0, 0, OneTurn().train[0]), rollouts)])
    assert [r.reward for r in proposer.rollouts] == [r.reward for r in solver.rollouts] == [0.0, 1.0]


def test_an_agent_without_a_name_has_its_reward(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        ask(base_url, [user("Ask.")], model="policy/solver")
        return {"": 1.0, "solver": 0.0}

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a", "b"]])
    unnamed, solver = by_agent([Group(Visit(0, 0, OneTurn().train[0]), [rollout])])
    assert (unnamed.rollouts[0].reward, solver.rollouts[0].reward) == (1.0, 0.0)
    assert tokenizer.decode(unnamed.rollouts[0].token_ids) == "a<e>"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda answer: {"slover": 1.0}, "'slover': these keys are no agents of this rollout (asked as 'solver')"),
        (lambda answer: {answer["id"]: 1.0}, "'chatcmpl-"),
        (lambda answer: {"solver": 1.0, "format": 0.5}, "'format': these keys are no agents"),
    ],
)
def test_rewards_for_agents_that_never_asked_are_refused(tokenizer, reward, message):
    def agent(base_url, prompt):
        return reward(ask(base_url, prompt, model="policy/solver"))

    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), [["yes"], ["no"]])
    assert [(r.fate, r.reward, r.agent_rewards) for r in rollouts] == [(Fate.FAILED, None, {})] * 2
    assert rollouts[0].reason.startswith(f"agent agent returned rewards for {message}")


@pytest.mark.parametrize(("turns", "cause"), [(1, "rewards of no agent"), (2, "reward must name at least one agent")])
def test_rewards_of_no_agent_are_named(tokenizer, turns, cause):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        with contextlib.suppress(urllib.error.HTTPError):
            ask(base_url, [user("On.")])
        return {}

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=turns), [["a", "b"]])
    assert rollout.fate == Fate.FAILED
    assert cause in rollout.reason


def test_an_agent_that_a_limit_refused_has_asked(tokenizer):
    """Its reward is no key of nobody; what the other sampled is trained."""

    def agent(base_url, prompt):
        ask(base_url, prompt, model="policy/proposer")
        with contextlib.suppress(urllib.error.HTTPError):
            ask(base_url, [user("On.")], model="policy/solver")
        return {"proposer": 1.0, "solver": 0.0}

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=1), [["q"]])
    assert (rollout.stop_reason, rollout.fate) == ("turns", None)
    assert rollout.agent_rewards == {"proposer": 1.0, "solver": 0.0}


@pytest.mark.parametrize("typo", [False, True])
def test_an_agent_whose_turn_a_limit_prevented_may_have_a_reward(tokenizer, typo):
    def agent(base_url, prompt):
        asked = [user("Ask.")]
        with contextlib.suppress(urllib.error.HTTPError):
            asked += [{"role": "assistant", "content": text_of(ask(base_url, asked, model="policy/proposer"))}]
            ask(base_url, [*asked, user("Again.")], model="policy/proposer")
        return {"propser" if typo else "proposer": 0.25, "solver": 0.0}

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=1), [["q"]])
    assert (rollout.stop_reason, rollout.fate) == (("failed", Fate.FAILED) if typo else ("turns", None))
    assert rollout.agent_rewards == ({} if typo else {"proposer": 0.25, "solver": 0.0})


def test_what_an_agent_without_a_reward_sampled_is_not_trained(tokenizer):
    """Nor booked as trained, next to one that has a reward; and that is reported."""

    def agent(base_url, prompt):
        ask(base_url, prompt)
        return {"solver": float(text_of(ask(base_url, [user("On.")], model="policy/solver")) == "yes")}

    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), [["help!", "yes"], ["help!", "no"]])
    assert (
        "returned no reward for '' (without a name), so what was sampled as such is not trained" in rollouts[0].notes[0]
    )
    group = Group(Visit(0, 0, OneTurn().train[0]), rollouts)
    rows = rows_of(by_agent([group]), ADVANTAGES["rloo"](), "grpo", max_completion_length=64)
    assert [tokenizer.decode(row.rollout.token_ids) for row in rows] == ["yes<e>", "no<e>"]
    for rollout in rollouts:
        rollout.fate = Fate.TRAINED
    tally = Tally(BY_REWARDS)
    tally.fated(group)
    helped = 2 * len(tokenizer.encode("help!<e>", add_special_tokens=False))
    assert tally.tokens == {"trained": sum(len(row.rollout.token_ids) for row in rows), "unrewarded": helped}


def test_a_rollout_without_rewards_of_its_own_is_trained_as_the_groups_rewarded_agents_alone():
    """One that a limit ended has a reward, of all its agents, and no row for those that no sibling has a reward for."""
    group = make_group(0, [1.0, 0.5, 0.0, 0.0], [4, 4, 4, 4])
    for rollout, first in zip(group.rollouts, ("solver", "solver", "proposer", "proposer"), strict=True):
        rollout.agent = first
        rollout.agent_rewards = {"solver": rollout.reward} if first == "solver" else {}
    group.rollouts[3].later_segments = [Segment(2, (5,), "solver")]
    rows = rows_of(by_agent([group]), ADVANTAGES["rloo"](), "grpo", max_completion_length=64)
    assert [len(row.rollout.token_ids) for row in rows] == [4, 4, 2]
    filter_without_row(group, mask_truncated=False)
    assert [rollout.fate for rollout in group.rollouts] == [None, None, Fate.FILTERED, None]
    for rollout in group.rollouts:
        rollout.fate = rollout.fate or Fate.TRAINED
    tally = Tally(BY_REWARDS)
    tally.fated(group)
    assert tally.tokens == {"trained": 10, "unrewarded": 2, "filtered": 4}


def test_a_group_whose_rewards_no_agent_earned_is_refused(tokenizer):
    """Only agents that sampled nothing have a reward: no update has a row of it."""

    def agent(base_url, prompt):
        ask(base_url, prompt)
        with contextlib.suppress(urllib.error.HTTPError):
            ask(base_url, [user("On.")], model="policy/solver")
        return {"solver": 1.0}

    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=1), [["q"], ["q"]])
    group = Group(Visit(0, 0, OneTurn().train[0]), rollouts)
    assert BY_REWARDS.refusal(group) == "only 0 of 2 siblings have a reward"
    filter_without_row(group, mask_truncated=False)
    assert {(r.fate, r.reason) for r in rollouts} == {(Fate.FILTERED, "only agents that sampled nothing have a reward")}


def test_a_reward_that_is_no_number_fails_the_rollout(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt, model="policy/solver")
        return {"solver": float("nan")}

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["yes"]])
    assert rollout.reward is None
    assert rollout.agent_rewards == {}
    assert "unusable reward ({'solver': nan})" in rollout.reason


@pytest.mark.parametrize("masked", [True, False])
def test_truncated_rollouts_that_are_masked_are_not_booked_as_trained(tokenizer, masked):
    """The limit on turns, or one on the last turn, truncates as the one on tokens does."""

    def agent(base_url, prompt):
        answers = [text_of(ask(base_url, prompt))]
        if answers == ["on"]:
            with contextlib.suppress(urllib.error.HTTPError):
                ask(base_url, [user("On.")])
        return 1.0

    task = with_agent(OneTurn(), agent, max_turns=1, max_turn_length=4)
    rollouts, _ = roll(tokenizer, task, [["on"], ["cut, as it is long"], ["ok"]])
    assert [r.stop_reason for r in rollouts] == ["turns", "turn_length", "env"]
    group = Group(Visit(0, 0, OneTurn().train[0]), rollouts)
    rows = rows_of([group], ADVANTAGES["rloo"](), "grpo", max_completion_length=64, mask_truncated=masked)
    filter_without_row(group, mask_truncated=masked)
    left_out = [Fate.FILTERED, Fate.FILTERED, None] if masked else [None] * 3
    assert [r.fate for r in rollouts] == left_out
    assert len(rows) == left_out.count(None)
    tally = Tally(BY_REWARDS)
    tally.finished(group)
    metrics = tally.metrics()
    assert metrics["completions/clipped_ratio"] == 2 / 3
    assert metrics["truncated/max_turns"] == metrics["truncated/max_turn_length"] == 1 / 3


def test_an_agent_that_does_not_return_at_a_limit_holds_nothing_up(tokenizer):
    """Its rollout is truncated and has reward 0, as if it had raised; it is not a failure that hides the limit."""
    done = threading.Event()

    def agent(base_url, prompt):
        ask(base_url, prompt)
        with contextlib.suppress(urllib.error.HTTPError):
            ask(base_url, [user("On.")])
        done.wait(30)

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=1, timeout_s=1.0), [["a"]])
    done.set()
    assert (rollout.stop_reason, rollout.fate, rollout.reward) == ("turns", None, 0.0)
    assert rollout.notes[0].startswith("at a limit agent agent did not return after its requests were refused")


def test_an_agent_that_retries_at_a_limit_holds_nothing_up(tokenizer, monkeypatch):
    monkeypatch.setattr(conversation, "RETRYING_S", 0.2)
    done = threading.Event()

    def agent(base_url, prompt):
        ask(base_url, prompt)
        while not done.wait(0.02):
            with contextlib.suppress(urllib.error.HTTPError):
                ask(base_url, [user("On.")])

    began = time.monotonic()
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=1, timeout_s=60.0), [["a"]])
    done.set()
    assert time.monotonic() - began < 30
    assert (rollout.stop_reason, rollout.fate, rollout.reward) == ("turns", None, 0.0)
    assert rollout.notes[0].startswith("at a limit agent agent did not return after its requests were refused")


def test_an_agent_that_gives_up_its_retries_is_paid(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        for _ in range(3):
            with contextlib.suppress(urllib.error.HTTPError):
                ask(base_url, [user("On.")])
        return 0.75

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=1), [["a"]])
    assert (rollout.stop_reason, rollout.fate, rollout.reward) == ("turns", None, 0.75)


def test_what_an_agent_gave_up_is_no_token_of_its_environment():
    rollout = make_group(0, [1.0], [4]).rollouts[0]
    rollout.turns, rollout.fate = [Turn("x", None, 0, 2, "eos", abandoned=True)], Fate.TRAINED
    rollout.action_mask[:2] = False
    sampled, inserted = rollout_row("", 0, 0, rollout)[6:8]
    assert (sampled, inserted) == (2, 0)


def test_the_ledger_tells_what_was_cut_and_what_was_not_trained(tmp_path):
    group = make_group(0, [1.0, 0.0, 0.5], [6, 4, 5])
    for rollout, reason in zip(group.rollouts, ("turns", "context", "env"), strict=True):
        rollout.fate, rollout.stop_reason = Fate.TRAINED, reason
    with Ledger.open(tmp_path / LEDGER) as ledger:
        ledger.visit([group.visit], step=0, version=0)
        ledger.finish(group, step=0)
        ledger.step(0, seconds={}, metrics={"tokens/trained": 11.0, "tokens/unrewarded": 4.0, "tokens/abandoned": 3.0})
        totals = ledger.totals()
        assert ledger.verify().ok
    assert (totals["trained"]["tokens"], totals["unrewarded"]["tokens"], totals["abandoned"]["tokens"]) == (11, 4, 3)
    assert sampled_tokens(totals) == 18
    assert truncated_of(tmp_path) == {"context_length": 1, "max_turns": 1}


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(1.0), np.array([1.0]), torch.tensor(1.0)])
def test_numbers_of_numpy_and_torch_are_rewards(tokenizer, value):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        return value

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    assert (rollout.fate, rollout.reward) == (None, 1.0)


def zero_sum(*solved: float) -> Group:
    """A group in which a proposer loses what a solver wins: the mean over agents is always 0.5."""
    group = make_group(0, [0.5] * len(solved))
    for rollout, right in zip(group.rollouts, solved, strict=True):
        rollout.agent, rollout.later_segments = "proposer", [Segment(2, (5,), "solver")]
        rollout.agent_rewards = {"proposer": 1 - right, "solver": right}
        rollout.rewards = {"env": 0.5, "env/proposer": 1 - right, "env/solver": right}
    return group


def test_the_reward_of_one_agent_tells_right_answers():
    success = Success("env/solver")
    assert [success.right(rollout) for rollout in zero_sum(1.0, 0.0).rollouts] == [True, False]
    assert GroupJudge(success).kind(zero_sum(1.0, 1.0)) is GroupKind.EASY
    shared = make_group(0, [1.0, 0.0]).rollouts
    for rollout in shared:
        rollout.rewards = {"env": rollout.reward}
    assert [success.right(rollout) for rollout in shared] == [True, False], "one reward is that of all agents"


@pytest.mark.parametrize("probe", [None, 2])
def test_a_group_that_teaches_an_agent_counts_as_mixed(probe):
    chosen = Bayes().build([Prompt("p0", 0, text="x")], 0, GroupJudge(Success("env/solver")))
    chosen.probe = probe
    chosen.observe_group(zero_sum(1.0, 0.0, 0.0, 0.0))
    assert chosen.metrics()["bayes/mixed"] == 1.0


def test_a_group_that_is_balanced_for_an_agent_is_whole():
    rule = Sequential(2, balanced=True).build(4)
    for group, more in ((zero_sum(1.0, 0.0, 1.0, 0.0), 0), (zero_sum(1.0, 0.0, 0.0, 0.0), 2)):
        assert rule.additional_size(group, GroupKind.SIGNAL) == more


@pytest.mark.parametrize(
    ("success", "fault"),
    [
        (None, "the mean over agents is 0.5 in every rollout of step 1"),
        ("env/slover", "no agent of step 1 has the reward env/slover"),
        ("env/solver", None),
    ],
)
def test_a_success_that_no_agent_decides_is_pointed_out(success, fault):
    """The constant mean is no fault of the environment."""
    dogs = Watchdogs(validate({"model": "m", "env": "countdown", "success": success}))
    row = {f"rewards/{name}/mean": 0.5 for name in ("env", "env/proposer", "env/solver")}
    row |= {"rewards/env/std": 0.0, "rewards/env/proposer/std": 0.5, "rewards/env/solver/std": 0.5}
    groups = [zero_sum(1.0, 0.0, 1.0, 0.0), zero_sum(0.0, 0.0, 1.0, 1.0)]
    said = [message for step in (1.0, 2.0, 3.0) for message in dogs.observe(row | {"step": step}, groups)]
    remedy = "set `success: {function: NAME, at_least: 1}` to one of env/proposer, env/solver"
    assert said == ([] if fault is None else [f"success: {fault}, so nothing tells right answers; {remedy}"])
