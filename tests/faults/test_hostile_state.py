"""Checkpoints that somebody made: whole by their manifest, but with a state that no version of Winnow has saved."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow import ConfigError, Trainer
from winnow.base.array_json import pack, pack_all, unpack, unpack_all
from winnow.cli.console import EXPECTED
from winnow.run.checkpoint import CheckpointError, marks
from winnow.sampler.codec import ARRAYS

from ..builders.hostile_state import changed, seal
from ..pairs.compose import make_place
from ..pairs.variants import Variant, together, variants
from ..pairs.world import World, make_model


def half(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is behind by two steps: its checkpoint holds groups, work in flight, and what a selector knows."""
    folder = tmp_path_factory.mktemp("hostile")
    make_model(folder / "model")
    rows = [{"prompt": f"p{i % 6} w{i % 50} w{i * 7 % 50}"} for i in range(40)]
    config = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1, "prompts_per_step": 4, "num_generations": 4}
    methods = {"selector": "greso", "rollout_batch": "adaptive", "filter": "zero_variance", "max_lag": 2}
    own = {"threads": 1, "max_completion_length": 6, "output_dir": str(folder / "run")}
    Trainer(str(folder / "model"), train_dataset=rows, reward_funcs=half, config=config | methods | own).train()
    return folder / "run"


def with_state(saved: Path, to: Path, state: Any) -> Path:
    shutil.copytree(saved, to)
    (directory,) = (to / "checkpoints").iterdir()
    (directory / "state.json").write_text(json.dumps(state))
    seal(directory)
    return to


def resumed(run: Path) -> None:
    rows = [{"prompt": f"p{i % 6} w{i % 50} w{i * 7 % 50}"} for i in range(40)]
    Trainer.resume(run, {"max_steps": 4}, train_dataset=rows, reward_funcs=half).train()


def state_of(saved: Path) -> Any:
    return json.loads(next(saved.glob("checkpoints/*/state.json")).read_text())


def refusals(saved: Path, folder: Path, seeds: Iterable[str], resume: Callable[[Path], None]) -> list[str]:
    """What a resume says of states that are each changed at one place. Anything unexpected is raised."""
    state, found = state_of(saved), []
    for seed in seeds:
        run = with_state(saved, folder / "changed", changed(state, random.Random(seed)))
        try:
            resume(run)
        except (*EXPECTED, ArithmeticError, LookupError, TypeError) as error:
            if str(folder) in str(error):  # else an impossible value of the right type ended the run: SECURITY.md
                found.append(f"{seed}: {error}")
        except Exception as error:
            error.add_note(seed)
            raise
        shutil.rmtree(run)
    return found


