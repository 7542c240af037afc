"""Plot of `winnow gate`: precision against saving. PNG, SVG or PDF, by the file name."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ConfigError
from ..base.machine import install
from .gate_sweep import Sweep, Swept

ENDINGS = (".png", ".svg", ".pdf")
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
"""Okabe and Ito's colours, safe for colour blindness."""
LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PINK, "D"), (SKY, "v"))


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


def plot(swept: Swept, sweep: Sweep, path: Path) -> None:
    """Draw the rows of a sweep by step, with the chosen gate, its controls and the held-out effect."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")  # needs no screen
    ax = figure.subplots()
    for i, k in enumerate(sorted({row.k for row in swept.rows})):
        points = [(row.effect.saved_pct, row.effect.precision) for row in swept.rows if row.k == k]
        cutting = [(x, y) for x, y in points if y is not None]
        x, y = [x for x, _ in cutting], [y for _, y in cutting]
        colour, mark = LOOKS[i % len(LOOKS)]
        ax.plot(x, y, mark, color=colour, markersize=5, alpha=0.6, label=f"K = {k}")
    special = (
        ("chosen", swept.effect, "*", "#D55E00"),
        ("chosen, held out", swept.held_out, "X", "#D55E00"),
        ("as many at random", swept.at_random, "X", "black"),
        ("oracle", swept.oracle, "P", GREEN),
    )
    for name, effect, mark, colour in special:
        if effect is not None and effect.precision is not None:
            ax.plot(effect.saved_pct, effect.precision, mark, color=colour, markersize=12, label=name)
    measured = swept.held_out.measured_pct is not None
    ax.set_xlabel(f"saved, % of all environment steps ({'measured' if measured else 'raw'})")
    ax.set_ylabel("precision: share of the cuts that are right")
    ax.set_ylim(-0.02, 1.04)
    ax.set_xlim(left=0)
    ax.set_title(f"{swept.chosen or 'no gate'} (precision >= {sweep.precision:g})", fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
