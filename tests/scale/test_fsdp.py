"""The learner over ranks: the same updates as in one process, resumes on as many ranks or others, lost ranks."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow import Trainer
from winnow.base.weights import HalvedWeights, RemoteWeights, from_bytes
from winnow.config import ConfigError, RunConfig, validate
from winnow.engine.skeleton import unloaded
from winnow.learner import Learner, LearnerLostError, Local, Policy
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.learner.fsdp.ranks import Ranks
from winnow.learner.rows import Pool, Row
from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.advantage.in_update import Weighing
from winnow.methods.correct import M2PO, STEP_SCALES, Truncate
from winnow.methods.loss import LossConfig
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.build import build_policy
from winnow.run.start import Start
from winnow.study.warm_start import word_tokenizer

from .. import parity
from ..builders.groups import make_group
from ..builders.off_policy import STEP
from ..unit.learner_models import WORDS, gemma2, llama, random_rows

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local_cluster")

REWARD = f"{parity.__file__}:parity_reward"
FSDP = {"name": "fsdp", "ranks": 2, "timeout_s": 120}


@pytest.fixture(scope="module")
def ranks(local_cluster: None) -> Iterator[Ranks]:
    """Two, for one model after the other: they take seconds to start."""
    found = Ranks(world=2, threads=1, num_gpus=0, timeout_s=120)
    yield found
    found.close()


def over(ranks: Ranks, policy: Policy, **changes: Any) -> FsdpLearner:
    return FsdpLearner(ranks, *ranks.build(policy, config(**changes)))


def config(**changes: Any) -> RunConfig:
    return validate({"model": "given", "env": "countdown", "max_grad_norm": 0.5, "tokens_per_microbatch": 48} | changes)


def policy(reference: bool = False, **model: Any) -> Policy:
    causal_lm = llama(**model)
    tokenizer = word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64)
    return Policy(causal_lm, tokenizer, copy.deepcopy(causal_lm) if reference else None)


def updates(learner: Learner, loss: LossConfig, steps: int = 5, iterations: int = 1) -> list[dict[str, float]]:
    """Of rows that differ from step to step, in number, too."""
    found = []
    for step in range(steps):
        rows = random_rows(seed=step, n=1 + 4 * step)
        for iteration in range(iterations):
            stats = learner.accumulate(rows, loss, iteration)
            weights = torch.cat(stats.log_w_B)
            found.append(
                stats.sums | {"norm": learner.apply(1e-3), "rows": float(len(weights)), "weight": float(weights.sum())}
            )
    return found


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


LOSSES = {
    "plain": LossConfig(policy_loss="plain"),
    "clip": LossConfig(policy_loss="clip"),
    "kl and entropy": LossConfig(policy_loss="plain", beta=0.1, entropy_coef=0.01),
    "truncate": LossConfig(policy_loss="plain", correction=Truncate()),
    "over the batch": LossConfig(policy_loss="plain", correction=M2PO()),
    "over the batch, clip": LossConfig(policy_loss="clip", correction=M2PO()),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_five_clipped_updates_are_those_of_one_process(ranks: Ranks, name: str, tied: bool) -> None:
    """In the first there is one row for two ranks."""
    loss, iterations = LOSSES[name], 2 if "clip" in name else 1
    parts = policy(reference=True, tie_word_embeddings=tied)
    alone = Local().build(copy.deepcopy(parts), config())
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
    learners = Local().build(copy.deepcopy(parts), config()), over(ranks, parts)
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
    alone = Local().build(copy.deepcopy(parts), config(**changes))
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
    alone = Local().build(copy.deepcopy(parts), config(**changes))
    before = state(alone)
    cut = over(ranks, parts, **changes)
    loss = LossConfig(policy_loss="plain", correction=Truncate())
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
    parts = policy()
    parts.model.double()
    changes = {"advantage": "opob" if weighing == "gradient" else "otb" if weighing else "rloo"}
    pair = [over(ranks, copy.deepcopy(parts), **changes), Local().build(parts, config(**changes))]
    for step in range(5):
        rows = random_rows(seed=step, n=3 + 3 * step)
        for learner in pair:
            learner.accumulate(in_pools(rows, weighing) if weighing else rows, LOSSES["truncate"])
            learner.apply(1e-3)
    assert difference(state(pair[0]), state(pair[1])) < 1e-12


def test_gradients_that_are_not_finite_on_one_rank_stop_all(ranks: Ranks) -> None:
    cut = over(ranks, policy(), advantage="opob")
    before, rows = state(cut), in_pools(random_rows(n=9), "gradient")
    loss = LossConfig(policy_loss="plain")
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
        learner = over(ranks, same, **changes) if over_ranks else Local().build(same, config(**changes))
        before, rows = state(learner), random_rows(n=12)
        learner.accumulate(in_pools(rows, weighing) if weighing else rows, LossConfig(policy_loss="plain"))
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
            alone = Local().build(copy.deepcopy(parts), config(**changes))
            cut = FsdpLearner(four, *four.build(parts, config(**changes), 2))
            for step in range(3):
                rows = random_rows(seed=step, n=2 + 5 * step)
                for learner in (alone, cut):
                    learner.accumulate(in_pools(rows, weighing) if weighing else rows, LossConfig(policy_loss="plain"))
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


def saved_model(folder: Path, **model: Any) -> tuple[Policy, Policy]:
    """A policy with weights, and one whose weights are in files alone."""
    loaded = policy(**model)
    loaded.model.save_pretrained(folder)
    skeleton = unloaded(folder)
    assert skeleton is not None
    return loaded, Policy(skeleton, loaded.tokenizer, None, files=folder)


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_read_their_shards_from_files_train_as_one_process(ranks: Ranks, tied: bool, tmp_path: Path) -> None:
    """So do they from what they have saved."""
    parts, apart = saved_model(tmp_path / "start", tie_word_embeddings=tied)
    alone, cut = Local().build(parts, config()), over(ranks, apart)
    assert difference(state(cut), state(alone)) == 0
    assert (cut.sizes, cut.precision) == (alone.sizes, alone.precision)
    for learner in (alone, cut):
        updates(learner, LOSSES["clip"], iterations=2)
    assert difference(state(cut), state(alone)) < 1e-5
    cut.save(tmp_path)
    skeleton, expected = unloaded(tmp_path / "model"), state(cut)
    assert skeleton is not None
    resumed = over(ranks, Policy(skeleton, parts.tokenizer, None, files=tmp_path / "model"))
    resumed.load(tmp_path)
    assert difference(state(resumed), expected) == 0
    for learner in (alone, resumed):
        updates(learner, LOSSES["plain"], steps=2)
    assert difference(state(resumed), state(alone)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({"lora": {"r": 4}}, "clip"),
        ({"lora": {"r": 4}, "beta": 0.1}, "kl and entropy"),
        ({"beta": 0.1}, "kl and entropy"),
    ],
)
def test_ranks_that_read_train_adapters_and_hold_to_a_reference(
    ranks: Ranks, changes: dict[str, Any], loss: str, tmp_path: Path
) -> None:
    """As one process does, also from what they have saved; the driver has no weights but adapters."""
    start = policy(tie_word_embeddings=True)
    start.model.save_pretrained(tmp_path / "start")
    start.tokenizer.save_pretrained(tmp_path / "start")
    changes = changes | {"model": str(tmp_path / "start")}

    def built(learner: Any, checkpoint: Path | None) -> tuple[Policy, dict[str, Any]]:
        torch.manual_seed(0)
        c = config(**changes, learner=learner)
        found = build_policy(c, Start.of(c), None, checkpoint, with_engine=False)[0]
        return found, changes | {"learner": learner}

    (whole, local), (read, apart) = built("local", None), built(FSDP, None)
    assert (read.files, read.reference) == (tmp_path / "start", None)
    alone, cut = Local().build(whole, config(**local)), over(ranks, read, **apart)
    assert difference(state(cut), state(alone)) == 0
    for learner in (alone, cut):
        updates(learner, LOSSES[loss])
        if "lora" not in changes:
            learner.sync_reference(0.5)
    assert difference(state(cut), state(alone)) < 1e-5
    cut.save(tmp_path)
    expected, rows = state(cut), random_rows(seed=9, n=7)
    resumed = over(ranks, built(FSDP, tmp_path)[0], **apart)
    resumed.load(tmp_path)
    assert difference(state(resumed), expected) == 0
    if "beta" in changes:
        for mine, other in zip(resumed.reference_logp(rows), alone.reference_logp(rows), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)
    for learner in (alone, resumed):
        updates(learner, LOSSES[loss], steps=2)
    assert difference(state(resumed), state(alone)) < 1e-5


def test_files_that_ranks_cannot_use_are_named(ranks: Ranks, tmp_path: Path) -> None:
    parts, apart = saved_model(tmp_path / "start")
    with pytest.raises(ValueError, match=f"model: {tmp_path}/gone: is not on "):
        over(ranks, replace(apart, files=tmp_path / "gone"))
    with torch.no_grad():
        parts.model.model.norm.weight[3] = math.nan
    parts.model.save_pretrained(tmp_path / "start")
    with pytest.raises(ValueError, match=r"the weights of '.*start' are not finite \(model\.norm\.weight\)"):
        over(ranks, apart)


def test_a_rank_that_reads_from_files_holds_its_part(ranks: Ranks, tmp_path: Path) -> None:
    """Peaks while the model is cut; pages of the files, half of its size here, may be among them."""
    parts = policy(hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    size = sum(p.numel() for p in parts.model.parameters()) * 4
    assert size > 180e6
    copy.deepcopy(parts.model).bfloat16().save_pretrained(tmp_path)
    over(ranks, policy())  # imports take memory, too
    held = peaks(ranks, Policy(unloaded(tmp_path), parts.tokenizer, None, files=tmp_path))  # type: ignore[arg-type]
    sent = peaks(ranks, parts)
    assert all(0.4 * size < most < 1.1 * size for most in held)
    assert all(most > 1.8 * size for most in sent)


def peaks(ranks: Ranks, policy: Policy) -> list[int]:
    """Most bytes that each rank held while it built the learner, over what it held before."""

    def kept(rank: Any, name: str) -> int:
        rank.learner = None
        gc.collect()
        if name == "VmRSS":
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
        (line,) = [x for x in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if x.startswith(name)]
        return int(line.split()[1]) * 1024

    def ask(name: str) -> list[int]:
        found: list[int] = ray.get([actor.__ray_call__.remote(kept, name) for actor in ranks._actors], timeout=120)
        return found

    before = ask("VmRSS")
    over(ranks, policy)
    return [peak - held for peak, held in zip(ask("VmHWM"), before, strict=True)]


def test_samplers_read_what_the_first_rank_has_put(ranks: Ranks) -> None:
    cut = over(ranks, policy(tie_word_embeddings=True))
    assert isinstance(cut.weights(), RemoteWeights)
    assert difference(from_bytes(ray.get(cut.weights().put(), timeout=60)), state(cut)) == 0
    half = from_bytes(ray.get(cut.weights().put(half=True), timeout=60))
    expected = dict(HalvedWeights(cut.weights()).items())
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16, torch.float32}
    assert all(
        half[name].dtype == tensor.dtype and torch.equal(half[name], tensor) for name, tensor in expected.items()
    )


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


@pytest.fixture
def run_config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"learner": FSDP, "reward_funcs": [REWARD], "eval_steps": None}


def figures(config: dict[str, Any]) -> list[dict[str, float]]:
    path = Path(config["output_dir"]) / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [row for row in rows if "loss" in row]


def untimed(row: dict[str, float]) -> dict[str, float]:
    """What does not depend on the machine."""
    measured = ("time", "memory_mib")
    return {name: value for name, value in row.items() if not name.endswith(measured) and "second" not in name}


def assert_clean(config: dict[str, Any]) -> None:
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems


def test_a_run_over_ranks_and_a_sampler_and_its_resume(run_config: dict[str, Any], tmp_path: Path) -> None:
    """All methods on; the second half on three ranks."""
    everything = {
        "sync": "ray",
        "max_lag": 2,
        "num_generations": 8,
        "selector": "greso",
        "filter": "zero_variance",
        "gates": [{"name": "arrol", "cold_start": 1}],
        "audit": {"epsilon": 0.3},
        "advantage": "opob",
        "correction": "truncate",
        "step_scale": "ess",
        "policy_loss": "plain",
        "eval_steps": 2,
    }
    config = run_config | everything
    Trainer(config=config | {"max_steps": 3}).train()
    Trainer.resume(config["output_dir"], {"max_steps": 5, "learner": FSDP | {"ranks": 3}}).train()
    assert_clean(config)
    assert [row["step"] for row in figures(config)] == [1, 2, 3, 4, 5]
    assert max(row.get("lag/max", 0) for row in figures(config)) <= 2
    assert all(row["updated"] for row in figures(config))
    assert [min(row[f"rank/{rank}/memory_mib"] > 100 for row in figures(config)[3:]) for rank in range(3)] == [True] * 3


@pytest.mark.slow
def test_a_resume_on_as_many_ranks_is_exact(run_config: dict[str, Any], tmp_path: Path) -> None:
    whole = run_config | {"max_steps": 4, "save_steps": 2, "output_dir": str(tmp_path / "whole")}
    Trainer(config=whole).train()
    config = run_config | {"save_steps": 2}
    Trainer(config=config | {"max_steps": 2}).train()
    Trainer.resume(config["output_dir"], {"max_steps": 4}).train()
    for ours, theirs in zip(figures(config), figures(whole), strict=True):
        assert untimed(ours) == untimed(theirs)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_the_run_resumed(run_config: dict[str, Any]) -> None:
    config = run_config | {"max_steps": 1000, "save_steps": 1}
    trainer = Trainer(config=config)
    pid = ray.get(trainer.learner._ranks._actors[1].__ray_call__.remote(lambda self: os.getpid()), timeout=60)  # type: ignore[attr-defined]

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(figures(config)) < 2:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RunStoppedError, match=r"learner: rank \d failed"):
        trainer.train()
    steps = len(figures(config))
    Trainer.resume(config["output_dir"], {"max_steps": steps + 1}).train()
    assert_clean(config)


def test_what_ranks_cannot_train_is_refused(run_config: dict[str, Any]) -> None:
    opob = {"advantage": "opob", "policy_loss": "plain", "gradient_checkpointing": True}
    with pytest.raises(
        ConfigError, match="learner: fsdp cannot find the baselines of opob with gradient_checkpointing"
    ):
        Trainer(config=run_config | opob)
    with pytest.raises(ConfigError, match="learner: 90 ranks need 90 CPUs and 0 GPUs, and the cluster has 8"):
        Trainer(config=run_config | {"learner": {"name": "fsdp", "ranks": 90}})


@pytest.mark.slow
def test_a_silent_rank_is_given_up(local_cluster: None) -> None:
    ranks = Ranks(world=1, threads=1, num_gpus=0, timeout_s=60)
    cut = over(ranks, policy())
    ranks.timeout_s = 3
    pid = ray.get(ranks._actors[0].__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(LearnerLostError, match="rank 0 said nothing for 3 s"):
        cut.apply(1e-3)


def on_ranks(ranks: Ranks, act: Any) -> list[Any]:
    """What a function of a rank returns on each of them."""
    return ray.get([actor.__ray_call__.remote(act) for actor in ranks._actors], timeout=60)


MANY = 800
"""Rows that two ranks take some ten seconds for."""


def test_a_frozen_rank_is_named_alone_and_a_long_call_is_none(local_cluster: None) -> None:
    """The other waits for it in a collective, and answers meanwhile."""
    ranks = Ranks(world=2, threads=1, num_gpus=0, timeout_s=120)
    cut = over(ranks, policy())
    ranks.timeout_s = 4
    pids = on_ranks(ranks, lambda rank: os.getpid())
    started = time.monotonic()
    cut.accumulate(random_rows(seed=0, n=MANY), LOSSES["plain"])
    assert time.monotonic() - started > 4, "longer than a rank may be silent"
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(LearnerLostError, match="learner: rank 1 said nothing for 4 s"):
        cut.accumulate(random_rows(seed=0, n=4), LOSSES["plain"])
    assert time.monotonic() - started < 30


def test_ranks_that_hang_are_given_up_although_they_answer(local_cluster: None) -> None:
    def hang(rank: Any) -> None:
        rank.learner.apply = lambda lr: threading.Event().wait()

    ranks = Ranks(world=1, threads=1, num_gpus=0, timeout_s=120, size=20_000_000)
    cut = over(ranks, policy())
    ranks.timeout_s = 2
    on_ranks(ranks, hang)
    with pytest.raises(LearnerLostError, match="rank 0 made no progress for 4 s"):
        cut.apply(1e-3)


def test_rollouts_without_a_gradient_count_in_the_step_size_as_in_one_process(ranks: Ranks) -> None:
    """Their ratios take a forward pass, in which ranks may have different numbers of rows."""
    parts = policy()
    learners: list[Learner] = [Local().build(copy.deepcopy(parts), config()), over(ranks, parts)]
    loss = LossConfig(policy_loss="plain", correction=Truncate())
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
    return [replace(row, whole=number // size, weight=0.1) for number, row in enumerate(rows)]


@pytest.mark.parametrize("loss", [LossConfig(importance_sampling_level="sequence"), LOSSES["truncate"]])
def test_rollouts_of_several_segments_are_those_of_one_process(ranks: Ranks, loss: LossConfig) -> None:
    parts = policy()
    alone, cut = Local().build(copy.deepcopy(parts), config()), over(ranks, parts)
    rows = in_segments(random_rows(seed=3, n=13))
    ours, theirs = (learner.accumulate(rows, loss) for learner in (cut, alone))
    assert len(torch.cat(ours.log_w_B)) == len(torch.cat(theirs.log_w_B)) == 5
    assert ours.sums == pytest.approx(theirs.sums, rel=1e-4, abs=1e-4)
    assert cut.apply(1e-3) == pytest.approx(alone.apply(1e-3), rel=1e-4)
    assert difference(state(cut), state(alone)) < 1e-5


def test_gradient_baselines_of_several_segments_are_refused_by_name(ranks: Ranks) -> None:
    cut = over(ranks, policy())
    rows = in_segments(in_pools(random_rows(seed=3, n=6), "gradient"))
    with pytest.raises(ValueError, match="advantage: opob with learner: fsdp takes rollouts of one segment"):
        cut.accumulate(rows, LossConfig(policy_loss="plain"))
