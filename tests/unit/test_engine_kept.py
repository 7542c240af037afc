"""Keys and values kept between two turns: the same results as computing every turn from its start, for less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Request, SamplingParams

from ..builders.engines import Counted, make_engine
from .engine_models import FUSED, GENERIC, VOCAB, make_model, plain_logits, plain_logp, run

TURNS = 3


def dialogue(
    engine: LocalEngine, *, keep: bool, n: int = 5, drafts: list[list[tuple[int, ...]]] | None = None
) -> list[list[Finished]]:
    """`n` dialogues of some turns, prompts, actions and observations of different lengths; what was said, by turn.

    `drafts`: of each turn and dialogue.
    """
    texts = [tuple(1 + (3 * i + j) % (VOCAB - 3) for j in range(3 + 4 * i)) for i in range(n)]
    said: list[list[Finished]] = []
    for turn in range(TURNS):
        params = SamplingParams(2 + turn)
        engine.submit(
            replace(
                Request(i, text, params, noise_key(0, i, turn), keep=keep and turn + 1 < TURNS),
                draft=drafts[turn][i] if drafts else (),
            )
            for i, text in enumerate(texts)
        )
        done = run(engine)
        said.append([done[i] for i in range(n)])
        for i, finished in enumerate(said[-1]):
            observation = tuple(7 + (i + j) % 20 for j in range(1 + (5 * i + turn) % 4))
            texts[i] = (*texts[i], *finished.token_ids.tolist(), *observation)
    return said


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_the_same_as_without_and_as_a_plain_forward_pass(name: str) -> None:
    model = make_model(name)
    with_, without = make_engine(model, slots=3), make_engine(model, slots=3)
    for a, b in zip(dialogue(with_, keep=True), dialogue(without, keep=False), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
            np.testing.assert_allclose(x.logp, y.logp, atol=1e-4)
    prompt, params = tuple(range(1, 8)), SamplingParams(4)
    with_.submit([Request("a", prompt, params, 1, keep=True)])
    first = run(with_)["a"]
    longer = (*prompt, *first.token_ids.tolist(), 9, 8, 7)
    with_.submit([Request("a", longer, params, 2)])
    second = run(with_)["a"]
    expected = plain_logp(plain_logits(model, longer, second.token_ids), params, second.token_ids)
    np.testing.assert_allclose(second.logp, expected, atol=1e-4)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("slots", [2, 8])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", list(FUSED))
def test_drafts_of_further_turns(name: str, keep: bool, slots: int) -> None:
    """Right and wrong ones and none, after prompts that are kept, made room for, or computed again."""
    model = make_model(name)
    plain = dialogue(make_engine(model, slots=slots), keep=False)
    drafts = [[tuple(f.token_ids.tolist()) for f in said] for said in plain]
    for said in drafts:
        said[1] = ()
        said[2] = tuple((token + 1) % VOCAB for token in said[2])
    drafted = dialogue(make_engine(model, slots=slots), keep=keep, drafts=drafts)
    for turn, (a, b) in enumerate(zip(drafted, plain, strict=True)):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
            np.testing.assert_allclose(x.logp, y.logp, atol=1e-4)
        assert [x.num_reused_tokens for x in a] == [0 if i in (1, 2) else turn + 1 for i in range(5)]


def test_drafts_of_turns_near_the_last_position() -> None:
    """A pass pads all drafts to the longest, also that of the longest context."""
    model = make_model("qwen2")
    prompts = [tuple(range(1, 7)), tuple(1 + i % 40 for i in range(30))]
    plain, drafted = (make_engine(model, max_length=64) for _ in range(2))
    asked = [Request(i, p, SamplingParams(64 - len(p)), noise_key(i), keep=True) for i, p in enumerate(prompts)]
    plain.submit(asked)
    said = run(plain)
    guesses = {r.id: [*said[r.id].token_ids.tolist(), *[1] * 64][: r.params.max_tokens] for r in asked}
    drafted.submit([replace(r, draft=tuple(guesses[r.id])) for r in asked])
    for id_, finished in run(drafted).items():
        np.testing.assert_array_equal(finished.token_ids, said[id_].token_ids)
        assert finished.num_reused_tokens > 0


def test_only_what_is_new_goes_through_the_model() -> None:
    engine = make_engine(make_model("qwen2"), slots=8)
    counted = Counted(engine)
    dialogue(engine, keep=True)
    first_prompts, observations = (
        sum(3 + 4 * i for i in range(5)),
        [sum(1 + (5 * i + t) % 4 for i in range(5)) for t in (0, 1)],
    )
    assert counted.prefilled == first_prompts
    assert counted.extended == sum(observations) + 2 * 5, "the observations, and the last token of every action"
    assert len(engine._kept) == 0


def test_it_keeps_no_more_than_there_are_slots_and_computes_the_rest_again() -> None:
    model = make_model("qwen2")
    engine, roomy = make_engine(model, slots=2), make_engine(model, slots=8)
    counted = Counted(engine)
    for a, b in zip(dialogue(engine, keep=True), dialogue(roomy, keep=True), strict=True):
        assert all(x.token_ids.tolist() == y.token_ids.tolist() for x, y in zip(a, b, strict=True))
    assert counted.prefilled > sum(3 + 4 * i for i in range(5))
    assert counted.extended > 0


def test_turns_that_continue_what_is_kept_start_first() -> None:
    """Else another one's keys and values would take their place."""
    engine = make_engine(make_model("qwen2"), slots=1)
    counted, params = Counted(engine), SamplingParams(2)
    engine.submit([Request("a", (1, 2, 3), params, 1, keep=True)])
    longer = (1, 2, 3, *run(engine)["a"].token_ids.tolist(), 9)
    engine.submit([Request("b", (4, 5, 6), params, 2, keep=True), Request("a", longer, params, 3)])
    run(engine)
    assert (counted.prefilled, counted.extended) == (6, 2)


