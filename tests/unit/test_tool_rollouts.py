"""TRL's tools and environments in whole rollouts, with an engine that says what a script tells it."""

from __future__ import annotations

import json

from tokenizers import AddedToken

from winnow.env.tools import parser_of, with_tools
from winnow.record.samples import LAST_OBSERVATION, sample
from winnow.sampler.codec import group_from, group_state
from winnow.types import Fate, Group, Visit

from ..builders.tool_calls import Counter, call, fail
from ..builders.tool_rollouts import (
    roll,
    tokenizer,  # noqa: F401
)
from ..builders.tools import OneTurn, add, make_tokenizer


def test_rollouts_with_an_environment(tokenizer):
    task = with_tools(OneTurn({"start": 1}), environment_factory=Counter, timeout_s=5.0)
    script = [[call("increment", by=4), call("increment", by=1), "done"], ["no"], [call("increment", by="x"), "oh"]]
    rollouts, seen = roll(tokenizer, task, script)
    assert [r.reward for r in rollouts] == [6.0, 1.0, 1.0]
    assert [len(r.turns) for r in rollouts] == [3, 1, 2]
    assert seen[0].endswith("<s>user\nCount. Start at 1.<e>\n<s>assistant\n")
    assert seen[-1].endswith("<s>tool increment\nnow 6<e>\n<s>assistant\n")
    first = rollouts[0]
    assert tokenizer.decode(first.token_ids[~first.action_mask]) == "".join(
        f"\n<s>tool increment\nnow {n}<e>\n<s>assistant\n" for n in (5, 6)
    )
    assert "error" in rollouts[2].turns[0].observation


def test_an_empty_result_is_one_of_its_tool(tokenizer):
    def write(text: str) -> str:
        """
        Writes a file.

        Args:
            text: What to write.
        """
        return ""

    _, seen = roll(tokenizer, with_tools(OneTurn(), [write]), [[call("write", text="x"), "done"]], [lambda **_: [1.0]])
    assert seen[-1].endswith("\n<s>tool write\n<e>\n<s>assistant\n")


def test_samples_have_the_beginning_of_a_long_result(tokenizer):
    def read() -> str:
        """Reads a file."""
        return "word " * 10_000

    (rollout,), _ = roll(tokenizer, with_tools(OneTurn(), [read]), [[call("read"), "done"]], [lambda **_: [1.0]])
    assert (rollout.stop_reason, len(rollout.turns)) == ("length", 1)
    line = sample(1, Group(Visit(0, 0, OneTurn().train[0]), [rollout]), "train")
    assert line["completion"].endswith("word …")
    assert len(line["completion"]) == len(rollout.text) - 50_000 + LAST_OBSERVATION + 1


def test_a_rollout_that_is_truncated_gets_the_reward_of_its_environment_too(tokenizer):
    """As in TRL, which asks every environment; a reward function would be asked for these alone."""
    task = with_tools(OneTurn({"start": 1}), environment_factory=Counter, timeout_s=5.0)
    script = [["no"], ["w " * 200], [call("increment", by=4), "w " * 200]]
    for funcs in ([], [lambda completions, **_: [50.0] * len(completions)]):
        rollouts, _ = roll(tokenizer, task, script, funcs, max_tokens=150)
        assert [r.stop_reason for r in rollouts] == ["env", "length", "length"]
        assert [r.rewards for r in rollouts] == [{"env": 1.0}, {"env": 1.0}, {"env": 5.0}]


def test_a_rollout_that_still_calls_tools_at_the_last_turn_ran_out_of_turns(tokenizer):
    """Its environment is asked for the reward once a turn, and not again."""
    asked = []

    class Watched(Counter):
        def get_reward(self) -> float:
            asked.append(1)
            return super().get_reward()

    task = with_tools(OneTurn(), environment_factory=Watched, max_tool_calling_iterations=1, timeout_s=5.0)
    script = [[call("increment", by=4), call("increment", by=1)], [call("increment", by=2), "done"]]
    rollouts, _ = roll(tokenizer, task, script)
    assert [(r.stop_reason, r.truncated, r.reward) for r in rollouts] == [("turns", True, 4.0), ("env", False, 2.0)]
    assert len(asked) == 4


