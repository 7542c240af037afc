"""A threshold that is chosen anew while training: what is chosen, from what, and through the runner and a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow import Trainer
from winnow.config import ConfigError
from winnow.methods.gate import GateContext
from winnow.methods.gate.divergence import Divergence
from winnow.methods.gate.overrides import ALONE, Overrides
from winnow.methods.gate.refit import LEAST, MOST, Refit
from winnow.types import Decision, EnvStep, Token, Verdict

from ..builders.divergence import Walk, digest, view_of
from ..builders.groups import make_group
from ..gates import ask


def refit_of(seen: list[tuple[float, bool, float]], precision: float = 0.8, every: int = 1) -> Refit:
    refit = Refit(0.12, every, precision)
    for value, worthless, survival_p in seen:
        refit.observe(value, worthless, survival_p)
    return refit


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_threshold_that_keeps_to_the_precision(seed: int) -> None:
    """Against all thresholds between the values, tenths: weighted tp / cut is enough, and nothing higher has it."""
    rng = np.random.default_rng(seed)
    seen = [(int(v) / 10, bool(rng.random() > v / 8), float(rng.choice([0.25, 1.0]))) for v in rng.integers(0, 10, 40)]
    refit = refit_of(seen)
    refit.end_step()

    def good(threshold: float) -> bool:
        cut = [(z, 1 / p) for v, z, p in seen if v < threshold]
        return bool(cut) and sum(w for z, w in cut if z) >= 0.8 * sum(w for _, w in cut) - 1e-9

    cuts = {t: sum(v < t for v, *_ in seen) for t in (x / 20 for x in range(21)) if good(t)}
    assert refit.threshold == 0.0 if not cuts else good(refit.threshold)
    assert sum(v < refit.threshold for v, *_ in seen) == max(cuts.values(), default=0)


def test_what_was_cut_counts_through_the_audits() -> None:
    """Under the old threshold one group in ten was seen: four of five were wrong cuts, as the weights alone show."""
    kept = [(0.5, True, 1.0)] * 30
    refit = refit_of([*kept, *[(0.05, False, 0.1)] * 4, (0.05, True, 0.1)])
    refit.end_step()
    assert refit.threshold == 0.0
    unweighted = refit_of([*kept, *[(0.05, False, 1.0)] * 4, (0.05, True, 1.0)])
    unweighted.end_step()
    assert unweighted.threshold > 0.5


def test_only_every_so_many_steps_and_not_from_a_few() -> None:
    refit = refit_of([(0.3, True, 1.0)] * (LEAST - 1), every=3)
    for _ in range(3):
        refit.end_step()
    assert refit.threshold == 0.12, "too few groups"
    refit.observe(0.3, True, 1.0)
    refit.end_step()
    refit.end_step()
    assert refit.threshold == 0.12, "not due"
    refit.end_step()
    assert refit.threshold > 0.3


def test_the_precision_of_what_it_cuts_is_the_one_asked_for() -> None:
    """Over simulated runs in which only every fifth of the groups under the threshold is seen."""
    cut = right = 0
    for seed in range(4):
        rng, refit = np.random.default_rng(seed), Refit(0.12, 10, 0.8)
        for _ in range(200):
            for value in rng.beta(1.2, 2.5, 16).tolist():
                worthless, below = rng.random() < max(0.05, 0.98 - 1.2 * value), value < refit.threshold
                if below and rng.random() > 0.2:
                    cut, right = cut + 1, right + worthless
                else:
                    refit.observe(value, worthless, 0.2 if below else 1.0)
            refit.end_step()
    assert cut > 3000
    assert 0.77 < right / cut < 0.83


def test_memory_is_bounded_and_the_state_is_exact() -> None:
    refit = refit_of([(i / 7 % 1, i % 3 > 0, 1 / (1 + i % 5)) for i in range(MOST + 100)], every=2)
    refit.end_step()
    again = Refit(0.5, 2, 0.8)
    again.load_state_dict(json.loads(json.dumps(refit.state_dict())))
    assert again.metrics() == refit.metrics() == {"threshold": 0.12, "remembered": MOST}
    for one in (refit, again):
        one.observe(0.01, True, 0.3)
        one.end_step()
    assert again.state_dict() == refit.state_dict()
    assert refit.threshold != 0.12


def test_the_gate_learns_from_groups_that_it_saw_and_that_came_to_their_end() -> None:
    gate = Divergence(k=2, refit_every=1, precision=0.5).build(GateContext("divergence"))
    seen = []
    for number, (actions, rewards, audited, pruned) in enumerate(
        [
            ([["a", "b"], ["a", "b"]], [1.0, 1.0], 0.25, [0.5, 1.0]),  # an audit let it on, then a token gate one of it
            ([["a", "b"], ["x", "b"]], [1.0, 0.0], 1.0, [1.0, 1.0]),
            ([["a", "b"], ["x", "b"]], [1.0, None], 1.0, [1.0, 1.0]),  # cut or failed: it tells nothing
        ]
    ):
        view = view_of(actions, 2)
        group = make_group(number, rewards)
        for rollout, p in zip(group.rollouts, pruned, strict=True):
            rollout.decisions.append(Decision("arrol", Token(1), Verdict(True, probability=p)))
        object.__setattr__(view, "visit", group.visit)
        verdict = replace(ask(gate, view), keep=True, probability=audited)
        group.decisions.append(Decision("divergence", EnvStep(2), verdict, 2))
        gate.observe(group)
        seen.append(gate.state_dict()["seen"])
    assert seen[-1] == [[0.0, True, 8.0], [0.5, False, 1.0]]
    gate.observe(make_group(9, [1.0, 0.0]))  # ended before step k: never asked about
    assert gate.state_dict()["seen"] == seen[-1]
    assert gate.metrics()["gate/divergence/threshold"] == 0.12


def test_the_gate_counts_decisions_by_its_own_signals_under_audits() -> None:
    """Audits write chances of their own into the evidence; a group of one member has no signal at all."""
    gate = Divergence(k=2, threshold=0.3, refit_every=1).build(GateContext("divergence"))
    overrides = Overrides("divergence", 0, 0.5)
    halves = [(["a", "b"], ["a", "b"]), (["a", "b"], ["x", "y"]), (["a", "b"], [])]
    cut = 0
    for number, (one, other) in enumerate(halves):
        group = make_group(number, [1.0, 1.0] if other else [1.0])
        view = view_of([one, other], 2, absent=(False, not other))
        object.__setattr__(view, "visit", group.visit)
        verdict = overrides.apply(view, ask(gate, view), [])
        assert ALONE in verdict.evidence
        group.decisions.append(Decision("divergence", EnvStep(2), verdict, 2))
        gate.observe(group)
        cut += verdict.removes
    found = gate.metrics()
    assert {name.rsplit("/")[-1] for name in found} == {
        "threshold",
        "remembered",
        "asked",
        "cut_share",
        "prefix_edit_distance",
    }
    assert (found["gate/divergence/asked"], found["gate/divergence/cut_share"]) == (2.0, cut / 2)
    assert found["gate/divergence/prefix_edit_distance"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refit_every": -1}, r"refit_every\n.*greater than or equal to 0 "),
        ({"precision": 0.9}, "no effect without refit_every"),
        ({"refit_every": 2, "precision": 0}, r"precision\n.*greater than 0 "),
        ({"refit_every": 2, "steps": {3: 0.1}}, "remove steps"),
        ({"refit_every": 2, "termination": 0.9}, "remove termination"),
        ({"refit_every": 2, "progress": 0.1}, "remove progress"),
        ({"refit_every": 2, "per_task_type": {"a": 0}}, "remove per_task_type"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Divergence(**options)


def test_it_needs_audits(tiny_config: dict[str, Any]) -> None:
    gate = {"name": "divergence", "k": 2, "refit_every": 2}
    with pytest.raises(ConfigError, match=r"refit_every needs audits.*audit: \{epsilon: 0.2\}"):
        Trainer(env=Walk(), config=tiny_config | {"gates": [gate], "eval_steps": None})


def test_a_resumed_run_is_the_uninterrupted_one(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its table of groups has the weights of audits, so that `winnow gate` can read it."""
    from winnow.methods.gate import refit
    from winnow.study.gate_tables import read_recorded

    monkeypatch.setattr(refit, "LEAST", 4)
    config = tiny_config | {
        "gates": [{"name": "divergence", "k": 2, "refit_every": 1, "threshold": 0.3}],
        "audit": {"epsilon": 0.4},
        "max_completion_length": 120,
        "eval_steps": None,
    }
    Trainer(env=Walk(), config=config | {"output_dir": str(tmp_path / "whole")}).train()
    Trainer(env=Walk(), config=config | {"output_dir": str(tmp_path / "half"), "max_steps": 2}).train()
    Trainer.resume(tmp_path / "half", {"max_steps": 4}, env=Walk()).train()
    assert digest(tmp_path / "half") == digest(tmp_path / "whole")
    lines, table = {}, {}
    for name in ("half", "whole"):
        text = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in text]
        lines[name] = [x["gate/divergence/threshold"] for x in found if "gate/divergence/threshold" in x]
        table[name] = (tmp_path / name / "gate.jsonl").read_bytes()
    assert lines["half"] == lines["whole"]
    assert lines["whole"][0] == 0.3
    assert len(set(lines["whole"])) > 1, "it was chosen anew"
    assert table["half"] == table["whole"]
    recorded = read_recorded(tmp_path / "whole")
    assert set(recorded[2].weights_N.tolist()) == {1.0, 2.5}
