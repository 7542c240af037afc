"""Samples: which characters a token is, under which probability it was drawn, and where gates spoke."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from winnow.env.prompting import decode
from winnow.record.samples import MAX_SEGMENTS, MAX_TOKENS, SEGMENT_TEXT, sample, token_chars
from winnow.types import Fate, Group, Rollout, Segment, Turn

from ..builders.groups import make_group
from ..builders.toy_rollouts import SHORT_TURNS, EchoEnv, HalfGate, StepGate, ToyTask, run


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters beyond ASCII are several, and an end that is not shown."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


BYTES = bytes_tokenizer()


@given(st.text(max_size=30), st.lists(st.integers(0, 256), max_size=12))
def test_token_chars_are_those_of_every_prefix(text: str, more: list[int]) -> None:
    """Text, and after it bytes that need not be any: as many characters as what is decoded so far has grown by."""
    ids = np.array([*BYTES.encode(text), *more], np.int64)
    ends = [len(decode(BYTES, [ids[: i + 1]])[0].rstrip("\ufffd")) for i in range(len(ids))]
    assert np.cumsum(token_chars(BYTES, ids)).tolist() == np.maximum.accumulate(ends, dtype=int).tolist()


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert token_chars(BYTES, np.array([*BYTES.encode("aé🙂"), BYTES.eos_token_id])) == [1, 0, 1, 0, 0, 0, 1, 0]


def pieces(line: dict[str, Any]) -> list[list[str]]:
    """The text of every token, by turn."""
    found = []
    for turn in line["turns"]:
        ends = np.cumsum([turn["at"], *turn["chars"]]).tolist()
        found.append([line["completion"][a:b] for a, b in pairwise(ends)])
    return found


def alone(group: Group, r: Rollout) -> Group:
    return Group(group.visit, [r], group.decisions)


def test_turns_are_their_actions_token_by_token(policy) -> None:
    task = ToyTask(make=lambda _: EchoEnv(3))
    for group in run(policy, task, stop=("=",), max_tokens=60):
        for r in group.rollouts:
            line = sample(1, alone(group, r), "train", policy[1])
            assert ["".join(texts) for texts in pieces(line)] == [t.action for t in r.turns]
            assert [len(turn["logp"]) for turn in line["turns"]] == [t.stop - t.start for t in r.turns]
            logp = [v for turn in line["turns"] for v in turn["logp"]]
            np.testing.assert_allclose(logp, r.sampler_logp[r.action_mask], atol=0.00501)


def test_a_gate_at_a_token_is_marked_after_it(policy) -> None:
    asked = 0
    for group in run(policy, ToyTask(), gates=[HalfGate()]):
        line = sample(1, group, "train", policy[1])
        lines = [(group.rollouts[0], line), *zip(group.rollouts[1:], line["siblings"], strict=True)]
        for r, shown in lines:
            asked += len(shown["decisions"])
            for mark in shown["decisions"]:
                assert r.text[: mark["char"]] == policy[1].decode(r.token_ids[:3], skip_special_tokens=True)
                assert mark == {
                    "gate": "HalfGate_0",
                    "turn": 0,
                    "token": 3,
                    "char": mark["char"],
                    "keep": r.sibling % 2 == 0,
                    "reason": "odd",
                    "probability": 0.5,
                    "overridden": None,
                    "evidence": {},
                }
    assert asked > 3


def test_a_gate_at_an_environment_step_is_marked_where_the_answer_ends(policy) -> None:
    task = ToyTask(make=lambda made: EchoEnv(1 if made % 4 == 0 else 4), stop=SHORT_TURNS)
    for group in run(policy, task, gates=[StepGate(1, True), StepGate(2, False)], max_tokens=200):
        for r in group.rollouts:
            looked, cut = sample(1, alone(group, r), "train", policy[1])["decisions"]
            assert (looked["step"], looked["keep"], cut["step"], cut["keep"]) == (1, True, 2, False)
            assert cut["reason"] == "converged"
            assert r.text[: looked["char"]] == r.turns[0].action + (r.turns[0].observation or "")
            assert cut["char"] == len(r.text), "nobody has come further"
        others = sample(1, group, "train", policy[1])["siblings"]
        assert [[d["step"] for d in s["decisions"]] for s in others] == [[2], [2], [2]], "siblings have the cut alone"


def test_what_is_written_of_tokens_is_bounded() -> None:
    group = make_group(0, [1.0], [2 * MAX_TOKENS])
    r = group.rollouts[0]
    r.token_ids = np.arange(2 * MAX_TOKENS) % 200
    (r.text,) = decode(BYTES, [r.token_ids])
    (turn,) = sample(1, group, "train", BYTES)["turns"]
    assert len(turn["chars"]) == len(turn["logp"]) == MAX_TOKENS
    r.action_mask[:2] = False
    assert sample(1, group, "train", BYTES)["turns"][0]["logp"][:3] == [None, None, -1.0]


def test_without_a_known_log_probability_or_text_there_are_no_tokens() -> None:
    group = make_group(0, [1.0])
    r = group.rollouts[0]
    assert sample(1, group, "train", BYTES)["turns"] == [], "a text that is not that of the tokens"
    (r.text,) = decode(BYTES, [r.token_ids])
    assert sample(1, group, "train", BYTES)["turns"] != []
    assert sample(1, group, "train")["turns"] == []
    r.sampler_logp[:] = 0
    assert sample(1, group, "train", BYTES)["turns"] == []


def compacted(*later: tuple[str, str], first: str = "Q: 2+2?") -> Group:
    """A turn of "ab" and its answer "!" in each segment; `later`: agent and prompt of the segments after the first."""
    group = make_group(0, [1.0], [3 * (len(later) + 1)])
    r = group.rollouts[0]
    r.prompt_ids, r.token_ids = tuple(BYTES.encode(first)), np.array(BYTES.encode("ab!" * (len(later) + 1)))
    r.action_mask[2::3] = False
    r.turns = [Turn("ab", "!", n, n + 2, "eos") for n in range(0, len(r.token_ids), 3)]
    r.text = "ab!" * len(r.turns)
    r.later_segments = [Segment(3 * n, tuple(BYTES.encode(text)), agent) for n, (agent, text) in enumerate(later, 1)]
    return group


def test_segments_say_what_changed_in_their_prompts() -> None:
    group = compacted(("", "Q: 2+2?ab!go"), ("critic", "éQ"), ("", "Q: 2+2?xy"), ("", "éQab!é"))
    line = sample(1, group, "train", BYTES)
    assert (line["segments"], line["agent"]) == (5, "")
    assert line["later"] == [
        {"agent": "", "char": 3, "prompt_tokens": 12, "shared": 10, "like": 0, "new": "go"},
        {"agent": "critic", "char": 6, "prompt_tokens": 3, "shared": 0, "like": 1, "new": "éQ"},
        {"agent": "", "char": 9, "prompt_tokens": 9, "shared": 7, "like": 1, "new": "xy"},
        {"agent": "", "char": 12, "prompt_tokens": 8, "shared": 6, "like": 2, "new": "é"},
    ]
    assert [t["at"] for t in line["turns"]] == [0, 3, 6, 9, 12]
    group.rollouts[0].agent = "solver"
    line = sample(1, group, "train")
    assert (line["agent"], [s["new"] for s in line["later"]]) == ("solver", [""] * 4)


def test_a_segment_that_ended_before_an_action_is_at_the_end() -> None:
    group = compacted(("", "Q: 4"))
    r = group.rollouts[0]
    r.turns, r.text, r.fate, r.reward = r.turns[:1], "ab!", Fate.FAILED, None
    (later,) = sample(1, group, "train", BYTES)["later"]
    assert (later["char"], later["shared"], later["new"]) == (3, 3, "4")


def test_what_is_written_of_segments_is_bounded() -> None:
    line = sample(1, compacted(*[("", "x" * 1000)] * 40), "train", BYTES)
    assert (line["segments"], len(line["later"])) == (41, MAX_SEGMENTS)
    assert line["later"][0]["new"] == "x" * SEGMENT_TEXT + "…"
    assert line["later"][1]["shared"] == 1000
    assert line["later"][1]["new"] == ""


def test_a_rollout_of_one_segment_is_written_without_them() -> None:
    group = compacted()
    group.rollouts[0].agent = "solver"
    assert not {"segments", "agent", "later"} & sample(1, group, "train", BYTES).keys()
