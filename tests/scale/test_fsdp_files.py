"""Ranks that read their shards from the model's files, and samplers that read the ranks' weights."""

from __future__ import annotations

import copy
import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.base.weights import HalvedWeights, RemoteWeights, from_bytes
from winnow.engine.skeleton import unloaded
from winnow.learner import Local, Policy
from winnow.learner.fsdp.ranks import Ranks
from winnow.run.build import build_policy
from winnow.run.resolve import resolve_here

from ..unit.learner_models import random_rows
from .fsdp_ranks import FSDP, LOSSES, config, context, difference, over, policy, state, updates

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local_cluster")


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
    alone, cut = Local().build(parts, context()), over(ranks, apart)
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
        found = build_policy(resolve_here(c), None, checkpoint, with_engine=False)[0]
        return found, changes | {"learner": learner}

    (whole, local), (read, apart) = built("local", None), built(FSDP, None)
    assert (read.files, read.reference) == (tmp_path / "start", None)
    alone, cut = Local().build(whole, context(**local)), over(ranks, read, **apart)
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
