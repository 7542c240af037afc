"""The learner over ranks: the same updates as in one process."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.base.dotted import load
from winnow.learner import Learner, Local
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.learner.fsdp.ranks import Ranks
from winnow.learner.rows import Pool, Row
from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.advantage.in_update import Weighing
from winnow.methods.correct import STEP_SCALES, Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Clip, Plain

from ..builders.groups import make_group
from ..builders.off_policy import STEP
from ..unit.learner_models import gemma2, random_rows
from .fsdp_ranks import LOSSES, context, difference, in_float64, over, policy, state, updates

pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local_cluster")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_five_clipped_updates_are_those_of_one_process(ranks: Ranks, name: str, tied: bool) -> None:
    """In the first there is one row for two ranks."""
    loss, iterations = LOSSES[name], 2 if "clip" in name else 1
    parts = policy(reference=True, tie_word_embeddings=tied)
    alone = Local().build(copy.deepcopy(parts), context())
    before = state(alone)
    cut = over(ranks, parts)
    assert difference(state(cut), before) == 0
    assert cut.sizes == alone.sizes
    expected = updates(alone, loss, iterations=iterations)
    found = updates(cut, loss, iterations=iterations)
    assert difference(state(alone), before) > 1e-3
    assert difference(state(cut), state(alone)) < 1e-5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    rows = random_rows(seed=9, n=7)
    for mine, other in zip(cut.logp(rows), alone.logp(rows), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)
    for mine, other in zip(cut.reference_logp(rows), alone.reference_logp(rows), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reference_follows_as_in_one_process_and_is_kept(ranks: Ranks, tied: bool, tmp_path: Path) -> None:
    parts = policy(reference=True, tie_word_embeddings=tied)
    learners = Local().build(copy.deepcopy(parts), context()), over(ranks, parts)
    start = learners[0].reference_logp(random_rows(seed=9))
    for learner in learners:
        updates(learner, LossConfig(beta=0.1), steps=2)
        learner.sync_reference(0.6)
    alone, cut = (torch.cat(learner.reference_logp(random_rows(seed=9))) for learner in learners)
    assert float((alone - torch.cat(start)).abs().max()) > 1e-3
    torch.testing.assert_close(cut, alone, rtol=0, atol=1e-4)
    learners[1].save(tmp_path)
    resumed = over(ranks, policy(reference=True, tie_word_embeddings=tied))
    assert not torch.equal(torch.cat(resumed.reference_logp(random_rows(seed=9))), cut)
    resumed.load(tmp_path)
    assert torch.equal(torch.cat(resumed.reference_logp(random_rows(seed=9))), cut)


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"lora": {"r": 4}}])
def test_with_recomputed_layers_and_with_adapters(ranks: Ranks, changes: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    parts = policy()
    if "lora" in changes:
        parts.model = peft.get_peft_model(parts.model, peft.LoraConfig(r=4, target_modules="all-linear"))
    alone = Local().build(copy.deepcopy(parts), context(**changes))
    before = state(alone)
    cut = over(ranks, parts, **changes)
    for learner in (alone, cut):
        updates(learner, LOSSES["plain"])
    assert difference(state(alone), before) > 1e-4
    assert difference(state(cut), state(alone)) < 1e-5


def in_pools(rows: list[Row], weighing: Weighing) -> list[Row]:
    """Three groups, whose rewards are not all equal."""
    return [replace(row, advantage=float(i % 4 == 0), pool=Pool(i % 3, weighing)) for i, row in enumerate(rows)]


@pytest.mark.parametrize("tokens", [16, 60, 10_000])
@pytest.mark.parametrize("weighing", ["gradient", "energy"])
@pytest.mark.parametrize("model", ["untied", "tied", "adapters"])
def test_baselines_of_the_update_are_those_of_one_process(
    ranks: Ranks, weighing: Weighing, tokens: int, model: str
) -> None:
    """OPOB and OTB; with groups that are spread over several micro-batches, which ranks have in different numbers."""
    parts = policy(tie_word_embeddings=model == "tied")
    changes = {"advantage": "opob" if weighing == "gradient" else "otb", "tokens_per_microbatch": tokens}
    if model == "adapters":
        peft = pytest.importorskip("peft")
        parts.model = peft.get_peft_model(parts.model, peft.LoraConfig(r=4, target_modules="all-linear"))
        changes["lora"] = {"r": 4}
    alone = Local().build(copy.deepcopy(parts), context(**changes))
    before = state(alone)
    cut = over(ranks, parts, **changes)
    loss = LossConfig(policy_loss=Plain(), correction=Truncate())
    for step in range(5):
        rows = in_pools(random_rows(seed=step, n=3 + 3 * step), weighing)
        found, expected = [learner.accumulate(rows, loss) for learner in (cut, alone)]
        assert cut.apply(1e-3) == pytest.approx(alone.apply(1e-3), rel=1e-4)
        assert found.sums == pytest.approx(expected.sums, rel=1e-4, abs=1e-5)
        for name in ("baselines", "row_norm_B"):
            ours, theirs = (
                torch.cat(getattr(stats, name) or [torch.zeros(0)]).sort()[0] for stats in (found, expected)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert difference(state(alone), before) > 1e-4
    # AdamW divides gradients near 0 by their own size, so rounding shows: 1.1e-5 with AVX2, below 1e-5 with AVX-512.
    assert difference(state(cut), state(alone)) < 2e-5


@pytest.mark.parametrize("weighing", [None, "gradient", "energy"])
def test_in_float64_nothing_is_left_of_the_difference(ranks: Ranks, weighing: Weighing | None) -> None:
    parts = in_float64(policy())
    changes = {"advantage": "opob" if weighing == "gradient" else "otb" if weighing else "rloo"}
    pair = [over(ranks, copy.deepcopy(parts), **changes), Local().build(parts, context(**changes))]
    for step in range(5):
        rows = random_rows(seed=step, n=3 + 3 * step)
        for learner in pair:
            learner.accumulate(in_pools(rows, weighing) if weighing else rows, LOSSES["truncate"])
            learner.apply(1e-3)
    assert difference(state(pair[0]), state(pair[1])) < 1e-12


def test_gradients_that_are_not_finite_on_one_rank_stop_all(ranks: Ranks) -> None:
    cut = over(ranks, policy(), advantage="opob")
    before, rows = state(cut), in_pools(random_rows(n=9), "gradient")
    loss = LossConfig(policy_loss=Plain())
    with pytest.raises(FloatingPointError, match=r"rank \d: gradient norms up to nan.*; no update was made$"):
        cut.accumulate([replace(rows[0], weight=math.nan), *rows[1:]], loss)
    assert difference(state(cut), before) == 0
    cut.accumulate(rows, loss)
    cut.apply(1e-3)
    assert 0 < difference(state(cut), before) < 0.01


@pytest.mark.parametrize("weighing", [None, "gradient", "energy"])
def test_bfloat16_is_as_far_off_as_in_one_process(ranks: Ranks, weighing: Weighing | None) -> None:
    """Where products are rounded: gradients and log-probabilities agree with float32 about as well."""
    parts = policy()
    found: list[list[float]] = []
    moved = []
    for dtype, over_ranks in [("float32", False), ("bfloat16", False), ("bfloat16", True)]:
        changes = {"dtype": dtype, "advantage": "opob" if weighing == "gradient" else "otb" if weighing else "rloo"}
        same = copy.deepcopy(parts)
        learner = over(ranks, same, **changes) if over_ranks else Local().build(same, context(**changes))
        before, rows = state(learner), random_rows(n=12)
        learner.accumulate(in_pools(rows, weighing) if weighing else rows, LossConfig(policy_loss=Plain()))
        norm = learner.apply(1e-3)
        found.append([norm, *torch.cat(learner.logp(rows)).tolist()])
        moved.append(torch.cat([(after - before[name]).flatten() for name, after in state(learner).items()]))
    exact, alone, cut = (torch.tensor(values) for values in found)
    assert 0 < (cut - exact).abs().max() < 3 * (alone - exact).abs().max()
    assert cut[0] == pytest.approx(float(exact[0]), rel=0.03)
    assert torch.nn.functional.cosine_similarity(moved[2], moved[0], dim=0) > 0.9


@pytest.mark.slow
def test_weights_are_cut_among_some_ranks_and_copied_to_others(local_cluster: None) -> None:
    """HSDP: two groups of two ranks."""
    parts, four = policy(tie_word_embeddings=True), Ranks(world=4, threads=1, num_gpus=0, timeout_s=120)
    weighings: tuple[Weighing | None, ...] = (None, "gradient")
    try:
        for weighing in weighings:
            changes = {"advantage": "opob" if weighing else "rloo"}
            alone = Local().build(copy.deepcopy(parts), context(**changes))
            cut = FsdpLearner(four, *four.build(parts, context(**changes), 2), read=parts.files is not None)
            for step in range(3):
                rows = random_rows(seed=step, n=2 + 5 * step)
                for learner in (alone, cut):
                    learner.accumulate(in_pools(rows, weighing) if weighing else rows, LossConfig(policy_loss=Plain()))
                    learner.apply(1e-3)
            assert difference(state(cut), state(alone)) < 1e-5
    finally:
        four.close()


def test_a_model_whose_rows_cannot_be_told_apart_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="cannot find the baselines of opob with gradient_checkpointing"):
        over(ranks, policy(), advantage="opob", gradient_checkpointing=True)
    parts = policy()
    parts.model = gemma2()
    with pytest.raises(ValueError, match="cannot find the baselines of opob with a head of another kind"):
        over(ranks, parts, advantage="opob")


def test_rollouts_without_a_gradient_count_in_the_step_size_as_in_one_process(ranks: Ranks) -> None:
    """Their ratios take a forward pass, in which ranks may have different numbers of rows."""
    parts = policy()
    learners: list[Learner] = [Local().build(copy.deepcopy(parts), context()), over(ranks, parts)]
    loss = LossConfig(policy_loss=Plain(), correction=Truncate())
    for rewards in (
        [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]],
    ):
        found = []
        for learner in learners:
            options = StepOptions(learning_rate=1e-2, **STEP)
            step = OptimizerStep(learner, ADVANTAGES["rloo"](), loss, STEP_SCALES["ess"]().build(), options)
            groups = [
                make_group(n, list(some), [2 + n + i for i in range(len(some))]) for n, some in enumerate(rewards)
            ]
            found.append(step(groups, 0))
        assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)
        assert found[0]["rows_with_gradient"] < found[0]["rows"]
        assert found[0]["effective_learning_rate"] < 0.99 * found[0]["learning_rate"]
    assert difference(state(learners[1]), state(learners[0])) < 1e-5


def in_segments(rows: list[Row], size: int = 3) -> list[Row]:
    """As many rows each are the segments of one rollout."""
    return [replace(row, rollout_number=number // size, weight=0.1) for number, row in enumerate(rows)]


SEVERAL: list[tuple[LossConfig, Weighing | None]] = [
    (LossConfig(policy_loss=Clip(importance_sampling_level="sequence")), None),
    (LOSSES["truncate"], None),
    (LOSSES["truncate"], "gradient"),
]


@pytest.mark.parametrize(("loss", "weighing"), SEVERAL)
def test_rollouts_of_several_segments_are_those_of_one_process(
    ranks: Ranks, loss: LossConfig, weighing: Weighing | None
) -> None:
    parts, changes = policy(), {"advantage": "opob" if weighing else "rloo"}
    alone, cut = Local().build(copy.deepcopy(parts), context(**changes)), over(ranks, parts, **changes)
    rows = in_segments(random_rows(seed=3, n=13))
    if weighing:
        rows = [
            replace(row, advantage=rows[i // 3].advantage, pool=Pool(i // 6, weighing)) for i, row in enumerate(rows)
        ]
    ours, theirs = (learner.accumulate(rows, loss) for learner in (cut, alone))
    assert len(torch.cat(ours.log_w_B)) == len(torch.cat(theirs.log_w_B)) == 5
    assert ours.sums == pytest.approx(theirs.sums, rel=1e-4, abs=1e-4)
    assert cut.apply(1e-3) == pytest.approx(alone.apply(1e-3), rel=1e-4)
    assert difference(state(cut), state(alone)) < 1e-5


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(ranks: Ranks) -> None:
    """And leaves them able to go on."""
    cut = over(ranks, policy())
    before, rows = state(cut), random_rows(n=6)
    sampled = rows[0].rollout.sampler_logp.copy()
    rows[0].rollout.sampler_logp[:] = float("nan")
    with pytest.raises(FloatingPointError, match=r"rank \d: the loss is nan; no update was made$"):
        cut.accumulate(rows, LOSSES["truncate"])
    assert difference(state(cut), before) == 0
    rows[0].rollout.sampler_logp[:] = sampled
    cut.accumulate(rows, LOSSES["truncate"])
    cut.apply(1e-3)
    assert 0 < difference(state(cut), before) < 0.01


def test_a_loss_in_a_file_of_ones_own_reaches_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    code = "from dataclasses import dataclass\nfrom winnow.methods.policy_loss import Plain\n"
    (tmp_path / "own.py").write_text(f"{code}@dataclass(frozen=True)\nclass Own(Plain): ...\n")
    target, parts = f"{tmp_path}/own.py:Own", policy()
    alone, cut = Local().build(copy.deepcopy(parts), context()), over(ranks, parts, policy_loss=target)
    for learner in (alone, cut):
        updates(learner, LossConfig(policy_loss=load(target)()), steps=2)
    assert difference(state(cut), state(alone)) < 1e-5
