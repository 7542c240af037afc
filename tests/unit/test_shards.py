"""What ranks share, in a folder, by one process; several are in tests/scale/test_fsdp.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from winnow.learner.fsdp.shards import load_shards, save_shards

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
    with pytest.raises(ValueError, match=r"\.metadata is not read; an earlier version saved it"):
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