@pytest.mark.parametrize(
    "numbers", [range(25), pytest.param(range(25, 1500), marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_any_state_is_refused_by_name_or_trained_on(saved: Path, tmp_path: Path, numbers: range) -> None:
    assert len(refusals(saved, tmp_path, [f"state {n}" for n in numbers], resumed)) > len(numbers) / 2


def with_state_of_their_own() -> list[Variant]:
    found = [v for v in variants() if v.fields & {"selector", "group_size", "gates", "step_scale", "audit"}]
    return [*found, *(v for v in variants() if v.name == "rollout_batch=adaptive")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", with_state_of_their_own(), ids=str)
def test_the_state_of_any_method_is_refused_by_name_or_trained_on(tmp_path: Path, variant: Variant) -> None:
    place, audit = make_place(tmp_path), next(v for v in variants() if v.name == "audit={epsilon:0.5}")
    audited = [variant, audit] if "gates" in variant.fields else [variant]
    settings = {"max_lag": 2} | together(*audited) | {"threads": 1, "max_steps": 2, "save_total_limit": 1}
    Trainer(config=place.config(settings), env=World()).train()

    def resume(run: Path) -> None:
        Trainer.resume(run, {"max_steps": 3}, env=World()).train()

    found = refusals(tmp_path / "whole", tmp_path, [f"{variant.name} {n}" for n in range(20)], resume)
    assert len(found) > 10


def test_the_state_as_it_was_is_taken(saved: Path, tmp_path: Path) -> None:
    resumed(with_state(saved, tmp_path / "run", state_of(saved)))


def of_first(state: Any, **values: Any) -> None:
    state["loop"]["waiting"][0]["rollouts"][0] |= values


def with_arrays(state: Any, name: str, value: Any) -> None:
    """Of the first rollout that waits, the first number of an array."""
    group = state["loop"]["waiting"][0]
    arrays = unpack_all(group["arrays"])
    arrays[ARRAYS.index(name)][0] = value
    group["arrays"] = pack_all(arrays)


def with_segments(state: Any, later: Any, *prompts: list[Any]) -> None:
    """Of the first rollout that waits, segments after the first: [start, agent] of each, and their prompts."""
    of_first(state, later_segments=later)
    group = state["loop"]["waiting"][0]
    arrays = unpack_all(group["arrays"])
    group["arrays"] = pack_all([*arrays[: len(ARRAYS)], *map(np.array, prompts), *arrays[len(ARRAYS) :]])


def test_segments_of_a_group_that_waits_are_trained(saved: Path, tmp_path: Path) -> None:
    """The last one has a prompt and no token yet, as that of a rollout that failed there."""
    state = state_of(saved)
    tokens = len(unpack_all(state["loop"]["waiting"][0]["arrays"])[0])
    with_segments(state, [[1, ""], [2, "critic"], [tokens, ""]], [3, 4], [5], [6])
    resumed(with_state(saved, tmp_path / "run", state))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: with_segments(s, [[0, ""]], [3]), r"waiting: .*sibling 0 start at \[0, 0\], which do not ascend"),
        (lambda s: with_segments(s, [[2, ""], [1, ""]], [3], [3]), r"start at \[0, 2, 1\], which do not ascend"),
        (lambda s: with_segments(s, [[2, ""], [2, ""]], [3], [3]), r"start at \[0, 2, 2\], which do not ascend"),
        (lambda s: with_segments(s, [[99, ""]], [3]), r"start at \[0, 99\], which do not ascend within its \d tokens"),
        (lambda s: with_segments(s, [[-1, ""]], [3]), r"start at \[0, -1\]"),
        (
            lambda s: with_segments(s, [["1", ""]], [3]),
            r"rollouts\.0\.later_segments\.0\.start: .*valid integer \(got '1'",
        ),
        (
            lambda s: with_segments(s, [[True, ""]], [3]),
            r"rollouts\.0\.later_segments\.0\.start: .*valid integer \(got True",
        ),
        (lambda s: with_segments(s, [[1, 7]], [3]), r"rollouts\.0\.later_segments\.0\.agent: .*valid string \(got 7"),
        (lambda s: of_first(s, agent=None), r"rollouts\.0\.agent: .*valid string \(got None"),
        (lambda s: with_segments(s, [[1, ""]], [3.5]), r"later_segments\.0\.prompt_ids\.0: .*valid integer \(got 3\.5"),
        (
            lambda s: with_segments(s, [[1, ""]], [[3]]),
            r"later_segments\.0\.prompt_ids\.0: .*valid integer \(got \[3\]",
        ),
        (lambda s: with_segments(s, [[1, ""]], [64]), "the token 64, which is outside the vocabulary of 64"),
        (lambda s: with_segments(s, [[1, ""]], [3] * 64), r"\d\d tokens, more than the model's 64 positions"),
        (lambda s: with_segments(s, [[1]], [3]), r"waiting: not enough values"),
        (lambda s: with_segments(s, 5), r"waiting: TypeError: "),
        (lambda s: of_first(s, later_segments=[[1, ""]]), r"waiting: "),
        (lambda s: of_first(s, reward="1.0"), r"loop\.waiting\.0\.rollouts\.0\.reward: .*valid number \(got '1\.0'"),
        (lambda s: of_first(s, prompt_ids=[3, 64]), "the token 64, which is outside the vocabulary of 64"),
        (lambda s: of_first(s, prompt_ids=[3] * 99), "10[0-9] tokens, more than the model's 64 positions"),
        (lambda s: with_arrays(s, "token_ids", -1), "the token -1, which is outside"),
        (lambda s: with_arrays(s, "sampler_logp", np.nan), "non-finite log-probabilities"),
        (lambda s: s["loop"]["waiting"][0].pop("visit"), "waiting: KeyError: 'visit'"),
        (
            lambda s: s["loop"]["in_flight"].append([["x", 0, 3, {"keep": True}], 4]),
            r"in_flight\.\d+\.number: .*valid integer \(got 'x'",
        ),
        (lambda s: s["loop"]["waiting"][0]["arrays"]["like"][0].__setitem__(0, "O"), "'O' has no numbers"),
        (
            lambda s: s["loop"]["in_flight"].append([[9, 0, 3, {"keep": True}], 2**62]),
            r"loop\.in_flight: .*at most 4 rollouts \(got 46",
        ),
        (lambda s: s["loop"].update(unreplaced=-1), r"loop\.unreplaced: Input should be greater"),
        (lambda s: s["loop"].update(step=2), "of step 2, in step-000003"),
        (
            lambda s: s["loop"]["selector"].update(p=[0.5, -0.1]),
            r"loop\.selector\.p\.1: .*greater than or equal to 0 \(got -0\.1",
        ),
        (
            lambda s: s["loop"]["selector"].update(z=pack(np.ones(7, np.float32))),
            r"loop\.selector\.z: is an array of \[7\] float32, not of \[40\]",
        ),
        (
            lambda s: s["loop"]["selector"].update(seen=[0.0]),
            r"loop\.selector\.seen: List should have at least 4 items",
        ),
        (lambda s: s.update(seconds_total=1e999), "the number Infinity is not finite"),
        (lambda s: s["ledger"].pop("steps"), "no mark of steps"),
    ],
)
def test_what_is_wrong_is_named(saved: Path, tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    state = state_of(saved)
    change(state)
    with pytest.raises(CheckpointError, match=rf"state\.json: not what this version saves.*{said}"):
        resumed(with_state(saved, tmp_path / "run", state))


@pytest.mark.parametrize(("version", "key"), [("0.1", "solved_steps"), ("0.2", "num_decoded_tokens")])
def test_a_state_of_an_earlier_version_is_refused_by_its_name(
    saved: Path, tmp_path: Path, version: str, key: str
) -> None:
    state = state_of(saved)
    del state["loop"][key]
    with pytest.raises(CheckpointError, match=rf"state\.json: saved by Winnow {version}, .*start a new run"):
        resumed(with_state(saved, tmp_path / "run", state))


def test_weights_that_a_sampler_behind_needs_are_missed_by_name(saved: Path, tmp_path: Path) -> None:
    run = with_state(saved, tmp_path / "run", state_of(saved))
    (directory,) = (run / "checkpoints").iterdir()
    for file in (directory / "sampler-weights").iterdir():
        file.unlink()
    seal(directory)
    with pytest.raises(ConfigError, match=r"sampler-weights/2\.safetensors: missing from the checkpoint"):
        resumed(run)


@pytest.mark.parametrize(
    ("shape", "said"), [([10], "has 10 bytes"), ([1 << 31], "is not between 0 and"), ([-1], "is not between 0 and")]
)
def test_a_packed_bomb_stays_packed(shape: list[int], said: str) -> None:
    bomb = pack(np.zeros(1 << 24, np.uint8)) | {"shape": shape}
    with pytest.raises(ValueError, match=said):
        unpack(bomb)


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_what_is_nested_too_deeply_is_named(saved: Path, tmp_path: Path, name: str) -> None:
    run = with_state(saved, tmp_path / "run", state_of(saved))
    (directory,) = (run / "checkpoints").iterdir()
    (directory / name).write_text("[" * 200_000)
    seal(directory, name)
    with pytest.raises(CheckpointError, match=rf"{name}.*nested too deeply"):
        resumed(run)


def test_a_mark_that_is_nested_too_deeply_is_named(saved: Path, tmp_path: Path) -> None:
    run = with_state(saved, tmp_path / "run", state_of(saved))
    next(run.glob("checkpoints/*/state.json")).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"state\.json.*nested too deeply"):
        marks(run)


def test_a_failed_sibling_that_outgrew_the_model_waits_with_its_group(saved: Path, tmp_path: Path) -> None:
    """An observation may be longer than what the model has left; nobody trains on such a rollout."""
    state = state_of(saved)
    of_first(state, prompt_ids=[3] * 99, reward=None, fate="failed")
    resumed(with_state(saved, tmp_path / "run", state))


@pytest.mark.parametrize("dtype", ["O", "|O8", "V8", "M8[s]", "S8", "g", None, [["a", "<i8"]]])
def test_bytes_are_never_taken_for_pointers(dtype: Any) -> None:
    """NumPy makes objects of them, and follows them."""
    arrays = pack_all([np.full(1, 0x4141414141414141)])
    arrays["like"][0][0] = dtype
    with pytest.raises((ValueError, TypeError)):
        unpack_all(arrays)
    with pytest.raises((ValueError, TypeError)):
        unpack(pack(np.zeros(1)) | {"dtype": dtype})
