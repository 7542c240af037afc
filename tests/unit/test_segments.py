"""Rollouts whose histories change: segments of agents and of chat templates, with scripted answers."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from winnow.env.base import StepResult
from winnow.env.prompting import NextMessages
from winnow.tasks.agents import with_agent
from winnow.types import Prompt

from ..builders.requests import ask, text_of, user
from ..builders.tool_rollouts import roll
from ..builders.tools import TEMPLATE, OneTurn, make_tokenizer

THINKING = TEMPLATE.replace("{{ m.content }}{% for c", "{{ m.content.split('</t>')[-1] }}{% for c")
"""Leaves thoughts out of earlier turns, as Qwen3's template does."""
FIRST = "<s>user\nCount.<e>\n<s>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def said(text):
    return {"role": "assistant", "content": text}


def shown(tokenizer, rollout):
    """Prompt and tokens of every segment, as text."""
    return [(tokenizer.decode(part.prompt_ids), tokenizer.decode(part.token_ids)) for part in rollout.parts()]


def test_an_edited_history_begins_a_segment(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        ask(base_url, [*prompt, said("What it did not say"), user("Go on.")])
        return 1.0

    (rollout,), seen = roll(tokenizer, with_agent(OneTurn(), agent), [["one", "two"]])
    rewritten = "<s>user\nCount.<e>\n<s>assistant\nWhat it did not say<e>\n<s>user\nGo on.<e>\n<s>assistant\n"
    assert seen == [FIRST, rewritten]
    assert shown(tokenizer, rollout) == [(FIRST, "one<e>"), (rewritten, "two<e>")]
    assert rollout.action_mask.all(), "nothing of the rewritten history is between the turns"
    assert [(turn.action, turn.start, turn.stop) for turn in rollout.turns] == [("one", 0, 4), ("two", 4, 8)]
    assert rollout.reward == 1.0


def test_a_compacted_history(tokenizer):
    """What is added to the compacted one is behind its tokens, as in any conversation."""

    def agent(base_url, prompt):
        summary = text_of(ask(base_url, [*prompt, user("Summarise.")]))
        compacted = [*prompt, user(summary)]
        answer = text_of(ask(base_url, compacted))
        return float(text_of(ask(base_url, [*compacted, said(answer), user("Sure?")])) == "yes")

    (rollout,), seen = roll(tokenizer, with_agent(OneTurn(), agent), [["three so far", " four ", "yes"]])
    assert len(rollout.later_segments) == 1
    first, second = shown(tokenizer, rollout)
    assert first == (seen[0], "three so far<e>")
    assert seen[1] == "<s>user\nCount.<e>\n<s>user\nthree so far<e>\n<s>assistant\n"
    assert second == (seen[1], " four <e>\n<s>user\nSure?<e>\n<s>assistant\nyes<e>")
    assert rollout.reward == 1.0


def test_a_conversation_goes_on_behind_that_of_a_sub_agent(tokenizer):
    """With the tokens that were sampled in it, white space and all."""

    def agent(base_url, prompt):
        answer = text_of(ask(base_url, prompt))
        found = text_of(ask(base_url, [user("Look it up.")]))
        ask(base_url, [*prompt, said(answer), user(found)])
        return 1.0

    (rollout,), seen = roll(tokenizer, with_agent(OneTurn(), agent), [["  one ", "found", "done"]])
    assert [segment.start for segment in rollout.segments] == [0, 7, 13]
    assert seen[1] == "<s>user\nLook it up.<e>\n<s>assistant\n"
    assert seen[2] == f"{FIRST}  one <e>\n<s>user\nfound<e>\n<s>assistant\n"


def test_requests_at_the_same_time_are_all_answered(tokenizer):
    def agent(base_url, prompt):
        found = {}
        some = [
            threading.Thread(target=lambda i=i: found.update({i: text_of(ask(base_url, [user(f"Part {i}")]))}))
            for i in range(4)
        ]
        for each in some:
            each.start()
        for each in some:
            each.join()
        return float(sorted(found.values()) == ["a", "b", "c", "d"])

    (rollout,), seen = roll(tokenizer, with_agent(OneTurn(), agent), [["a", "b", "c", "d"]])
    assert rollout.reward == 1.0
    assert len(rollout.segments) == 4
    assert sorted(seen) == [f"<s>user\nPart {i}<e>\n<s>assistant\n" for i in range(4)]


@pytest.mark.parametrize(("retry", "answers"), [("0", ["a", "b"]), ("1", ["a", "a"]), (None, ["a", "b"])])
@pytest.mark.filterwarnings("ignore:agent. its client sends equal requests")
def test_the_same_request_again(tokenizer, retry, answers):
    """OpenAI's client says whether it repeats a request; from others, whose connection was kept, it is a new one."""

    def agent(base_url, prompt):
        return float([text_of(ask(base_url, prompt, retry=r)) for r in ("0", retry)] == answers)

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a", "b"]])
    assert rollout.reward == 1.0
    assert len(rollout.segments) == len(set(answers))


def test_an_agent_is_told_what_its_context_holds(tokenizer):
    usages = []

    def agent(base_url, prompt):
        usages.append(ask(base_url, prompt)["usage"])
        usages.append(ask(base_url, [user("x")])["usage"])

    roll(tokenizer, with_agent(OneTurn(), agent), [["one", "two!"]])
    n = len(tokenizer.encode(FIRST))
    assert usages[0] == {"prompt_tokens": n, "completion_tokens": 4, "total_tokens": n + 4}
    assert usages[1]["prompt_tokens"] == len(tokenizer.encode("<s>user\nx<e>\n<s>assistant\n"))


@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        ({"max_segments": 2}, 2, "segments"),
        ({"max_segments": 3}, 3, "env"),
        ({"context_length": 59}, 1, "context"),
        ({"max_tokens": 9}, 2, "length"),
    ],
)
def test_what_exceeds_a_limit_is_truncated_with_a_reason(tokenizer, limits, turns, reason):
    """It is paid what its agent returns, and 0 if the agent raises when it is refused."""

    def raises(base_url, prompt):
        ask(base_url, prompt)
        for question in ("a" * 40, "b" * 40):
            ask(base_url, [user(question)])
        return 1.0

    def catches(base_url, prompt):
        try:
            return raises(base_url, prompt)
        except urllib.error.HTTPError:
            return 0.5

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), catches), [["one!", "two!", "three"]], **limits)
    assert (rollout.reward, rollout.notes) == (1.0 if reason == "env" else 0.5, [])
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), raises), [["one!", "two!", "three"]], **limits)
    assert (len(rollout.turns), rollout.stop_reason, rollout.fate) == (turns, reason, None)
    assert len(rollout.segments) == turns
    assert rollout.truncated is (reason != "env")
    assert rollout.reward == (1.0 if reason == "env" else 0.0)
    assert ["agent raises raised HTTPError: HTTP Error 410" in note for note in rollout.notes] == [
        True
    ] * rollout.truncated


