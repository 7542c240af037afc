"""Rows of the fault matrix (docs/reliability.md) without another home: memory, clocks, odd prompts, bombs, links."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from winnow import Trainer
from winnow.env import row_files
from winnow.env.dataset import DatasetConfig
from winnow.env.row_files import DataError
from winnow.learner.local.learner import LocalLearner
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import OutOfMemoryError
from winnow.run import checkpoint
from winnow.run.checkpoint import CheckpointError

from ..builders.runs import assert_clean, fingerprint, resume, train
from ..builders.tokenizers import chat_model
from ..parity import parity_reward

__all__ = ["chat_model"]  # a fixture


def huge() -> None:
    torch.empty(1 << 52)


def on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ...")


def in_python() -> None:
    raise MemoryError


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("fill", [huge, on_a_gpu, in_python])
def test_21_out_of_memory_ends_with_a_remedy_and_the_run_goes_on(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Any
) -> None:
    update, calls = LocalLearner.accumulate, []

    def fails_once(self: LocalLearner, *arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            fill()
        return update(self, *arguments, **options)

    monkeypatch.setattr(LocalLearner, "accumulate", fails_once)
    with pytest.raises(OutOfMemoryError, match=r"step 2: out of memory: .*tokens_per_microbatch"):
        train(tiny_config)
    run = Path(tiny_config["output_dir"])
    resume(run)
    assert_clean(run)
    train(tiny_config | {"output_dir": str(tmp_path / "whole")})
    assert fingerprint(run) == fingerprint(tmp_path / "whole")


def test_21_other_errors_stay_what_they_are(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LocalLearner, "accumulate", fails)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        train(tiny_config)


@pytest.mark.slow
def test_22_a_clock_that_jumps_changes_nothing(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 30 days, to and fro, at every look: every wait is by a clock that only goes on."""
    train(tiny_config | {"output_dir": str(tmp_path / "whole")})
    real, looks = time.time, []

    def jumps() -> float:
        looks.append(None)
        return real() + (-1) ** len(looks) * 30 * 86_400

    monkeypatch.setattr(time, "time", jumps)
    train(tiny_config | {"max_steps": 2})
    resume(Path(tiny_config["output_dir"]), {"max_steps": 4})
    assert len(looks) > 10
    assert_clean(Path(tiny_config["output_dir"]))
    assert fingerprint(Path(tiny_config["output_dir"])) == fingerprint(tmp_path / "whole")


ODD = {
    "emoji": "👩‍👩‍👧‍👦 2+2 🏳️‍🌈",
    "right to left": "מה זה ‮4321‬?",
    "specials": "<|im_end|><|endoftext|><|im_start|>assistant\n4",
    "nul, replaced": "a\\u0000b",
    "combining": "e\u0301" * 20,
    "long": "x" * 400,
}


def test_17_odd_prompts_are_answered_or_fail_alone(chat_model: Path, tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": [{"role": "user", "content": text}]} for name, text in ODD.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": str(chat_model),
        "env": {"name": "dataset", "path": str(tmp_path / "rows.jsonl")},
        "output_dir": str(tmp_path / "run"),
        "max_steps": 1,
        "prompts_per_step": len(ODD),
        "num_generations": 2,
        "max_prompt_length": 256,
        "max_completion_length": 4,
        "max_failed_share": 0.5,
    }
    seen: dict[str, str] = {}

    def reward(prompts: list[Any], completions: list[Any], id: list[str], **columns: Any) -> list[float]:
        seen.update(zip(id, (p[-1]["content"] for p in prompts), strict=True))
        return [float(i % 2) for i in range(len(prompts))]

    with pytest.warns(UserWarning, match="1 of 6 training prompts have over 256 tokens"):
        Trainer(config=config, reward_funcs=reward).train()
    assert_clean(tmp_path / "run")
    assert seen == {name: text for name, text in ODD.items() if name != "long"}, "as they were written"
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["failed"]["visits"] == 1


def test_17_special_tokens_of_a_prompt_end_nothing(chat_model: Path) -> None:
    """Text that spells a special token is one, as everywhere in this field; only sampled ones end a completion."""
    tokenizer = Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    assert len(tokenizer.encode("<|im_end|>").ids) == 1


def test_17_a_text_without_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: .*empty"):
        DatasetConfig(str(tmp_path / "rows.jsonl")).build()


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize(("name", "start"), [("b.jsonl.gz", b""), ("b.json.gz", b"[")])
def test_28_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: bytes) -> None:
    """256 MiB of blanks in 256 KiB; the bounds are lowered so that the test is short."""
    monkeypatch.setattr(row_files, "MAX_LINE", 1 << 20)
    monkeypatch.setattr(row_files, "MAX_LIST", 1 << 20)
    with gzip.open(tmp_path / name, "wb", compresslevel=9) as file:
        file.write(start)
        for _ in range(256):
            file.write(b" " * (1 << 20))
    assert (tmp_path / name).stat().st_size < 1 << 19
    with pytest.raises(DataError, match="longer than 1 MiB"):
        DatasetConfig(str(tmp_path / name)).build()


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname", "model/../../secret"])
def test_28_a_manifest_reaches_no_file_outside(tiny_config: dict[str, Any], name: str) -> None:
    train(tiny_config | {"max_steps": 1})
    directory = checkpoint.latest(Path(tiny_config["output_dir"]))
    assert directory is not None
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="which is outside of its directory"):
        checkpoint.verify(directory)


def test_28_rotation_never_follows_a_link(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """A step's directory that somebody replaced by a link to another."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years")
    train(tiny_config | {"max_steps": 1, "save_total_limit": 1})
    run = Path(tiny_config["output_dir"])
    os.symlink(precious, run / "checkpoints" / "step-000000")
    with pytest.raises(CheckpointError, match=r"step-000000: a symbolic link, not what this run saved; remove it"):
        Trainer.resume(run, {"max_steps": 3, "save_total_limit": 1}, reward_funcs=parity_reward).train()
    assert (precious / "thesis").read_text() == "years"
    (run / "checkpoints" / "step-000000").unlink()
    resume(run)
    assert checkpoint.steps(run) == [3]


@pytest.mark.parametrize(("prompts", "of_a_step"), [(3, 4), (5, 4), (4, 4)])
def test_25_steps_that_do_not_divide_the_data(
    tiny_config: dict[str, Any], tmp_path: Path, prompts: int, of_a_step: int
) -> None:
    """Fewer prompts than a step wants, a last batch that is not whole, an epoch that ends with a step."""
    env = {"name": "countdown", "train_size": prompts, "test_size": 2}
    config = tiny_config | {"env": env, "prompts_per_step": of_a_step, "eval_steps": None, "max_steps": 5}
    run = Path(config["output_dir"])
    train(config | {"max_steps": 2})
    resume(run, {"max_steps": 5})
    train(config | {"output_dir": str(tmp_path / "whole")})
    assert fingerprint(run) == fingerprint(tmp_path / "whole")
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        found = ledger._db.execute("SELECT epoch, ordinal FROM visits WHERE void = 0 ORDER BY visit").fetchall()
    assert len(found) == 5 * of_a_step
    for epoch in range(len(found) // prompts):
        visited = sorted(ordinal for e, ordinal in found if e == epoch)
        assert visited == list(range(prompts)), f"epoch {epoch}: each prompt once"
