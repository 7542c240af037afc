"""The file of `winnow pass-rates`: found again, continued to the same bytes after an interruption, never mixed up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.methods.pass_rates import ProfileError, read_profile
from winnow.rollout.evaluate import RolloutsFailedError
from winnow.rollout.profile import CHUNK
from winnow.study.pass_rates import ProfileFile, profile_model

PROMPTS = 2 * CHUNK + 5
REWARD = """
def words(completions, numbers, **columns):
    if numbers[0][0] == 3:
        raise RuntimeError("three")
    return [float(len(c.split()) % 2) for c in completions]

def never(completions, **columns):
    raise RuntimeError("never")
"""


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return {
        "env": {"name": "countdown", "train_size": PROMPTS, "test_size": 4},
        "max_prompt_length": 16,
        "max_completion_length": 6,
        "threads": 1,
        "reward_funcs": [f"{reward}:words"],
    }


@pytest.fixture(scope="module")
def whole(tiny_model: Path, values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "p.jsonl"
    found = profile_model(str(tiny_model), values, n=4, output=path)
    assert not found["cached"]
    assert found["profiled"] + found["unjudged"] == found["prompts"] == PROMPTS
    assert found["unjudged"] > 0
    assert sum(found["histogram"].values()) == found["profiled"]
    assert found["rollouts"] == 4 * PROMPTS
    return path


def meta(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


@pytest.mark.slow
def test_the_same_call_finds_the_file(
    tiny_model: Path, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = profile_model(str(tiny_model), values, n=2, prompts=10)
    path = Path(first["profile"])
    assert path.parent == Path("profiles")
    assert path.name.startswith("countdown-")
    before = path.read_bytes()
    again = profile_model(str(tiny_model), values, n=2, prompts=10)
    assert again == first | {"cached": True}
    assert path.read_bytes() == before
    assert len(read_profile(path)) == first["profiled"]
    others = [{"temperature": 0.5}, {"seed": 1}, {"success": 0.5}, {"stop": ["="]}, {"top_k": 3}]
    paths = {profile_model(str(tiny_model), values | o, n=2, prompts=2)["profile"] for o in others}
    paths.add(profile_model(str(tiny_model), values, n=3, prompts=2)["profile"])
    assert len(paths | {str(path)}) == len(others) + 2


def test_more_prompts_extend_the_file(tiny_model: Path, values: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    profile_model(str(tiny_model), values, n=4, prompts=7, output=path)
    assert whole.read_bytes().startswith(path.read_bytes())
    more = profile_model(str(tiny_model), values, n=4, output=path)
    assert not more["cached"]
    assert read_profile(path) == read_profile(whole)
    assert more["rollouts"] == 4 * PROMPTS
    fewer = profile_model(str(tiny_model), values, n=4, prompts=7, output=path)
    assert fewer["cached"]
    assert fewer["prompts"] == 7


@pytest.mark.slow
def test_a_torn_file_ends_as_the_whole_one(
    tiny_model: Path, values: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    content, known = whole.read_bytes(), json.loads(meta(whole).read_text())
    draw = random.Random(1)
    for cut in [1, *(draw.randrange(2, len(content)) for _ in range(4)), len(content) - 1]:
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(content[:cut])
        meta(path).write_text(json.dumps(known | {"tried": 0}))
        profile_model(str(tiny_model), values, n=4, output=path)
        assert path.read_bytes() == content, f"cut at byte {cut}"


@pytest.mark.slow
def test_kill_9_between_lines_and_meta(tiny_model: Path, values: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    call = f"profile_model({str(tiny_model)!r}, {values!r}, n=4, output=Path({str(path)!r}))"
    code = f"from winnow.study.pass_rates import *; {call}"
    environment = os.environ | {"WINNOW_FAILPOINT": "profile.lines@2:kill"}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert json.loads(meta(path).read_text())["tried"] == CHUNK
    assert 0 < len(read_profile(path)) < PROMPTS
    found = profile_model(str(tiny_model), values, n=4, output=path)
    assert path.read_bytes() == whole.read_bytes()
    assert found["unjudged"] == PROMPTS - len(read_profile(path))


def test_an_interrupt_says_how_to_go_on(
    tiny_model: Path, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("winnow.rollout.runner.RolloutRunner.poll", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"0 of {PROMPTS} prompts .* the same command goes on"):
        profile_model(str(tiny_model), values, output=tmp_path / "p.jsonl")


def test_another_ones_file_is_refused_and_kept(
    tiny_model: Path, values: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    before = whole.read_bytes(), meta(whole).read_bytes()
    with pytest.raises(ProfileError, match=r"made for something else .*n: 4 there, 8 now"):
        profile_model(str(tiny_model), values, n=8, output=whole)
    with pytest.raises(ProfileError, match="seed: 0 there, 5 now"):
        profile_model(str(tiny_model), values | {"seed": 5}, n=4, output=whole)
    assert (whole.read_bytes(), meta(whole).read_bytes()) == before
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    with pytest.raises(ProfileError, match="no telling what it was made for"):
        profile_model(str(tiny_model), values, output=notes)
    assert notes.read_text() == "keep me"
    meta(notes).write_text("[1]")
    with pytest.raises(ProfileError, match="no telling"):
        profile_model(str(tiny_model), values, output=notes)


def test_a_run_with_other_settings_than_its_profile_warns(
    tiny_model: Path, values: dict[str, Any], whole: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    reads = {"model": str(tiny_model), "selector": {"name": "pass_rate", "profile": str(whole)}, "max_steps": 1}
    Trainer(config=values | reads | {"output_dir": str(tmp_path / "same"), "seed": 3})
    assert not [w for w in recwarn if "was made with other settings" in str(w.message)]
    with pytest.warns(
        UserWarning,
        match=r"selector: .*p\.jsonl was made with other settings \(sampling.temperature: 1.0 there, 0.6 now\)",
    ):
        Trainer(config=values | reads | {"output_dir": str(tmp_path / "other"), "temperature": 0.6})


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path, key = tmp_path / "p.jsonl", {"n": 1}
    with ProfileFile(path, key, {}), pytest.raises(ProfileError, match="another process is writing"):
        ProfileFile(path, key, {})
    ProfileFile(path, key, {}).__exit__()


def test_nothing_can_be_judged(tiny_model: Path, values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    never = [values["reward_funcs"][0].replace(":words", ":never")]
    with pytest.raises(RolloutsFailedError, match=r"none of the 128 rollouts .*never"):
        profile_model(str(tiny_model), values | {"reward_funcs": never}, n=2, output=path)
    assert path.read_bytes() == b""