class Echo:
    """Answers with what was said, in capitals; ends after three turns."""

    def __init__(self):
        self.turns = 0

    def reset(self):
        return None

    def step(self, text):
        self.turns += 1
        return StepResult(str(text).split("</t>")[-1].upper(), 1.0, done=self.turns == 3)


class Talk(OneTurn):
    max_turns = 3

    def make_env(self, prompt):
        return Echo()


def test_a_template_that_drops_thoughts_begins_segments_where_it_may():
    tokenizer = make_tokenizer(THINKING)
    script = [["hm</t>one", "so</t>two", "three"]]
    (exact,), seen = roll(tokenizer, Talk(), script)
    assert not exact.later_segments
    assert seen[1] == f"{FIRST}hm</t>one<e>\n<s>user\nONE<e>\n<s>assistant\n"
    (rollout,), seen = roll(tokenizer, Talk(), script, history="template")
    assert seen[1] == "<s>user\nCount.<e>\n<s>assistant\none<e>\n<s>user\nONE<e>\n<s>assistant\n"
    assert seen[2] == f"{seen[1]}two<e>\n<s>user\nTWO<e>\n<s>assistant\n"
    assert shown(tokenizer, rollout) == [(FIRST, "hm</t>one<e>"), (seen[1], "so</t>two<e>"), (seen[2], "three<e>")]
    assert [turn.action for turn in rollout.turns] == script[0]


def test_a_template_that_drops_nothing_adds_to_the_tokens(tokenizer):
    script = [["one", "two", "three"]]
    (exact,), _ = roll(tokenizer, Talk(), script)
    (rollout,), _ = roll(tokenizer, Talk(), script, history="template")
    assert not rollout.later_segments
    assert np.array_equal(rollout.token_ids, exact.token_ids)
    assert np.array_equal(rollout.action_mask, exact.action_mask)


@pytest.mark.parametrize("history", ["exact", "template"])
def test_an_agent_that_continues_anothers_words_has_a_segment_of_its_own(tokenizer, history):
    def agent(base_url, prompt):
        answer = text_of(ask(base_url, prompt, model="policy/proposer"))
        ask(base_url, [*prompt, said(answer), user("And you?")], model="policy/solver")
        return {"proposer": 1.0, "solver": 0.0}

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a", "b"]], history=history)
    assert [segment.agent for segment in rollout.segments] == ["proposer", "solver"]


class HandOver(Echo):
    """Agent `a` has the first turn, `b` the next ones, on the same tokens."""

    def reset(self):
        return NextMessages([user("Count.")], agent="a")

    def step(self, text):
        found = super().step(text)
        return replace(found, observation=NextMessages([user(found.observation)], agent="b"))


@pytest.mark.parametrize("history", ["exact", "template"])
def test_an_environments_next_agent_has_a_segment_of_its_own(tokenizer, history):
    task = Talk()
    task.make_env = lambda prompt: HandOver()
    (rollout,), seen = roll(tokenizer, task, [["one", "two", "three"]], history=history)
    assert [segment.agent for segment in rollout.segments] == ["a", "b"]
    assert seen[1].startswith(f"{FIRST}one<e>")
    assert seen[2].startswith(f"{seen[1]}two<e>")


def test_a_request_that_is_repeated_after_others_gets_its_answer(tokenizer):
    def agent(base_url, prompt):
        first = text_of(ask(base_url, prompt, retry="0"))
        ask(base_url, [user("Else?")], retry="0")
        return float(text_of(ask(base_url, prompt, retry="1")) == first)

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a", "b", "c"]])
    assert (rollout.reward, len(rollout.turns)) == (1.0, 2)


class Silent(Echo):
    """Answers nothing; keeps what it was given."""

    seen: ClassVar[list[str]] = []

    def step(self, text):
        self.seen.append(text.whole)
        self.turns += 1
        return StepResult("", 1.0, done=self.turns == 3)


def test_an_empty_answer_hides_nothing_of_the_next_action(tokenizer):
    task = Talk()
    task.train = [Prompt("p", 0, text="Count.")]
    task.make_env = lambda prompt: Silent()
    roll(tokenizer, task, [["one", "two", "three"]])
    assert Silent.seen == ["one<e>", "two<e>", "three<e>"]
