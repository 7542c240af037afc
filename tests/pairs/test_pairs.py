"""Every pair of settings is refused at the start by name, or runs, survives a kill and adds up. There is no third case.

`make test` takes a sample, with every method in it at once; all pairs are slow. `pytest -s` shows the totals.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sqlite3
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from winnow import ConfigError, Trainer
from winnow.engine.local import beginnings
from winnow.methods.filter import FILTERS
from winnow.rollout import answers, gate_rules
from winnow.run.resolved import TABLES

from ..builders.runs import fingerprint
from ..faults.harness import run as run_in_child
from .compose import PROCESSES, Acceptance, Chosen, compose, covering, in_processes, make_place, pairs, tuples
from .harness import STEPS, Outcome, Place, check, check_sharing, examine
from .reading import Reading
from .variants import OPTIONS, Settings, Variant, together, variants
from .world import World

HEAD = {"name": "arrol", "at": 2, "cold_start": 1}
CUT = {"name": "divergence", "k": 1, "threshold": 0.6}
READS = f"{Reading.__module__}:{Reading.__name__}"
EVERYTHING: Settings = {
    "selector": {"name": "greso", "p_easy": 0.2, "p_hard": 0.2},
    "filter": "zero_variance",
    "rollout_batch": "adaptive",
    "group_size": {"name": "adaptive_k", "window": 1, "tau": 0.1, "high": 6},
    "gates": [HEAD, CUT],
    "audit": {"epsilon": 0.2},
    "max_lag": 2,
    "sync": {"name": "in_process", "lag": "mixed"},
    "policy_loss": "plain",
    "loss_type": "grpo",
    "advantage": "opob",
    "correction": "truncate",
    "step_scale": {"name": "ess", "reference": "measured"},
}
"""GRESO, DAPO, Adaptive-K, ARRoL, divergence, lag, VCPO, audit and carried groups in one run."""
CHANGES: dict[str, Settings] = {
    "everything": {},
    "other order of gates": {"gates": [CUT, HEAD], "max_lag": 1, "sync": "in_process"},
    "three gates and adapters": {"gates": [HEAD, CUT, {"name": "random", "k": 2}], "lora": {"r": 2}},
    "clipped": {"policy_loss": "clip", "advantage": "grpo", "correction": "m2po", "num_iterations": 2, "beta": 0.05},
    "steered": {
        "audit": {"epsilon": 0.5, "max_signal_loss": 0.5},
        "advantage": {"name": "max_at_k", "k": 2},
    },
    "progress": {
        "gates": [HEAD, CUT | {"progress": 0.3}],
        "advantage": "otb",
        "tokens_per_microbatch": 40,
        "mask_truncated_completions": True,
    },
    "continuous": {
        "sync": {"name": "in_process", "lag": "continuous", "overlap": True},
        "rollout_batch": "exact",
        "save_steps": 2,
    },
    "profiled": {"selector": {"name": "pass_rate", "refresh_steps": 1, "n": 2, "low": 0.0}, "eval_steps": 1},
}
MUST_ACT = ("trained", "filtered", "failed", "pruned", "cut", "surplus", "skipped", "audited", "late")
"""What has to have happened in the compositions of everything: else they would prove nothing."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, place: Place) -> Iterator[None]:
    """No waiting for the disk, which no kill of a process needs; an empty place."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    place.clear()
    yield
    place.clear()


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    yield counted
    print(f"\ncompositions: {json.dumps(dict(sorted(counted.items())))}")


def count(totals: Counter[str], outcome: Outcome) -> None:
    totals["compositions refused" if outcome.refused else "compositions run, killed and resumed"] += 1
    totals.update({f"rollouts {fate}": n for fate, n in outcome.fates.items()})


def run_all(place: Place, totals: Counter[str], compositions: list[Chosen]) -> None:
    for chosen in compositions:
        count(totals, compose(place, chosen))
        place.clear()


def test_every_setting_alone_is_accepted(place: Place) -> None:
    """Otherwise all of its pairs would be refused, and the sweep would prove nothing of it."""
    accepts = Acceptance(place)
    for variant in variants():
        if not in_processes(variant) and (refused := accepts.refused(variant)):
            pytest.fail(
                f"{variant}: {refused}. Add what it needs to OPTIONS, VALUES or NEEDS in tests/pairs/variants.py"
            )


def test_a_sample_of_pairs(place: Place, totals: Counter[str]) -> None:
    run_all(place, totals, random.Random(0).sample(pairs(), 8))


def test_a_sample_of_larger_compositions(place: Place, totals: Counter[str]) -> None:
    run_all(place, totals, tuples(size=4, count=3, seed=0))


@pytest.mark.slow
def test_compositions_of_everything(place: Place, totals: Counter[str]) -> None:
    fates: Counter[str] = Counter()
    for i, (name, changes) in enumerate(CHANGES.items()):
        outcome = check(place, EVERYTHING | changes, kill_after=1 + i % (STEPS - 1))
        assert not outcome.refused, f"{name}: {outcome.refused}"
        count(totals, outcome)
        fates += outcome.fates
        place.clear()
    assert not [fate for fate in MUST_ACT if not fates[fate]], fates


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_rollouts_that_share_places_and_run_out(
    place: Place, totals: Counter[str], monkeypatch: pytest.MonkeyPatch, changes: Settings
) -> None:
    monkeypatch.setattr(answers, "PATIENCE_S", 0.1)
    for module in (answers, gate_rules):
        monkeypatch.setattr(module, "STUCK_S", 0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* no sibling came to environment step")
        outcome = check_sharing(place, EVERYTHING | changes)
    assert outcome.fates["trained"]
    assert outcome.updates
    count(totals, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "three gates and adapters", "continuous"])
def test_prompts_that_begin_alike(
    place: Place, totals: Counter[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What they share goes through the model once, survives kills, and changes no rollout."""
    served: Counter[int] = Counter()
    read = beginnings.Beginnings.read

    def counted(self: Any, prompts: Any) -> Any:
        found = read(self, prompts)
        served[self._least] += len(found[0])
        return found

    monkeypatch.setattr(beginnings.Beginnings, "read", counted)
    found = []
    for least in (1, 1_000_000):
        monkeypatch.setitem(beginnings.SAVED_TOKENS, "cpu", least)
        outcome = check(place, EVERYTHING | CHANGES[name] | {"speculative": True}, kill_after=1, alike=True)
        count(totals, outcome)
        with sqlite3.connect(place.folder / "whole" / "ledger.sqlite") as db:
            rows = db.execute("SELECT visit, sibling, step, fate, tokens, reward FROM rollouts WHERE void = 0")
            found.append(sorted(rows.fetchall()))
        place.clear()
    assert served[1]
    assert not served[1_000_000]
    assert found[0] == found[1]