def test_a_reward_that_fails_at_the_end_of_a_truncated_rollout_fails_it(tokenizer):
    class Broken(Counter):
        def get_reward(self) -> float:
            raise ConnectionError("the judge is away")

    task = with_tools(OneTurn(), environment_factory=Broken, timeout_s=5.0)
    (rollout,), _ = roll(tokenizer, task, [["w " * 200]], max_tokens=150)
    assert rollout.fate is Fate.FAILED
    assert "the judge is away" in rollout.reason


def test_reward_functions_judge_where_no_environment_does(tokenizer):
    def right(completions, **_):
        return [float("3" in c[-1]["content"]) for c in completions]

    task = with_tools(OneTurn(reward_funcs=[right]), [add, fail])
    script = [[call("add", a=1, b=2), "It is 3."], ["4"], [call("fail", how="away"), "3"]]
    rollouts, _ = roll(tokenizer, task, script, task.reward_funcs)
    assert [r.reward for r in rollouts] == [1.0, 0.0, None]
    assert rollouts[2].fate is Fate.FAILED
    assert "it away" in rollouts[2].reason


def test_reward_functions_see_environments_and_messages_as_in_trl(tokenizer):
    class Plain:
        reset, increment = Counter.reset, Counter.increment

    def judged(environments, completions, **_):
        assert [[m["role"] for m in c] for c in completions] == [["assistant", "tool", "assistant"], ["assistant"]]
        return [float(e.value) for e in environments]

    task = with_tools(OneTurn({"start": 1}), environment_factory=Plain)
    rollouts, _ = roll(tokenizer, task, [[call("increment", by=4), "done"], ["no"]], [judged])
    assert [r.reward for r in rollouts] == [5.0, 1.0]


def special_tokenizer(*marks):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    return tokenizer


def test_marks_that_are_special_tokens_are_seen_and_calls_are_messages_as_in_trl():
    seen = []

    def judge(completions, **_):
        seen.extend(completions)
        return [1.0] * len(completions)

    task = with_tools(OneTurn(), [add])
    script = [["<think>Hm.</think> " + call("add", a=1, b=2), "<think></think>3"]]
    rollouts, _ = roll(special_tokenizer("<tool_call>", "</tool_call>", "<think>", "</think>"), task, script, [judge])
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert seen == [
        [
            {
                "role": "assistant",
                "content": "<think>Hm.</think>",
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "assistant", "content": "<think></think>3"},
        ]
    ]
    state = group_state(Group(Visit(0, 0, task.train[0]), rollouts))
    (again,) = group_from(json.loads(json.dumps(state)), {"train": task.train}).rollouts
    assert [t.message for t in again.turns] == [t.message for t in rollouts[0].turns]


def test_a_response_template_gets_the_marks_and_the_end_of_the_turn():
    tokenizer = special_tokenizer("<|call>", "<call|>")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<s>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<|call>",
                "close_pattern": r"<call\|><e>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<e>\s*|$", "content": "text"},
        },
    }
    task = with_tools(OneTurn(), [add], parse=parser_of(tokenizer, [add]))
    script = [['<|call>{"name": "add", "arguments": {"a": 1, "b": 2}}<call|>', "3"]]
    ((first,), _) = roll(tokenizer, task, script, [lambda completions: [1.0]])
    assert [t.observation for t in first.turns] == ["3", None]
    assert first.turns[0].message["content"] == ""


def test_a_call_that_no_turn_follows_is_a_message_too():
    task = with_tools(OneTurn(), [add], max_tool_calling_iterations=1)
    seen = []
    script = [[call("add", a=1, b=2), call("add", a=3, b=2)]]
    roll(make_tokenizer(), task, script, [lambda completions: seen.extend(completions) or [1.0]])
    assert [len(m.get("tool_calls", [])) for m in seen[0]] == [1, 0, 1]