@pytest.mark.parametrize(
    "event", ["cancelled", "new weights", "new weights meanwhile", "another prompt", "an edited turn", "fixed slots"]
)
def test_what_is_kept_is_not_used_where_it_does_not_belong(event: str) -> None:
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    engine = make_engine(model, slots=2, fixed_slots=event == "fixed slots")
    prompt, params = (1, 2, 3, 4), SamplingParams(3)
    request = Request("a", prompt, params, 1, keep=True)
    engine.submit([request])
    if event == "new weights meanwhile":
        engine.step()
        engine.load_weights(other.state_dict(), 1)
        model = other
    said = run(engine)["a"].token_ids.tolist()
    assert len(engine._kept) == (event not in ("fixed slots", "new weights meanwhile"))
    longer = (*prompt, *said, 9)
    if event == "cancelled":
        engine.cancel(["a"])
        assert len(engine._kept) == 0
    if event == "new weights":
        engine.load_weights(other.state_dict(), 1)
        model = other
    if event == "another prompt":
        longer = (1, 2, 5, 4, *said, 9)
    if event == "an edited turn":
        longer = (*prompt, said[0], 1 + said[1], 9)
    counted = Counted(engine)
    engine.submit([replace(request, prompt_ids=longer, keep=False)])
    done = run(engine)["a"]
    expected = (0, 2) if event == "an edited turn" else (len(longer), 0)
    assert (counted.prefilled, counted.extended) == expected, "only a common beginning is used"
    np.testing.assert_allclose(
        done.logp, plain_logp(plain_logits(model, longer, done.token_ids), params, done.token_ids), atol=1e-4
    )


@pytest.mark.parametrize("name", ["qwen2", next(iter(GENERIC))])
def test_a_conversation_that_goes_on_after_another_is_still_kept(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model, slots=4)
    params = SamplingParams(3)
    said = {}
    for prompt in ((1, 2, 3, 4), (5, 6, 7)):
        engine.submit([Request("a", prompt, params, 1, keep=True)])
        said[prompt] = run(engine)["a"].token_ids.tolist()
    assert len(engine._kept) == 2
    counted = Counted(engine)
    longer = (1, 2, 3, 4, *said[1, 2, 3, 4], 9)
    engine.submit([Request("a", longer, params, 1, keep=True)])
    done = run(engine)["a"]
    assert (counted.prefilled, counted.extended) == (0, 2), "the last token said, and the new one"
    np.testing.assert_allclose(
        done.logp, plain_logp(plain_logits(model, longer, done.token_ids), params, done.token_ids), atol=1e-4
    )
    engine.cancel(["a"])
    assert len(engine._kept) == 0


def test_a_cancelled_turn_keeps_nothing() -> None:
    engine = make_engine(make_model("qwen2"), slots=2)
    engine.submit([Request("a", (1, 2), SamplingParams(9), 1, keep=True)])
    engine.step()
    assert [f.stop_reason for f in engine.cancel(["a"])] == ["cancelled"]
    assert len(engine._kept) == 0
