"""Figures of `winnow gate`: PNG, SVG or PDF, by the file name, which `check` has checked.

Colours are Okabe and Ito's, safe for colour blindness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from ..base.install import install
from .gate_calibration import Calibration
from .gate_effect import SweepRow
from .gate_tables import Correlation, Groups

ENDINGS = (".png", ".svg", ".pdf")
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9")
MARKS = "os^Dv"


def check(path: Path) -> None:
    """Check the file name before any computation. Raises ConfigError."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--picture {path}: a picture's name ends in {', '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: its folder does not exist; make it first")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(f"--picture needs matplotlib; {install('gate')}") from None


@contextmanager
def _figure(path: Path, width: float, height: float, **options: Any) -> Iterator[Any]:
    """Yield the axes of a figure of that size in inches, then write it. Needs no screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(**options)
    yield axes
    for ax in np.ravel(axes):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def heat_map(rows: Sequence[SweepRow], path: Path) -> None:
    """Draw step by threshold: the saving of right cuts (colour, upper number) and the share of right cuts (lower)."""
    ks, thresholds = sorted({r.k for r in rows}), sorted({r.threshold for r in rows})
    at = {(r.k, r.threshold): r for r in rows}
    safe = np.array([[at[k, t].safe_pct for t in thresholds] for k in ks])
    with _figure(path, 2.6 + 0.85 * len(thresholds), 1.7 + 0.7 * len(ks)) as ax:
        image = ax.imshow(safe, cmap="cividis", vmin=0, aspect="auto", origin="lower")
        for y, k in enumerate(ks):
            for x, t in enumerate(thresholds):
                right = at[k, t].precision
                text = f"{safe[y, x]:.1f}%\n" + ("no cuts" if right is None else f"{right:.0%} right")
                dark = safe[y, x] < 0.55 * max(safe.max(), 1e-9)
                ax.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        ax.set_xticks(range(len(thresholds)), [f"{t:g}" for t in thresholds])
        ax.set_yticks(range(len(ks)), [str(k) for k in ks])
        ax.set_xlabel(f"threshold of {rows[0].signal}: cut below it")
        ax.set_ylabel("environment step K")
        ax.set_title(f"what cuts would save, {rows[0].groups:g} groups", fontsize=10)
        ax.figure.colorbar(image, label="safe saving, % of all steps")


def separation(recorded: Groups, rows: Sequence[Correlation], path: Path) -> None:
    """Draw how well signals separate groups, and the values of the best one."""
    known = [r for r in rows if r.auroc is not None]
    if not known:
        raise ConfigError("there is nothing to draw: no step has both groups with variance and groups without")
    best = max(known, key=lambda r: r.auroc or 0)
    names = list(dict.fromkeys(r.signal for r in rows))
    with _figure(path, 11, 4.2, ncols=3, width_ratios=(1, 1, 1.25)) as (left, middle, right):
        for ax, key, even in ((left, "auroc", 0.5), (middle, "spearman_rho", 0.0)):
            for i, k in enumerate(recorded):
                points = [(getattr(r, key), names.index(r.signal)) for r in rows if r.k == k]
                drawn = [(value, y + 0.12 * (i - (len(recorded) - 1) / 2)) for value, y in points if value is not None]
                look = {"color": COLOURS[i % 5], "marker": MARKS[i % 5], "label": f"K = {k}"}
                ax.scatter(*zip(*drawn, strict=True), **look)
            ax.axvline(even, color=GREY, linewidth=1, linestyle="--")
            ax.set_yticks(range(len(names)), names if ax is left else [""] * len(names))
            ax.invert_yaxis()
            ax.grid(axis="x", alpha=0.3)
        left.set_xlabel("AUROC for non-zero variance\n(0.5: knows nothing)")
        middle.set_xlabel("Spearman's rho with reward variance\n(0: knows nothing)")
        middle.legend(fontsize=8)
        at = recorded[best.k]
        value_N, bins = at.signals[best.signal], np.linspace(0, 1, 21)
        kinds = (at.zero_N, ~at.zero_N)
        right.hist(
            [value_N[which_N] for which_N in kinds],
            bins,
            weights=[at.weights_N[which_N] for which_N in kinds],
            color=[ORANGE, BLUE],
            label=[f"{name} ({at.count(n):g})" for name, n in zip(("zero variance", "mixed"), kinds, strict=True)],
        )
        right.set_xlabel(f"{best.signal} at K = {best.k}")
        right.set_ylabel("groups")
        right.set_title("the signal of the highest AUROC", fontsize=10)
        right.legend(fontsize=8)


def pareto(found: Calibration, tried: Mapping[int, np.ndarray], path: Path) -> None:
    """Draw precision against saving of every gate tried, the chosen one, and its controls.

    `tried`: K -> weight cut, weight rightly cut and share of all steps saved, [3, M].
    """
    with _figure(path, 7.2, 4.8) as ax:
        for i, (k, (cut_M, tp_M, saved_M)) in enumerate(tried.items()):
            look = {"color": COLOURS[i % 5], "marker": MARKS[i % 5], "label": f"tried, K = {k}"}
            ax.plot(100 * saved_M, tp_M / cut_M, linestyle="", markersize=3, alpha=0.35, **look)
        measured = found.chosen.measured_pct is not None
        arms = (("chosen", found.chosen, "*", RED, 16), ("as many at random", found.random, "X", "black", 9))
        for name, row, mark, colour, size in (*arms, ("oracle", found.oracle, "P", GREEN, 10)):
            if row is not None and row.precision is not None:
                ax.plot(
                    row.saved_pct,
                    row.precision,
                    mark,
                    color=colour,
                    markersize=size,
                    markeredgecolor="white",
                    label=name,
                )
        held = found.held_out.precision
        if held is not None:
            ax.axhline(held, color=RED, linewidth=1, linestyle=":", label=f"precision held out: {held:.2f}")
        ax.set_xlabel(f"saved, % of all environment steps ({'measured' if measured else 'raw'})")
        ax.set_ylabel("precision: share of the cuts that are right")
        ax.set_ylim(-0.02, 1.04)
        ax.set_xlim(left=0)
        ax.set_title(f"{found.plan} ({found.bound})", fontsize=10)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