def test_what_only_watches_changes_nothing(place: Place) -> None:
    """Evaluations, records and checkpoints leave rollouts and weights as they are."""
    found = []
    for watching in ({}, {"eval_steps": 1, "eval_prompts": 2, "log_completions": 0, "save_steps": STEPS}):
        config = place.config(EVERYTHING | watching)
        Trainer(config=config, env=World()).train()
        run = Path(config["output_dir"])
        with sqlite3.connect(run / "ledger.sqlite") as db:
            rows = db.execute("SELECT visit, sibling, step, fate, reason, tokens, reward, survival_p FROM rollouts")
            found.append((sorted(rows.fetchall()), fingerprint(run)["weights"]))
        place.clear()
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_every_pair(place: Place, totals: Counter[str]) -> None:
    """Refused by name, or run in the company of others: so every pair takes hundreds of runs instead of thousands."""
    accepts = Acceptance(place)
    refused = [pair for pair in pairs() if accepts.refused(*pair)]
    totals.update({"pairs refused": len(refused), "pairs accepted": len(pairs()) - len(refused)})
    run_all(place, totals, covering(accepts, size=5, seed=0))


def in_children(place: Place, settings: Settings) -> None:
    """Killed after a step, resumed, and examined; with samplers of their own no two runs are alike."""
    config = place.config(settings | PROCESSES)
    assert run_in_child(config, kill_at_line=1) in (-signal.SIGKILL, 0)
    assert run_in_child(config) == 0
    examine(Path(config["output_dir"]), config)


@pytest.mark.slow
def test_a_composition_with_sampler_processes(place: Place) -> None:
    there = ("selector", "filter", "group_size", "policy_loss", "advantage", "correction", "step_scale")
    in_children(place, {key: EVERYTHING[key] for key in there} | {"gates": [HEAD, READS], "audit": {"epsilon": 0.3}})


@pytest.mark.exhaustive
@pytest.mark.parametrize("chosen", random.Random(0).sample(pairs(), 30), ids=str)
def test_pairs_with_sampler_processes(place: Place, chosen: tuple[Variant, ...]) -> None:
    settings, refused = together(*chosen), ""
    try:
        Trainer(config=place.config(settings | PROCESSES))
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert any(key in refused for key in PROCESSES | settings), refused
        return
    in_children(place, settings)


def test_a_method_without_a_value_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class AtLeast:
        """A filter that somebody adds."""

        least: float
        strict: bool = False

    monkeypatch.setitem(TABLES, "filter", {**FILTERS, "at_least": AtLeast})
    with pytest.raises(LookupError, match=r"at_least requires \['least'\]: add values for them to OPTIONS"):
        variants()
    monkeypatch.setitem(OPTIONS, ("filter", "at_least"), {"least": 0.5})
    names = [variant.name for variant in variants()]
    assert {"filter=at_least", "filter=at_least(strict:True)"} <= set(names)
