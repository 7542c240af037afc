"""Simulated runs: rates and their drift, fates and signal that can be computed by hand, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.config import RunConfig, validate
from winnow.methods.pass_rates import PassRate
from winnow.record.account import Counts
from winnow.record.ledger import Ledger
from winnow.record.proof import FATES
from winnow.run.inputs import build_task
from winnow.study.simulate import Policy, Rewards, _beta, growth_to, policy_of, simulate
from winnow.types import Group, Job, Prompt, Visit

ENV = {"name": "countdown", "train_size": 120, "test_size": 8}


def config(**changes: Any) -> RunConfig:
    values = {
        "model": "m",
        "env": ENV,
        "max_steps": 20,
        "prompts_per_step": 6,
        "num_generations": 4,
        "advantage": "rloo",
    }
    return validate(values | {"max_skipped_steps": 1000} | changes)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A third of the prompts always solved, a third never, a third half of the time; many rollouts each."""
    lines = []
    for number, prompt in enumerate(build_task(ENV).train):
        correct = (0, 500, 1000)[number % 3]
        lines.append(PassRate(prompt.id, 1000, correct, correct / 1000).line())
    (tmp_path / "rates.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "rates.jsonl"


def test_fates_and_signal_are_those_of_the_rates(profile: Path) -> None:
    """A group of 4 at p = 1/2 has a signal 7 times in 8, and squared deviations of 3/4; the others have none."""
    found = simulate(config(max_steps=200), profile, length=5)
    assert found["steps"] == 200
    assert found["visits"] == 1200
    assert found["tokens"] == sum(found["tokens_by_fate"].values()) == 1200 * 4 * 5
    assert found["signal_per_1000_tokens"] == pytest.approx(1000 * 0.75 / 3 / 20, rel=0.1)
    assert found["oracle_per_1000_tokens"] == pytest.approx(1000 * 0.75 / 20, rel=0.01)
    assert found["share_of_oracle"] == pytest.approx(1 / 3, rel=0.1)
    dropped = simulate(config(max_steps=200, filter="zero_variance"), profile, length=5)
    assert dropped["tokens_by_fate"]["trained"] == 1200 * 4 * 5
    share = dropped["tokens_by_fate"]["filtered"] / dropped["tokens"]
    assert share == pytest.approx(1 - 7 / 8 / 3, abs=0.03)


def test_a_selector_learns_and_rollouts_that_are_skipped_cost_nothing(profile: Path) -> None:
    more = {"filter": "zero_variance", "max_steps": 150}
    plain = simulate(config(**more), profile)
    greso = simulate(config(**more, selector="greso"), profile)
    assert greso["tokens"] < 0.8 * plain["tokens"]
    assert greso["visits"] > plain["visits"]
    assert greso["share_of_oracle"] > plain["share_of_oracle"]


def test_reuse_takes_the_place_of_fresh_groups(profile: Path) -> None:
    more = {"filter": "zero_variance", "correction": "truncate", "policy_loss": "plain", "max_steps": 100}
    plain = simulate(config(**more), profile)
    reused = simulate(config(**more, reuse={"updates": 3}), profile)
    assert reused["steps"] == 100
    assert reused["tokens_by_fate"]["trained"] == pytest.approx(plain["tokens_by_fate"]["trained"] / 3, rel=0.05)


def test_rates_rise_together_with_the_groups_that_teach(profile: Path) -> None:
    still, learns = (simulate(config(max_steps=100), profile, growth=growth) for growth in (0.0, 5.0))
    assert still["mean_rate"] == pytest.approx(0.5, abs=0.01)
    assert learns["mean_rate"] > 0.55
    assert simulate(config(seed=3), profile) | {"seconds": 0} == simulate(config(seed=3), profile) | {"seconds": 0}


@pytest.mark.slow
def test_growth_is_fitted_to_where_a_run_ended(profile: Path) -> None:
    c = config(max_steps=100)
    growth = growth_to(c, profile, 0.58)
    assert simulate(c, profile, growth=growth)["mean_rate"] == pytest.approx(0.58, abs=0.005)
    for goal, message in (
        (0.4, "must be below 1 and above the mean rate at the start, 0.5"),
        (1.0, "must be below 1"),
        (float("nan"), "must be below 1"),
        (0.9999999, "too few groups teach"),
    ):
        with pytest.raises(ConfigError, match=f"ends-at: .*{message}"):
            growth_to(c, profile, goal)


def test_few_rollouts_of_a_prompt_say_little_about_it() -> None:
    """Rates are drawn from posteriors: 0 of 4 where most prompts have a half is no rate of 0; with few spread it is."""
    prompts = [Prompt(f"p{i}", i, text="") for i in range(4000)]
    rng = np.random.default_rng(0)
    for true in (np.full(4000, 0.5), rng.beta(0.2, 0.2, 4000)):
        profile = {p.id: PassRate(p.id, 4, int(rng.binomial(4, r)), 0.0) for p, r in zip(prompts, true, strict=True)}
        rates = policy_of(prompts, profile, 0).rates()
        assert rates.mean() == pytest.approx(true.mean(), abs=0.02)
        assert rates.std() == pytest.approx(true.std(), abs=0.04)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_spread_of_true_rates_is_found_at_any_number_of_rollouts(n: int) -> None:
    """Every outcome at its exact frequency: Beta(0.225, 0.525) is worth 0.75 rollouts, whatever n is."""
    a, b = 0.225, 0.525
    frequency = [math.comb(n, k) * math.exp(log_beta(a + k, b + n - k) - log_beta(a, b)) for k in range(n + 1)]
    rates = np.repeat(np.arange(n + 1) / n, np.round(1e6 * np.array(frequency)).astype(int))
    assert _beta(rates.tolist(), [n] * len(rates)) == pytest.approx((a, b), rel=1e-3)


def test_numbers_of_rollouts_may_differ_between_prompts() -> None:
    prompts = [Prompt(f"p{i}", i, text="") for i in range(20_000)]
    rng = np.random.default_rng(0)
    true, counts = rng.beta(0.225, 0.525, 20_000), rng.choice([1, 2, 16], 20_000)
    profile = {
        p.id: PassRate(p.id, int(n), int(rng.binomial(n, r)), 0.0)
        for p, n, r in zip(prompts, counts, true, strict=True)
    }
    rates = policy_of(prompts, profile, 0).rates()
    assert rates.var() == pytest.approx(true.var(), rel=0.03)
    single = {p.id: PassRate(p.id, 1, int(rng.random() < 0.3), 0.0) for p in prompts[:100]}
    with pytest.raises(ConfigError, match="rates: one rollout of each prompt"):
        policy_of(prompts, single, 0)


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def test_the_account_is_that_of_a_ledger(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a run with reuse, audits, probes and carried groups."""
    changes = {
        "filter": "zero_variance",
        "selector": "greso",
        "audit": {"epsilon": 0.3},
        "group_size": {"name": "sequential", "probe": 2, "hard_size": 6},
        "rollout_batch": {"name": "adaptive", "size": 12},
        "max_lag": 1,
        "correction": "truncate",
        "policy_loss": "plain",
        "reuse": {"updates": 2, "audit": 0.5},
    }
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:

        class Both(Counts):
            def visit(self, visits: Any, **at: Any) -> None:
                super().visit(visits, **at)
                ledger.visit(visits, **at)

            def finish(self, group: Group, *, step: int) -> None:
                super().finish(group, step=step)
                ledger.finish(group, step=step)

            def step(self, step: int, **values: Any) -> None:
                ledger.step(step, **values)

            def evaluation(self, *values: Any) -> None:
                ledger.evaluation(*values)

        monkeypatch.setattr("winnow.study.simulate.Counts", Both)
        found = simulate(config(**changes, max_steps=60), profile, length=3)
        ledger.set_meta("max_lag", "1")
        ledger.set_meta("finished", "true")
        proof = ledger.verify()
    assert proof.ok, proof.problems
    booked = {fate: proof.totals[fate] for fate in FATES}
    assert found["visits"] == proof.visits == sum(row["visits"] for row in booked.values())
    assert found["rollouts"] == proof.rollouts
    assert found["tokens_by_fate"] == {fate: row["tokens"] for fate, row in booked.items() if row["tokens"]}
    assert {"trained", "filtered", "surplus"} <= found["tokens_by_fate"].keys()
    assert booked["skipped"]["visits"] > 0
    assert proof.totals["evaluation"]["rollouts"] > 0
    assert proof.rules["greso"]["audited"] > 0


def test_rewards_are_a_function_of_seed_visit_and_sibling() -> None:
    prompts = [Prompt(f"p{i}", i, text="") for i in range(500)]
    policy = Policy(np.zeros(500))
    visits = [Visit(7 * prompt.ordinal, 0, prompt) for prompt in prompts]
    whole = Rewards(policy, 1, 3).run([Job(visit, 8) for visit in visits])
    rewards_VG = np.array([group.rewards() for group in whole])
    assert rewards_VG.mean() == pytest.approx(0.5, abs=0.03)
    assert len(np.unique(rewards_VG, axis=0)) > 200
    for visit, rewards_G in zip(visits[::50], rewards_VG[::50], strict=True):
        parts = [Rewards(policy, 1, 3).run([Job(visit, size, first=first)])[0] for first, size in ((0, 3), (3, 5))]
        assert [r.sibling for part in parts for r in part.rollouts] == list(range(8))
        np.testing.assert_array_equal(np.concatenate([part.rewards() for part in parts]), rewards_G)
    other = Rewards(policy, 1, 4).run([Job(visit, 8) for visit in visits])
    assert np.mean(rewards_VG == [group.rewards() for group in other]) == pytest.approx(0.5, abs=0.05)


def test_a_step_may_want_more_groups_than_there_are_prompts(profile: Path) -> None:
    assert simulate(config(prompts_per_step=130, max_steps=2), profile)["visits"] == 260


def test_epochs_are_as_many_steps_as_in_training(profile: Path) -> None:
    by_epochs = validate({**config().model_dump(exclude={"max_steps"}), "num_train_epochs": 1})
    assert simulate(by_epochs, profile)["steps"] == 20


def test_what_it_cannot_simulate_is_refused(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gates: they decide by tokens"):
        simulate(config(gates=["arrol"]), profile)
    for remax in ("remax", {"name": "remax"}):
        with pytest.raises(ConfigError, match="advantage: remax needs a greedy rollout"):
            simulate(config(advantage=remax), profile)
    refreshed = {"name": "pass_rate", "profile": str(profile), "refresh_steps": 5}
    with pytest.raises(ConfigError, match="selector: it asks for new pass rates"):
        simulate(config(selector=refreshed), profile)
    (tmp_path / "other.jsonl").write_text(PassRate("other", 4, 2, 0.5).line() + "\n")
    with pytest.raises(ConfigError, match="rates: the profile has none of the task's training prompts"):
        simulate(config(), tmp_path / "other.jsonl")


def test_the_command(profile: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps({"model": "m", "env": ENV, "max_steps": 3, "prompts_per_step": 4}))
    asked = ["simulate", str(tmp_path / "c.yaml"), "filter=zero_variance", "--rates", str(profile), "--length", "7"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert found["tokens"] == 7 * found["rollouts"]
    assert "share_of_oracle" in CliRunner().invoke(app, asked).stdout
