"""kill -9 at every failpoint of a run, and at random moments: a resume ends where an undisturbed run does."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from winnow.record.ledger import Ledger

from ..builders.runs import assert_clean, fingerprint
from .harness import run

NAMES = [
    *["launch", "take", "gradient", "applied", "trained", "publish", "record"],
    *["ledger.mark", "ledger.step"],
    *["checkpoint.weights", "checkpoint.manifest", "checkpoint.fsync", "checkpoint.rename"],
]

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"max_steps": 3, "eval_steps": None, "save_steps": 2, "filter": {"name": "zero_variance"}}


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    return {}


@pytest.fixture
def undisturbed(config: dict[str, Any], shared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Fingerprint of the run without faults, and every failpoint it hits."""
    if not shared:
        base = tmp_path_factory.mktemp("undisturbed")
        log = base / "hits"
        assert run(config | {"output_dir": str(base / "run")}, WINNOW_FAILPOINT_LOG=str(log)) == 0
        shared |= {"fingerprint": fingerprint(base / "run"), "hits": log.read_text().split()}
    return shared


def assert_recovers(config: dict[str, Any], hit: str, expected: dict[str, Any]) -> None:
    config = config | {"output_dir": config["output_dir"] + "-" + hit}
    assert run(config, WINNOW_FAILPOINT=f"{hit}:kill") == -signal.SIGKILL, hit
    assert run(config) == 0, hit
    assert fingerprint(Path(config["output_dir"])) == expected, hit
    assert_clean(Path(config["output_dir"]))


def test_every_failpoint_is_known(undisturbed: dict) -> None:
    assert {hit.partition("@")[0] for hit in undisturbed["hits"]} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_kill_at_the_last_hit_of_each_failpoint(config: dict[str, Any], undisturbed: dict, name: str) -> None:
    last = [hit for hit in undisturbed["hits"] if hit.startswith(name + "@")][-1]
    assert_recovers(config, last, undisturbed["fingerprint"])


@pytest.mark.exhaustive
def test_kill_at_every_hit(config: dict[str, Any], undisturbed: dict) -> None:
    for hit in undisturbed["hits"]:
        assert_recovers(config, hit, undisturbed["fingerprint"])


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments(config: dict[str, Any], kills: int) -> None:
    """Some steps and a random fraction of a step after each restart, with checkpoints only every third step."""
    rng = random.Random(0)
    config = config | {"max_steps": 6 * kills, "save_steps": 3}
    for kill in range(kills):
        code = run(config, kill_at_line=3 * kill + rng.randint(1, 5), delay_s=rng.uniform(0, 0.1))
        assert code == -signal.SIGKILL
    assert run(config) == 0
    whole = config | {"output_dir": config["output_dir"] + "-whole"}
    assert run(whole) == 0
    assert fingerprint(Path(config["output_dir"])) == fingerprint(Path(whole["output_dir"]))
    assert_clean(Path(config["output_dir"]))
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["void"]["visits"] > 0, "no kill fell into a step: the test proved nothing"


@pytest.mark.parametrize("name", ["checkpoint.weights", "checkpoint.fsync"])
def test_a_full_disk_ends_with_a_cause_and_can_go_on(config: dict[str, Any], undisturbed: dict, name: str) -> None:
    assert run(config, WINNOW_FAILPOINT=f"{name}:enospc") == 1
    assert run(config) == 0
    assert fingerprint(Path(config["output_dir"])) == undisturbed["fingerprint"]


def test_crashes_during_recovery(config: dict[str, Any], undisturbed: dict) -> None:
    for hit in ("publish@3", "take@1", "checkpoint.rename@1"):
        run(config, WINNOW_FAILPOINT=f"{hit}:kill")
    assert run(config) == 0
    assert fingerprint(Path(config["output_dir"])) == undisturbed["fingerprint"]
    assert_clean(Path(config["output_dir"]))
