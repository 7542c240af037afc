"""What ranks share, in a folder, by one process; several are in tests/scale/test_fsdp_files.py."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from winnow.base import dotted
from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.engine.loading import load_whole
from winnow.engine.skeleton import unloaded
from winnow.learner import Local
from winnow.learner.fsdp.ranks import Rank
from winnow.learner.fsdp.sharded import OPTIMIZER_FOLDER
from winnow.learner.fsdp.shards import load_shards, save_shards
from winnow.methods.loss import LossConfig
from winnow.run.build import build_policy
from winnow.run.resolve import resolve_here

from ..builders.cuda import rank_of_one, step_of
from .learner_models import llama, random_rows

pytestmark = pytest.mark.filterwarnings("ignore")


def state() -> dict[str, torch.Tensor]:
    return {"a:step": torch.tensor(3.0), "a:exp_avg": torch.arange(6.0).reshape(3, 2), "b:exp_avg": torch.ones(2)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state().items()}


def test_what_was_saved_comes_back_and_is_no_pickle(tmp_path: Path) -> None:
    save_shards(state(), tmp_path / "o")
    assert {file.suffix for file in (tmp_path / "o").iterdir()} == {".safetensors"}
    found = load_shards(zeros(), tmp_path / "o")
    for name, tensor in state().items():
        assert torch.equal(found[name], tensor)


def test_nothing_comes_back_as_nothing(tmp_path: Path) -> None:
    save_shards({}, tmp_path / "o")
    assert load_shards(zeros(), tmp_path / "o") == {}


def test_the_format_with_a_pickle_is_refused(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "o")
    with pytest.raises(ValueError, match=r"\.metadata is no part of a saved optimizer"):
        load_shards(zeros(), tmp_path / "o")


def change(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **offsets: Any) -> None:
    (file,) = folder.iterdir()
    with safe_open(str(file), "pt") as saved:
        places = json.loads(saved.metadata()["DCP_SHARDING_INFO"])
        found = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118 - not a mapping
    save_file(found | (tensors or {}), file, metadata={"DCP_SHARDING_INFO": json.dumps(places | offsets)})


@pytest.mark.parametrize(
    "tensors",
    [
        {"a:exp_avg": torch.zeros(4, 2)},
        {"a:exp_avg": torch.zeros(3, 2, dtype=torch.float64)},
        {"a:exp_avg": torch.zeros(2, 2)},
        {"a:step": torch.zeros(1)},
    ],
)
def test_other_shapes_and_types_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_shards(state(), tmp_path / "o")
    change(tmp_path / "o", tensors, **{name: {"saved_offsets": [0] * t.dim()} for name, t in tensors.items()})
    with pytest.raises(ValueError, match=rf"not the optimizer of this model; differs in {next(iter(tensors))}"):
        load_shards(zeros(), tmp_path / "o")


def test_a_shard_that_does_not_cover_its_tensor_is_named(tmp_path: Path) -> None:
    save_shards(state(), tmp_path / "o")
    change(tmp_path / "o", {"a:exp_avg": torch.ones(1, 2)}, **{"a:exp_avg": {"saved_offsets": [2, 0]}})
    with pytest.raises(ValueError, match="differs in a:exp_avg"):
        load_shards(zeros(), tmp_path / "o")


def test_an_optimizer_of_other_parameters_is_named(tmp_path: Path) -> None:
    save_shards(state() | {"c:exp_avg": torch.ones(1)}, tmp_path / "o")
    with pytest.raises(ValueError, match=r"differs in \['c:exp_avg'\]"):
        load_shards(zeros(), tmp_path / "o")


def test_a_parameter_that_had_no_gradient_resumes_without_a_state(tmp_path: Path) -> None:
    saved, loaded = rank_of_one("cpu"), rank_of_one("cpu")
    for rank in (saved, loaded):
        rank._params["unused"] = torch.nn.Parameter(torch.ones(2))
        rank.optimizer.add_param_group({"params": [rank._params["unused"]]})
    step_of(saved)
    save_shards(saved._optimizer_state(), tmp_path / OPTIMIZER_FOLDER)
    loaded.load(tmp_path)
    assert loaded._optimizer_state().keys() == saved._optimizer_state().keys()
    assert len(loaded.optimizer.state) == 1


@pytest.mark.parametrize("damage", ["places", "file"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    save_shards(state(), tmp_path / "o")
    (file,) = (tmp_path / "o").iterdir()
    if damage == "places":
        change(tmp_path / "o", **{"a:exp_avg": {}})
    else:
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="cannot be read"):
        load_shards(zeros(), tmp_path / "o")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_its_weights_is_otherwise_the_loaded_one(tmp_path: Path, tied: bool) -> None:
    original = llama(tie_word_embeddings=tied)
    original.generation_config.temperature = 0.25
    original.generation_config.do_sample = True
    original.save_pretrained(tmp_path)
    found, loaded = unloaded(tmp_path), load_whole(tmp_path, torch.device("cpu"))
    assert found is not None
    assert {p.device.type for p in found.parameters()} == {"meta"}
    assert found.config.to_dict() == loaded.config.to_dict()
    assert found.generation_config.temperature == 0.25
    ours, theirs = dict(found.named_buffers()), dict(loaded.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied


def test_a_model_whose_files_say_something_else_is_left_to_the_loader(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights, file)
    assert unloaded(tmp_path) is None
    save_file(weights | {"model.norm.weight": norm[:-1].clone()}, file)
    assert unloaded(tmp_path) is None
    save_file(weights | {"model.norm.weight": norm}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match=r"is quantized \(fp8\)"):
        unloaded(tmp_path)


FSDP = {"learner": {"name": "fsdp", "ranks": 2}}
READ: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": {"r": 4}},
    "lora-reference": {"lora": {"r": 4}, "beta": 0.1},
    "reference": {"beta": 0.1},
}


@pytest.mark.parametrize("with_engine", [False, True])
@pytest.mark.parametrize("name", READ)
def test_ranks_read_the_weights_and_the_driver_has_the_adapters(
    name: str, with_engine: bool, tiny_config: dict[str, Any]
) -> None:
    """Drawn as in one process, with the same digest of what they refer to."""
    policies = []
    for learner in ({}, FSDP):
        c = validate(tiny_config | READ[name] | learner)
        torch.manual_seed(0)
        policies.append(build_policy(resolve_here(c), with_engine=with_engine)[0])
    whole, cut = policies
    folder = Path(tiny_config["model"])
    assert (cut.files, cut.reference) == (folder, None)
    assert cut.reference_files == (folder if name == "reference" else None)
    assert cut.origin == whole.origin
    ours, theirs = dict(cut.model.named_parameters()), dict(whole.model.named_parameters())
    assert ours.keys() == theirs.keys()
    for key, parameter in ours.items():
        assert parameter.requires_grad == theirs[key].requires_grad
        assert torch.equal(parameter, theirs[key]) if ".lora_" in key else parameter.is_meta
    assert len(pickle.dumps(cut.model)) < 3e6


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("name", READ)
def test_a_rank_that_reads_trains_as_one_process(name: str, tiny_config: dict[str, Any], group_of_one: None) -> None:
    c = validate(tiny_config | READ[name] | FSDP)
    learners: list[Any] = []
    for given in (c, c.model_copy(update={"learner": "local"})):
        torch.manual_seed(0)
        r = resolve_here(given)
        policy, context = build_policy(r, with_engine=False)[0], r.learner_context
        if given is c:
            rank = Rank(0, 1, 1, "", False, {})
            rank.build(policy, context, None)
            learners.append(rank.learner)
        else:
            learners.append(Local().build(policy, context))
    cut, alone = learners
    rows, loss = random_rows(n=4), LossConfig(beta=given.beta)
    for step in range(3):
        ours, theirs = cut.gather(), dict(alone.weights().items())
        assert ours.keys() == theirs.keys()
        assert max(float((ours[key] - theirs[key]).detach().abs().max()) for key in ours) < (1e-5 if step else 1e-9)
        figures = cut.accumulate_part(rows, rows[0], loss, 0, 0).sums, alone.accumulate(rows, loss, 0).sums
        assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-4)
        assert cut.apply(1e-3) == pytest.approx(alone.apply(1e-3), rel=1e-3)


OWN = """
from dataclasses import dataclass

from winnow.methods.policy_loss import Plain


@dataclass(frozen=True)
class Own(Plain):
    pass
"""


def test_a_rank_loads_the_file_of_a_loss(
    tiny_config: dict[str, Any], group_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver sends the name of its module alone."""
    (tmp_path / "own.py").write_text(OWN)
    r = resolve_here(validate(tiny_config | FSDP | {"policy_loss": f"{tmp_path}/own.py:Own"}))
    sent = pickle.dumps(r.loss)
    dotted.load.cache_clear()
    monkeypatch.delitem(sys.modules, type(r.loss.policy_loss).__module__)
    rank = Rank(0, 1, 1, "", False, {})
    rank.build(build_policy(r, with_engine=False)[0], r.learner_context, None)
    rows = random_rows(n=4)
    rank.learner.accumulate_part(rows, rows[0], pickle.loads(sent), 0, 0)
    assert rank.learner.apply(1e-3) > 0
