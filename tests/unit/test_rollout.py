"""The runner on a real engine: multi-turn environments, gates, failures. Every sibling comes back exactly once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.base import ModelTurn, StepResult
from winnow.env.rewards.pooled import completion_text
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.rewards.scores import completion_of
from winnow.rollout.evaluate import (
    RollOut,
    RolloutsFailedError,
    evaluate,
    pass_at_k,
    require_judged,
    run_jobs,
    summarize,
)
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import Fate, GroupView, Prompt, Turn, Verdict

from ..builders.toy_rollouts import (
    SHORT_TURNS,
    EchoEnv,
    HalfGate,
    StepGate,
    ToyTask,
    policy,  # noqa: F401
    run,
)
from ..parity import parity_reward


def test_one_turn_rollouts_are_scored(policy) -> None:
    for group in run(policy, ToyTask()):
        for r in group.rollouts:
            assert r.reward == parity_reward([r.text])[0]
            assert r.rewards == {"parity_reward": r.reward}
            assert r.action_mask.all()
            assert (r.versions == 0).all()
            assert (r.sampler_logp <= 0).all()
            assert r.fate is None
            assert r.seconds > 0


def test_results_do_not_depend_on_slots(policy) -> None:
    few, many = (run(policy, ToyTask(), slots=s) for s in (3, 12))
    for a, b in zip(few, many, strict=True):
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
            np.testing.assert_allclose(x.sampler_logp, y.sampler_logp, atol=1e-5)


def test_many_turns_keep_tokens_as_sampled_and_mask_observations(policy) -> None:
    tokenizer = policy[1]
    observation = tokenizer.encode("8 9")
    groups = run(policy, ToyTask(make=lambda _: EchoEnv(3)), max_tokens=400)
    assert sum(r.stop_reason == "env" for g in groups for r in g.rollouts) >= 9
    for group in groups:
        for r in group.rollouts:
            assert r.prompt_ids[-1] == tokenizer.encode("7")[0], "the first observation belongs to the prompt"
            if r.stop_reason == "env":
                assert len(r.turns) == 3
                assert r.reward == 3.0
            for turn, following in zip(r.turns, [*r.turns[1:], None], strict=True):
                assert r.action_mask[turn.start : turn.stop].all()
                assert tokenizer.decode(r.token_ids[turn.start : turn.stop], skip_special_tokens=True) == turn.action
                if following:
                    between = slice(turn.stop, following.start)
                    assert r.token_ids[between].tolist() == observation
                    assert not r.action_mask[between].any()
                    assert (r.versions[between] == -1).all()
                    assert (r.sampler_logp[between] == 0).all()


def test_the_budget_holds_over_all_turns_and_says_so(policy) -> None:
    for group in run(policy, ToyTask(make=lambda _: EchoEnv(100), max_turns=50), max_tokens=15):
        for r in group.rollouts:
            assert len(r.token_ids) <= 15
            assert r.stop_reason == "length"


def test_what_the_engine_takes_of_a_sequence_ends_it_as_its_context_does(policy) -> None:
    for group in run(policy, ToyTask(make=lambda _: EchoEnv(100), max_turns=50), max_tokens=400, max_length=16):
        for r in group.rollouts:
            assert len(r.prompt_ids) + len(r.token_ids) <= 16
            assert (r.stop_reason, r.fate) == ("context", None)


def test_a_group_has_one_kind_of_rewards(policy) -> None:
    """What is truncated before its environment rewards it has 0, where the environment rewards others of the group."""

    def judge(completions: list[str], **_: Any) -> list[float]:
        return [50.0] * len(completions)

    groups = run(policy, ToyTask(make=lambda _: LastOnly(8), max_turns=8, reward_funcs=[judge]), max_tokens=24)
    kinds = [{(r.stop_reason, *r.rewards) for r in group.rollouts} for group in groups]
    assert any({("length", "env"), ("env", "env")} <= kind for kind in kinds), kinds
    for group in groups:
        assert len({name for r in group.rollouts for name in r.rewards}) == 1
        assert all(r.reward == 0 for r in group.rollouts if "env" in r.rewards and r.stop_reason == "length")


class LastOnly(EchoEnv):
    """Gives a reward with its last answer alone, when an action has an even number of words."""

    def step(self, text: str) -> StepResult:
        done = len(text.split()) % 2 == 0
        return StepResult("7", 3.0 if done else None, done)


class Recording(EchoEnv):
    """Remembers what it was told."""

    told: list[str]

    def step(self, text: str) -> StepResult:
        self.told = [*getattr(self, "told", []), text]
        return super().step(text)


def test_a_turn_has_a_budget_of_its_own_and_says_when_it_came_to_it(policy) -> None:
    class Terse(ToyTask):
        max_turn_length = 2

    envs: list[Recording] = []

    def make(_: int) -> Recording:
        envs.append(Recording(3))
        return envs[-1]

    rollouts = [r for g in run(policy, Terse(make=make), max_tokens=400) for r in g.rollouts]
    turns = [t for r in rollouts for t in r.turns]
    assert all(t.stop - t.start <= 2 for t in turns)
    assert {t.stop_reason for t in turns} == {"length", "eos"}
    assert all(r.stop_reason == ("turn_length" if r.turns[-1].stop_reason == "length" else "env") for r in rollouts)
    assert {r.truncated for r in rollouts} == {False, True}, "by its last turn alone"
    assert [e.told for e in envs] == [[t.action for t in r.turns] for r in rollouts], "given to it as they are"


def test_an_action_that_the_total_budget_cuts_off_is_not_carried_out(policy) -> None:
    envs: list[Recording] = []

    def make(_: int) -> Recording:
        envs.append(Recording(100))
        return envs[-1]

    rollouts = [r for g in run(policy, ToyTask(make=make, max_turns=50), max_tokens=15) for r in g.rollouts]
    cut = [i for i, r in enumerate(rollouts) if r.turns[-1].stop_reason == "length"]
    assert cut
    for i, (r, env) in enumerate(zip(rollouts, envs, strict=True)):
        assert getattr(env, "told", []) == [t.action for t in r.turns][: -1 if i in cut else None]


def test_an_episode_that_ran_out_of_turns_is_truncated(policy) -> None:
    rollouts = [
        r for g in run(policy, ToyTask(make=lambda _: EchoEnv(9), max_turns=2), max_tokens=400) for r in g.rollouts
    ]
    assert {(r.stop_reason, r.truncated) for r in rollouts} == {("turns", True)}
    assert all(len(r.turns) == 2 for r in rollouts)


def test_a_prompt_that_cannot_be_encoded_fails_its_group(policy) -> None:
    task = ToyTask()
    task.train[1] = Prompt("long", 1, text="numbers " * 40)
    groups = run(policy, task)
    assert all(r.fate == Fate.FAILED and "'long' has 40 tokens" in r.reason for r in groups[1].rollouts)
    assert all(r.reward is not None for r in groups[0].rollouts)


def test_a_token_gate_prunes_single_siblings(policy) -> None:
    gate = HalfGate()
    groups = run(policy, ToyTask(), gates=[gate])
    free = run(policy, ToyTask())
    asked = {(v.visit.number, v.sibling) for v in gate.views}
    assert asked
    assert [g.visit.number for g in gate.observed] == [0, 1, 2]
    for group, undisturbed in zip(groups, free, strict=True):
        for r, same in zip(group.rollouts, undisturbed.rollouts, strict=True):
            if (group.visit.number, r.sibling) in asked and r.sibling % 2:
                assert (r.fate, r.reward, r.reason) == (Fate.PRUNED, None, "odd")
                np.testing.assert_array_equal(r.token_ids, same.token_ids[:3])
            else:
                assert r.reward is not None
                np.testing.assert_array_equal(r.token_ids, same.token_ids)
    for view in gate.views:
        assert view.hidden is not None
        assert view.logp is not None
        assert len(view.logp) == 3


class ManyGate(HalfGate):
    """Prunes siblings from the second on."""

    def decide(self, view: GroupView) -> Verdict:
        self.views.append(view)
        return Verdict(view.sibling == 0, "many", probability=0.25)


def test_who_was_pruned_by_one_gate_is_not_shown_to_the_next(policy) -> None:
    half, many = HalfGate(), ManyGate()
    groups = run(policy, ToyTask(), gates=[half, many])
    assert {v.sibling for v in many.views} == {0, 2}
    chances = {(r.reason, r.survival_p) for g in groups for r in g.rollouts if r.fate == Fate.PRUNED}
    assert chances == {("odd", 0.5), ("many", 0.125)}


def test_a_step_gate_decides_once_for_the_whole_group(policy) -> None:
    gate = StepGate(2, keep=False)
    task = ToyTask(make=lambda made: EchoEnv(1 if made % 4 == 0 else 4), stop=SHORT_TURNS)
    groups = run(policy, task, gates=[gate], max_tokens=200)
    assert len(gate.views) == 3
    for view in gate.views:
        assert [len(a) for a in view.actions] == [1, 2, 2, 2]
        assert view.running == (False, True, True, True)
    for group in groups:
        assert not group.verdict.keep
        assert all(r.fate == Fate.CUT and r.reward is None for r in group.rollouts)
        assert group.rollouts[0].rewards == {"env": 1.0}, "kept for display"
        assert [len(r.turns) for r in group.rollouts] == [1, 2, 2, 2]


def test_a_step_gate_that_keeps_changes_nothing(policy) -> None:
    task = ToyTask(make=lambda _: EchoEnv(4), stop=SHORT_TURNS)
    gated = run(policy, task, gates=[StepGate(1, True), StepGate(3, True)], max_tokens=200)
    free = run(policy, task, max_tokens=200)
    for a, b in zip(gated, free, strict=True):
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
            assert x.reward == y.reward == 4.0


def test_a_gate_whose_needs_are_not_met_is_refused(policy) -> None:
    gate = HalfGate()
    gate.needs = frozenset({"attention_maps"})
    with pytest.raises(ValueError, match=r"HalfGate_0 needs.*attention_maps"):
        run(policy, ToyTask(), gates=[gate])


def test_a_stop_string_is_part_of_what_is_judged(policy) -> None:
    task = ToyTask(reward_funcs=[lambda completions: [float(c.endswith("=")) for c in completions]])
    groups = run(policy, task, stop=("=",))
    stopped = [r for g in groups for r in g.rollouts if r.stop_reason == "stop"]
    assert stopped
    for r in stopped:
        assert policy[1].decode(r.token_ids) == r.text == r.turns[0].action
        assert r.turns[0].compared == r.text.removesuffix("=")
        assert r.reward == 1.0
    assert all(r.reward == 0.0 for g in groups for r in g.rollouts if r.stop_reason != "stop")


@dataclass
class Teller:
    """An environment whose words would be rewarded."""

    heard: list[ModelTurn]

    def reset(self) -> str | None:
        return None

    def step(self, text: str) -> StepResult:
        assert isinstance(text, ModelTurn)
        self.heard.append(text)
        return StepResult("8 9")


def test_rewards_get_what_was_sampled_and_no_word_of_the_environment(policy) -> None:
    heard: list[ModelTurn] = []
    completions: list[str] = []
    ids: list[list[int]] = []

    def judge(**given: Any) -> list[float]:
        completions.extend(given["completions"])
        ids.extend(given["completion_ids"])
        return [1.0] * len(given["completions"])

    task = ToyTask(make=lambda _: Teller(heard), max_turns=2, stop=SHORT_TURNS, reward_funcs=[judge])
    groups = run(policy, task, max_tokens=400)
    rollouts = [r for g in groups for r in g.rollouts]
    assert sum(len(r.turns) == 2 for r in rollouts) >= 9
    expected = {"".join(t.action for t in r.turns): r.token_ids.tolist() for r in rollouts}
    assert len(completions) == 12
    assert dict(zip(completions, ids, strict=True)) == expected, "ids have the tokens of answers between turns"
    ended = {(str(said), said.stop_string) for said in heard if said.stop_reason == "stop"}
    assert ended
    assert all(text.endswith(stop) and stop in SHORT_TURNS for text, stop in ended)
    asked = [Prompt("p", 0, messages=({"role": "user", "content": "?"},)), Prompt("t", 0, text="?")]
    alone = replace(rollouts[0], text="go8 9", turns=[Turn("go", "8 9", 0, 1, "eos")])
    assert [completion_text(completion_of(prompt, alone)) for prompt in asked] == ["go", "go"]


def rolls_out(engine: LocalEngine, task: ToyTask, tokenizer: Any, rewarder: Rewarder, max_tokens: int) -> RollOut:
    sampled = RolloutOptions(SamplingParams(max_tokens), 32, seed=0)
    greedy = RolloutOptions(SamplingParams(max_tokens, temperature=0.0), 32, seed=0)
    runner = RolloutRunner(engine, task, tokenizer, rewarder, {"eval": sampled, "greedy": greedy})
    return lambda jobs: run_jobs(runner, jobs)


def test_evaluation_uses_noise_of_its_own_and_the_same_each_time(policy) -> None:
    task = ToyTask()
    engine = LocalEngine(*policy, slots=8)
    rewarder = Rewarder(task.reward_funcs)
    rolled = rolls_out(engine, task, policy[1], rewarder, 12)
    first, second = (evaluate(rolled, task.train, n=4) for _ in range(2))
    rewarder.close()
    assert first.metrics == second.metrics
    shown = {"failed", "pass@1", "pass@2", "pass@4", "avg@n", "mean_length", "clipped_ratio", "greedy"}
    assert set(first.metrics) == shown
    assert first.rollouts == 8 * 5
    trained = run(policy, ToyTask())
    assert any(
        a.token_ids.tolist() != b.token_ids.tolist()
        for x, y in zip(first.groups, trained, strict=False)
        for a, b in zip(x.rollouts, y.rollouts, strict=True)
    )


def test_failures_are_no_wrong_answers(policy) -> None:
    groups = run(policy, ToyTask(make=lambda made: EchoEnv(1, fail_at=1 if made % 2 else None)), max_tokens=400)
    metrics = summarize(groups)
    assert metrics["failed"] == 0.5
    assert metrics["pass@1"] == 1.0
    every = run(policy, ToyTask(make=lambda _: EchoEnv(1, fail_at=1)), max_tokens=400)
    assert summarize(every) == {"failed": 1.0}
    with pytest.raises(RolloutsFailedError, match="simulator went away"):
        require_judged(every)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, c: int, k: int) -> None:
    from itertools import combinations

    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(max(s) for s in subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize("bad", [(4, 5, 1), (4, 1, 0), (4, 1, 5), (4, -1, 1)])
def test_pass_at_k_refuses_nonsense(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(*bad)


def test_an_evaluation_keeps_few_environments_alive_at_once(policy, monkeypatch) -> None:
    monkeypatch.setattr("winnow.rollout.evaluate.MAX_LIVE", 8)
    alive, most = 0, 0

    class Counted(EchoEnv):
        def reset(self) -> str | None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return super().reset()

        def close(self) -> None:
            nonlocal alive
            alive -= 1

    task = ToyTask(make=lambda _: Counted(2))
    engine, rewarder = LocalEngine(*policy, slots=64), Rewarder(())
    found = evaluate(rolls_out(engine, task, policy[1], rewarder, 40), task.train, n=4, greedy=False)
    rewarder.close()
    assert [g.prompt.id for g in found.groups] == [p.id for p in task.train]
    assert (alive, most) == (0, 8)
