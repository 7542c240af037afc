"""Tables and curves of the claims: fills in between the marks of `docs/claims.md`, and draws its picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import claims_figures as f
from arms import fill, table
from claims_figures import Interval, Run, Runs

GRESO = ("dapo-fixed", "dapo-adaptive", "dapo", "greso", "greso-exact")
GRESO_4096 = ("dapo-fixed-4096", "greso-4096", "all-4096")
TARGETS = ("greso-target-0", "greso", "greso-target-50", "greso-target-100", "backoff", "dapo")
ACTIVE = ("uniform", "active", "lr-const-2x", "lr-ramp", "active-adaptive-k")
BANDED = ("uniform", "active", "active-band", "active-adaptive-k", "active-adaptive-k-band")
COMPOSED = ("dapo-fixed", "dapo", "greso", "uniform", "active", "active-adaptive-k", "all", "all-two-way")
OBJECTIVES = ("uniform-g8", "max-at-4-g8")
LINES = {
    "GRESO": ("dapo-fixed", "dapo", "dapo-adaptive", "greso"),
    "Active-RLOO": ("uniform", "active", "active-adaptive-k", "lr-const-2x", "lr-ramp"),
    "composed": ("dapo", "uniform", "all", "all-two-way"),
}


def write_figures(
    work: Path, arms: Sequence[str], *, out: Path | None, docs: Path | None, only: Sequence[str] | None = None
) -> None:
    """Write what is there so far; arms without a finished run are not in the tables, and in `out` stay as they are.

    `only`: the tables to replace; then the picture is left alone. KeyError for one that there is not.
    """
    runs, warm = f.read_runs(work, arms)
    if out is not None:
        said = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"runs": {}, "curves": {}}
        plain = {str(seed): {k: v for k, v in found.items() if k != "model"} for seed, found in warm.items()}
        said["warm start"] = said.get("warm start", {}) | plain
        for arm, by_seed in runs.items():
            said["runs"][arm] = [f.summary(run) for run in by_seed.values()]
            said["curves"][arm] = f.curve(by_seed)
        out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    if docs is not None:
        made = tables(runs, warm)
        fill(docs, {name: made[name] for name in only or made})
        if only is None:
            draw(runs, docs.with_suffix(".png"))


def tables(runs: Runs, warm: dict[int, dict[str, float]]) -> dict[str, str]:
    return {
        "greso": _greso(runs, GRESO),
        "greso-4096": _greso(runs, GRESO_4096),
        "targets": _targets(runs),
        "active": _active(runs, ACTIVE),
        "active-band": _active(runs, BANDED),
        "adaptive-k": _adaptive_k(runs),
        "deployment": _deployment(runs, warm),
        "objectives": _objectives(runs),
        "composed": _composed(runs),
    }


def text(value: Interval | None, form: str = "{:.3f}", scale: float = 1.0) -> str:
    return "–" if value is None else value.text(form, scale)


def percent(value: Interval | None) -> str:
    return text(value, "{:.0f}%", 100)


def _reach(runs: Runs, arm: str, base: str, goal: str, share: float, axis: str) -> str:
    if base not in runs or goal not in runs:
        return "–"
    found, reached, n = f.to_level(runs[arm], runs[base], runs[goal], share, axis)
    missed = "" if reached == n else f"; {n - reached} of {n} did not get there"
    return text(found, "{:.2f}") + missed


def _greso(runs: Runs, arms: Sequence[str]) -> str:
    """The first arm is the baseline."""
    rows = []
    base = runs.get(arms[0], {})
    for arm in arms:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(f.over_seeds(mine, f.passed)),
                text(f.difference(mine, base, f.passed), "{:+.3f}") if arm != arms[0] else "",
                text(f.cost_ratio(mine, base, lambda r: r.data.rollouts), "{:.2f}"),
                _reach(runs, arm, arms[0], arms[0], 1.0, "rollouts"),
                _reach(runs, arm, arms[0], arms[0], 0.95, "rollouts"),
                _reach(runs, arm, arms[0], arms[0], 0.95, "tokens"),
                percent(f.over_seeds(mine, lambda r: 1 - f.zero_share(r, 0, 0.1))),
                percent(f.over_seeds(mine, lambda r: 1 - f.zero_share(r, 0.9, 1))),
            ]
        )
    head = ["arm", "seeds", "final pass@1", "difference", "rollouts, all steps", "rollouts to DAPO's final pass@1"]
    head += ["to 95% of it", "tokens to 95% of it", "effective share, first tenth", "last tenth"]
    return table(head, rows)


def _targets(runs: Runs) -> str:
    rows = []
    for arm in TARGETS:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(f.over_seeds(mine, f.passed)),
                text(f.over_seeds(mine, lambda r: r.data.rollouts), "{:.0f}k", 1e-3),
                percent(f.over_seeds(mine, lambda r: f.zero_share(r, 0.5, 1, "frac_zero_easy"))),
                percent(f.over_seeds(mine, lambda r: f.zero_share(r, 0.5, 1, "frac_zero_hard"))),
                text(f.over_seeds(mine, lambda r: r.rows[-1].get("greso/p_easy")), "{:.2f}"),
                text(f.over_seeds(mine, lambda r: r.rows[-1].get("greso/p_hard")), "{:.2f}"),
                text(f.over_seeds(mine, f.swing), "{:.3f}"),
            ]
        )
    head = ["arm", "seeds", "final pass@1", "rollouts", "easy share, second half", "hard share", "p_easy at the end"]
    return table([*head, "p_hard", "swing of the zero-variance share"], rows)


def _active(runs: Runs, arms: Sequence[str]) -> str:
    rows = []
    base = runs.get("uniform", {})
    for arm in arms:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(f.over_seeds(mine, f.passed)),
                text(f.difference(mine, base, f.passed), "{:+.3f}") if arm != "uniform" else "",
                text(f.difference(mine, base, f.mean_passed), "{:+.3f}") if arm != "uniform" else "",
                text(f.cost_ratio(mine, base, lambda r: r.data.rollouts), "{:.2f}"),
                percent(f.over_seeds(mine, lambda r: f.tenth(r, "frac_reward_zero_std", 0))),
                percent(f.over_seeds(mine, lambda r: f.tenth(r, "frac_reward_zero_std", 9))),
                text(f.over_seeds(mine, lambda r: f.tenth(r, "eta_eff", 9)), "{:.1f}e-4", 1e4),
                text(f.over_seeds(mine, lambda r: f.tenth(r, "grad_norm", 9)), "{:.1f}"),
            ]
        )
    head = ["arm", "seeds", "final pass@1", "difference to uniform", "difference, mean over training", "rollouts"]
    return table([*head, "f_zero, first tenth", "last tenth", "eta_eff, last tenth", "gradient norm"], rows)


def _adaptive_k(runs: Runs) -> str:
    rows = []
    for arm in ("active-adaptive-k", "all", "all-two-way"):
        for seed, run in runs.get(arm, {}).items():
            at, shares = f.fired_at(run), f.around_firing(run)
            drop = f"{shares[0]:.0%} -> {shares[1]:.0%}" if shares else "–"
            rows.append([arm, str(seed), "never" if at is None else str(at), drop])
    return table(["arm", "seed", "fired at step", "f_zero in the 20 steps before -> after"], rows)


def _deployment(runs: Runs, warm: dict[int, dict[str, float]]) -> str:
    def row(name: str, found: list[dict[str, float]]) -> list[str]:
        figures = [
            f.interval([d[key] for d in found])
            if key != "ratio"
            else f.interval([d["pass@16"] / d["pass@1"] for d in found])
            for key in ("pass@1", "pass@16", "ratio")
        ]
        return [name, str(len(found)), text(figures[0]), text(figures[1]), text(figures[2], "{:.2f}")]

    rows = [row("warm start", list(warm.values()))] if warm else []
    rows += [row(arm, [run.deployed for run in by_seed.values()]) for arm, by_seed in runs.items()]
    return table(["arm", "seeds", "pass@1", "pass@16", "pass@16 / pass@1"], rows)


def _objectives(runs: Runs) -> str:
    rows = []
    base = runs.get("uniform-g8", {})
    largest = lambda r: r.data.pass_at[max(r.data.pass_at)]  # noqa: E731
    deployed = lambda r: r.deployed["pass@16"]  # noqa: E731
    for arm in OBJECTIVES:
        if arm not in runs:
            continue
        mine, first = runs[arm], arm == OBJECTIVES[0]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(f.over_seeds(mine, f.passed)),
                text(f.over_seeds(mine, largest)),
                "" if first else text(f.difference(mine, base, largest), "{:+.3f}"),
                text(f.over_seeds(mine, deployed)),
                "" if first else text(f.difference(mine, base, deployed), "{:+.3f}"),
            ]
        )
    head = ["arm", "seeds", "pass@1, T = 1", "pass@8, T = 1", "difference", "pass@16, deployment", "difference"]
    return table(head, rows)


def _composed(runs: Runs) -> str:
    rows = []
    for arm in COMPOSED:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(f.over_seeds(mine, f.passed)),
                text(f.over_seeds(mine, lambda r: r.data.tokens), "{:.0f}k", 1e-3),
                _reach(runs, arm, "dapo-fixed", "uniform", 1.0, "tokens"),
                _reach(runs, arm, "dapo", "uniform", 1.0, "tokens"),
                _reach(runs, arm, "dapo-fixed", "dapo-fixed", 0.95, "tokens"),
            ]
        )
    head = [
        "arm",
        "seeds",
        "final pass@1",
        "tokens, all steps",
        "tokens to uniform's final pass@1: of DAPO's, fixed rounds",
    ]
    return table([*head, "of DAPO's with exact refill", "to 95% of DAPO's final pass@1, of DAPO's"], rows)


def draw(runs: Runs, path: Path) -> None:
    """Held-out pass@1 against tokens, and the zero-variance share by step; means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), constrained_layout=True)
    for column, (title, arms) in enumerate(LINES.items()):
        top, bottom = axes[0][column], axes[1][column]
        for arm in (a for a in arms if a in runs):
            mean = f.curve(runs[arm])
            top.plot(np.array(mean["tokens"]) / 1e3, mean["passed"], label=f"{arm} (n={len(runs[arm])})")
            shares = np.mean([f.series(run, "frac_reward_zero_std") for run in _same_length(runs[arm])], axis=0)
            bottom.plot(np.convolve(shares, np.ones(10) / 10, "valid"), label=arm)
        top.set(title=title, xlabel="sampled tokens, thousands", ylabel="held-out pass@1")
        bottom.set(xlabel="step", ylabel="zero-variance share (10-step mean)", ylim=(0, 0.8))
        top.legend(fontsize=8)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def _same_length(by_seed: dict[int, Run]) -> list[Any]:
    shortest = min(len(run.rows) for run in by_seed.values())
    return [Run(run.data, run.rows[:shortest], run.deployed) for run in by_seed.values()]
