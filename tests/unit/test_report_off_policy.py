"""The section of the page about stale tokens: when it is shown, and what it marks."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from winnow.methods.lag_bands import LAG_BANDS
from winnow.sampler.handle import SamplerHandle, Stage

from ..builders.pages import card, make_run, page
from ..builders.runs import metrics_of

ASSETS = Path(__file__).parents[2] / "src/winnow/study/assets"


def off_policy_run(path: Path, *, steps: int = 200, collapse_at: int | None = None, max_lag: int = 8) -> Path:
    """The course of a run under lag; from `collapse_at` on ESS, KL, gradients and then the reward go wrong."""
    run, draw = make_run(path, steps=steps), random.Random(1)
    rows = metrics_of(run)
    for row in rows:
        step = row["step"]
        late = 0.0 if collapse_at is None or step < collapse_at else min(1.0, (step - collapse_at) / 20)
        lag = min(step, max_lag)
        shares = [draw.random() * (bottom <= lag) for bottom in LAG_BANDS.values()]
        row |= {f"lag/{name}": share / sum(shares) for name, share in zip(LAG_BANDS, shares, strict=True)}
        row |= {"lag/mean": 0.6 * lag, "lag/max": float(lag)}
        sigma = (0.15 * lag / 8 + 0.02) * (1 + 0.2 * draw.random()) + 2.5 * late
        ess = min(1.0, 0.97 - 0.25 * sigma) * (1 - 0.9 * late) + 0.02 * draw.random()
        row |= {"ess_ratio": ess, "sampling/kl": sigma**2 / 50, "correction/clipped_share": min(1.0, 0.05 * sigma)}
        row |= {"sampling/log_ratio/p05": -2 * sigma, "sampling/log_ratio/p50": -0.3 * sigma}
        row |= {"sampling/log_ratio/p95": 1.5 * sigma, "sampling/log_ratio/max": 3 * sigma}
        row |= {"idle/sampler": 0.02 + 0.02 * draw.random(), "idle/learner": 0.2 + 0.05 * draw.random()}
        row |= {"throughput/tokens_per_s": 20_000.0 + draw.gauss(0, 500)}
        for name, size in (("mean", 0.01), ("max", 1.0)):
            row[f"sampling/sampling_logp_difference/{name}"] = size * sigma
        row |= {f"sampling/importance_sampling_ratio/{k}": 2.718 ** (s * sigma) for k, s in (("min", -1), ("max", 1))}
        row["grad_norm"] *= 1 + 60 * late
        row["reward"] *= 1 - 0.95 * late
        row["effective_learning_rate"] = row["learning_rate"] * ess**0.5
        if "eval/pass@1" in row:
            row["eval/pass@1"] *= 1 - 0.95 * late
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def shown(run: Path) -> Any:
    return page(run).data["runs"][0]["offPolicy"]


def test_a_collapse_is_marked_in_words_and_in_the_charts(tmp_path: Path) -> None:
    whole = page(off_policy_run(tmp_path / "run", collapse_at=120))
    assert card(whole, "Effective sample size") | {"note": ""} == {
        "label": "Effective sample size",
        "value": "94% → 4%",
        "note": "",
        "state": "bad",
    }
    found = whole.data["runs"][0]["offPolicy"]
    ess, fall = found
    assert 120 < ess["step"] < fall["step"] < 150
    assert ess["num_tokens"] == ess["step"] * 256 * 15
    assert ess["seconds_total"] == pytest.approx(ess["step"] * 0.44)
    n, step = re.findall(r"for (\d+) updates, from step (\d+)", ess["text"])[0]
    assert int(step) == ess["step"]
    assert int(n) == 200 - ess["step"] + 1
    assert fall["text"] == f"From step {fall['step']:.0f} on the reward was under half of its best."


def test_a_healthy_run_under_lag_has_the_section_and_no_marks(tmp_path: Path) -> None:
    whole = page(off_policy_run(tmp_path / "run"))
    assert whole.data["runs"][0]["offPolicy"] == []
    assert card(whole, "Effective sample size")["state"] == ""


def test_a_synchronous_run_has_no_such_section(tmp_path: Path) -> None:
    assert shown(make_run(tmp_path / "run")) is None
    run = make_run(tmp_path / "lag0")
    rows = [json.loads(line) | {"ess_ratio": 0.99, "lag/max": 0.0} for line in (run / "metrics.jsonl").open()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert shown(run) is None


def test_hostile_metrics_of_it_stay_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8)
    hostile = {"ess_ratio": -1e300, "lag/max": 1e308, "reward": -1e308, "sampling/kl": -5.0, "lag/0": 1e300}
    rows = [json.loads(line) | hostile for line in (run / "metrics.jsonl").open()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [mark["text"][:25] for mark in shown(run)] == ["The effective sample size"]


def test_the_charts_draw_the_bands_that_are_written() -> None:
    source = (ASSETS / "off_policy.js").read_text()
    assert json.dumps(list(LAG_BANDS)) in source
    assert not [w for w in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(") if w in source]


class NoChannel:
    def send(self, content: dict[str, Any]) -> None: ...

    def kill(self) -> str:
        return ""


def test_samplers_and_ranks_have_charts_of_their_own() -> None:
    """The names that the page looks for are those that are logged."""
    source = (ASSETS / "workers.js").read_text()
    counts = {"memory_mib": 1.0, "gpu_memory_gib": 1.0}
    member = SamplerHandle(0, NoChannel(), stage=Stage.PLACED, memory=counts)
    member.window.spent.update({"seconds": 1, "idle_s": 0, "tokens": 1})
    for name in member.metrics():
        assert f'["sampler", "{name.rpartition("/")[2]}"' in source
    assert '["rank", "memory_mib"' in source
    assert '["rank", "gpu_memory_gib"' in source
