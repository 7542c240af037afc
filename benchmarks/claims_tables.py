"""Tables and curves of the claims: fills in between the marks of `docs/claims.md`, and draws its picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import claims_figures as f
import summaries as sm
from arms import fill, table
from claims_figures import Interval
from summaries import Figures, Summary

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
    """Write what is there so far. Arms without a finished run in `work` are as they were in `out`, or left out.

    `only`: the tables to replace; then the picture is left alone. KeyError for one that there is not.
    """
    found, warm = f.read_runs(work, arms)
    said = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    plain = {str(seed): {k: v for k, v in deployed.items() if k != "model"} for seed, deployed in warm.items()}
    said["warm start"] = said.get("warm start", {}) | plain
    new = {arm: [f.summary(run) for run in by_seed.values()] for arm, by_seed in found.items()}
    said["runs"] = sm.merged(said.get("runs", {}), new, arms)
    if out is not None:
        out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    if docs is not None:
        made = tables(said["runs"], said["warm start"])
        fill(docs, {name: made[name] for name in only or made})
        if only is None:
            draw(said["runs"], docs.with_suffix(".png"))


def tables(runs: Figures, warm: dict[str, dict[str, float]]) -> dict[str, str]:
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


def _passed(run: Summary) -> float:
    """Held-out pass@1 at the end, at the training temperature."""
    return float(run["pass@1"])


def _reach(runs: Figures, arm: str, base: str, goal: str, share: float, axis: str) -> str:
    if base not in runs or goal not in runs:
        return "–"
    found, reached, n = sm.to_level(runs[arm], runs[base], runs[goal], share, axis)
    missed = "" if reached == n else f"; {n - reached} of {n} did not get there"
    return text(found, "{:.2f}") + missed


def _greso(runs: Figures, arms: Sequence[str]) -> str:
    """The first arm is the baseline."""
    rows = []
    base = runs.get(arms[0], [])
    for arm in arms:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(sm.over_seeds(mine, _passed)),
                text(sm.difference(mine, base, _passed), "{:+.3f}") if arm != arms[0] else "",
                text(sm.ratio(mine, base, lambda r: r["rollouts"]), "{:.2f}"),
                _reach(runs, arm, arms[0], arms[0], 1.0, "rollouts"),
                _reach(runs, arm, arms[0], arms[0], 0.95, "rollouts"),
                _reach(runs, arm, arms[0], arms[0], 0.95, "tokens"),
                percent(sm.over_seeds(mine, lambda r: 1 - r["zero_variance_by_tenth"][0])),
                percent(sm.over_seeds(mine, lambda r: 1 - r["zero_variance_by_tenth"][-1])),
            ]
        )
    head = ["arm", "seeds", "final pass@1", "difference", "rollouts, all steps", "rollouts to DAPO's final pass@1"]
    head += ["to 95% of it", "tokens to 95% of it", "effective share, first tenth", "last tenth"]
    return table(head, rows)


def _targets(runs: Figures) -> str:
    rows = []
    for arm in TARGETS:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(sm.over_seeds(mine, _passed)),
                text(sm.over_seeds(mine, lambda r: r["rollouts"]), "{:.0f}k", 1e-3),
                percent(sm.over_seeds(mine, lambda r: r["easy"])),
                percent(sm.over_seeds(mine, lambda r: r["hard"])),
                text(sm.over_seeds(mine, lambda r: r.get("p_easy")), "{:.2f}"),
                text(sm.over_seeds(mine, lambda r: r.get("p_hard")), "{:.2f}"),
                text(sm.over_seeds(mine, lambda r: r["swing"]), "{:.3f}"),
            ]
        )
    head = ["arm", "seeds", "final pass@1", "rollouts", "easy share, second half", "hard share", "p_easy at the end"]
    return table([*head, "p_hard", "swing of the zero-variance share"], rows)


def _active(runs: Figures, arms: Sequence[str]) -> str:
    rows = []
    base = runs.get("uniform", [])
    for arm in arms:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(sm.over_seeds(mine, _passed)),
                text(sm.difference(mine, base, _passed), "{:+.3f}") if arm != "uniform" else "",
                text(sm.difference(mine, base, lambda r: r["mean_pass@1"]), "{:+.3f}") if arm != "uniform" else "",
                text(sm.ratio(mine, base, lambda r: r["rollouts"]), "{:.2f}"),
                percent(sm.over_seeds(mine, lambda r: r["zero_variance_by_tenth"][0])),
                percent(sm.over_seeds(mine, lambda r: r["zero_variance_by_tenth"][-1])),
                text(sm.over_seeds(mine, lambda r: r["eta_eff_by_tenth"][-1]), "{:.1f}e-4", 1e4),
                text(sm.over_seeds(mine, lambda r: r.get("grad_norm_by_tenth", [None])[-1]), "{:.1f}"),
            ]
        )
    head = ["arm", "seeds", "final pass@1", "difference to uniform", "difference, mean over training", "rollouts"]
    return table([*head, "f_zero, first tenth", "last tenth", "eta_eff, last tenth", "gradient norm"], rows)


def _adaptive_k(runs: Figures) -> str:
    rows = []
    for arm in ("active-adaptive-k", "all", "all-two-way"):
        for run in runs.get(arm, []):
            at, shares = run["size_rose_at_step"], run.get("zero_variance_around")
            drop = f"{shares[0]:.0%} -> {shares[1]:.0%}" if shares else "–"
            rows.append([arm, str(run["seed"]), "never" if at is None else str(at), drop])
    return table(["arm", "seed", "fired at step", "f_zero in the 20 steps before -> after"], rows)


def _deployment(runs: Figures, warm: dict[str, dict[str, float]]) -> str:
    def row(name: str, found: list[dict[str, float]]) -> list[str]:
        figures = [
            f.interval([d[key] for d in found])
            if key != "ratio"
            else f.interval([d["pass@16"] / d["pass@1"] for d in found])
            for key in ("pass@1", "pass@16", "ratio")
        ]
        return [name, str(len(found)), text(figures[0]), text(figures[1]), text(figures[2], "{:.2f}")]

    rows = [row("warm start", list(warm.values()))] if warm else []
    rows += [row(arm, [run["deployed"] for run in found]) for arm, found in runs.items()]
    return table(["arm", "seeds", "pass@1", "pass@16", "pass@16 / pass@1"], rows)


def _objectives(runs: Figures) -> str:
    rows = []
    base = runs.get("uniform-g8", [])
    largest = lambda r: r["pass_at"][max(r["pass_at"], key=int)]  # noqa: E731
    deployed = lambda r: r["deployed"]["pass@16"]  # noqa: E731
    for arm in OBJECTIVES:
        if arm not in runs:
            continue
        mine, first = runs[arm], arm == OBJECTIVES[0]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(sm.over_seeds(mine, _passed)),
                text(sm.over_seeds(mine, largest)),
                "" if first else text(sm.difference(mine, base, largest), "{:+.3f}"),
                text(sm.over_seeds(mine, deployed)),
                "" if first else text(sm.difference(mine, base, deployed), "{:+.3f}"),
            ]
        )
    head = ["arm", "seeds", "pass@1, T = 1", "pass@8, T = 1", "difference", "pass@16, deployment", "difference"]
    return table(head, rows)


def _composed(runs: Figures) -> str:
    rows = []
    for arm in COMPOSED:
        if arm not in runs:
            continue
        mine = runs[arm]
        rows.append(
            [
                arm,
                str(len(mine)),
                text(sm.over_seeds(mine, _passed)),
                text(sm.over_seeds(mine, lambda r: r["tokens"]), "{:.0f}k", 1e-3),
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


def draw(runs: Figures, path: Path) -> None:
    """Held-out pass@1 against tokens, and the zero-variance share by step; means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), constrained_layout=True)
    for column, (title, arms) in enumerate(LINES.items()):
        top, bottom = axes[0][column], axes[1][column]
        for arm in (a for a in arms if a in runs):
            _, tokens, _, passed = sm.mean_curve(runs[arm]).T
            top.plot(tokens / 1e3, passed, label=f"{arm} (n={len(runs[arm])})")
            shares = np.mean([run["zero_variance_by_tenth"] for run in runs[arm]], axis=0)
            bottom.plot(np.arange(5, 100, 10), shares, marker="o", ms=3, label=arm)
        top.set(title=title, xlabel="sampled tokens, thousands", ylabel="held-out pass@1")
        bottom.set(xlabel="% of the steps", ylabel="zero-variance share (means of tenths)", ylim=(0, 0.8))
        top.legend(fontsize=8)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)
