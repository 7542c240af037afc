"""Model card of a finished run, `model/README.md`: methods, results and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..base import __version__
from ..base.sanitize import redact
from ..config import RunConfig, name_of
from ..types import Fate
from .catalogue import all_methods

SHOWN = ("selector", "group_size", "gates", "filter", "advantage", "correction", "step_scale", "learner", "sync")
"""Fields whose methods the card names."""


def write_card(
    directory: Path, c: RunConfig, totals: Mapping[str, Mapping[str, float]], metrics: Sequence[Mapping[str, float]]
) -> None:
    """Write the card into `directory`, with the metadata a hub reads.

    `totals`: rollouts and tokens by fate, from the ledger. `metrics`: rows of metrics.jsonl.
    """
    base = None if Path(c.model).exists() else c.model
    head = ModelCardData(base_model=base, library_name="transformers", tags=["winnow", "reinforcement-learning"])
    parts = [
        f"# {Path(c.model).name}, trained with Winnow",
        f"{_steps(metrics)} of group-relative reinforcement learning from `{base or Path(c.model).name}` on "
        f"`{name_of(c.env)}`, by Winnow {__version__}.",
        _evaluations(metrics),
        "## Methods",
        "\n".join(_methods(c)),
        "## Where the rollouts went",
        _fates(totals),
        "## The same run again",
        "    winnow train config.yaml",
        "with this `config.yaml`:",
        _settings(c),
    ]
    text = f"---\n{head.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"
    ModelCard(redact(text)).save(directory / "README.md")


def _steps(metrics: Sequence[Mapping[str, float]]) -> str:
    step = int(metrics[-1]["step"]) if metrics else 0
    return "One optimizer step" if step == 1 else f"{step:,} optimizer steps"


def _evaluations(metrics: Sequence[Mapping[str, float]]) -> str:
    """Return a table of the first and the last evaluation; empty without two."""
    rows = [row for row in metrics if "eval/avg@n" in row]
    if len(rows) < 2:
        return ""
    first, last = rows[0], rows[-1]
    names = [name for name in last if name.startswith("eval/pass@") or name == "eval/greedy"] or ["eval/avg@n"]
    lines = [
        f"| {name.removeprefix('eval/')} | {first[name]:.3f} | {last[name]:.3f} |" for name in names if name in first
    ]
    head = f"| held-out | step {int(first['step']):,} | step {int(last['step']):,} |\n|---|---|---|\n"
    return head + "\n".join(lines)


def _methods(c: RunConfig) -> list[str]:
    """Return a line per method, with its paper."""
    known = {(entry["field"], entry["name"]): entry["summary"] for entry in all_methods()}
    lines = []
    for field in SHOWN:
        chosen = getattr(c, field)
        for spec in chosen if isinstance(chosen, list) else [chosen]:
            name = name_of(spec)
            lines.append(f"- `{field}: {name}`" + (f": {known[field, name]}" if (field, name) in known else ""))
    return lines


def _fates(totals: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (fate, totals[fate]) for fate in (*Fate, "void", "evaluation", "probe") if any(totals.get(fate, {}).values())
    ]
    lines = [f"| {fate} | {row['rollouts']:,.0f} | {row['tokens']:,.0f} |" for fate, row in rows]
    return "| fate | rollouts | sampled tokens |\n|---|---|---|\n" + "\n".join(lines)


def _settings(c: RunConfig) -> str:
    """Return the settings that differ from the defaults, except where the run was."""
    changed = c.model_dump(mode="json", exclude_defaults=True, exclude={"output_dir", "report_to", "run_name"})
    text: Any = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    return f"```yaml\n{text}```"
