"""Uploads a run's model to the Hugging Face hub of HF_ENDPOINT.

The token is that of HF_TOKEN or `hf auth login`. It is in no configuration, and is never printed or stored.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..base import __version__
from ..base.errors import ConfigError
from ..base.sanitize import redact
from ..config import RunConfig
from ..config.options import name_of
from ..engine.saving import recast, types_from, types_of
from ..record.proof import SAMPLED
from . import checkpoint
from .resolved import all_methods


class PushError(OSError):
    """A failed upload; the local files are unchanged."""


@dataclass(frozen=True)
class Pushed:
    """Result of an upload."""

    repo: str
    """`namespace/name`."""
    url: str
    """Address of the commit."""
    folder: str


def check_hub(c: RunConfig) -> None:
    """Raise ConfigError if a run could not be uploaded: a bad name, or no token."""
    if not c.push_to_hub:
        return
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(_name(c))
    except HFValidationError as error:
        raise ConfigError(f"hub_model_id: {error}") from None
    if get_token() is None:
        raise ConfigError("push_to_hub: no token; set HF_TOKEN in the environment, or run `hf auth login`")


def push(run_dir: Path, c: RunConfig, folder: Path | None = None) -> Pushed:
    """Upload `folder`; default: the finished `model/`, else that of the last checkpoint.

    Raises PushError with the cause and the command to retry, ConfigError when there is no model yet.
    """
    with ExitStack() as stack:
        if folder is None:
            source, folder = stack.enter_context(checkpoint.newest_model(run_dir))
        else:
            source = folder
        step = _step(folder)
        types = types_from(c.save_dtype)
        try:
            if types and ((source / "adapter_config.json").exists() or types != types_of(source)):
                typed = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="winnow-push-")), "model")
                recast(source, typed, types)
                source = typed
            from huggingface_hub import HfApi

            api = HfApi(library_name="winnow")
            repo = api.create_repo(_name(c), private=c.hub_private_repo, exist_ok=True).repo_id
            # With adapters of an earlier upload left, whole weights would be loaded as a model under adapters.
            stale = ["model*.safetensors", "model.safetensors.index.json"]  # but for those of this upload
            if not (source / "adapter_config.json").exists():
                stale.append("adapter_*")
            done = api.upload_folder(
                folder_path=source,
                repo_id=repo,
                commit_message="Upload of a finished run by Winnow" if step is None else f"Step {step}, by Winnow",
                delete_patterns=stale,
                ignore_patterns=None if step is None else ["README.md"],  # peft writes an unfilled template
            )
        except Exception as error:  # network, hub or disk: the run continues in any case
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PushError(
                f"{folder}: not uploaded as {_name(c)} ({cause}); the files are unchanged, retry with: "
                f"winnow push {run_dir}"
            ) from error
        return Pushed(repo, str(done.commit_url), str(folder))


def push_if_due(run_dir: Path, c: RunConfig, saved: Path | None = None) -> None:
    """Upload the finished run, or checkpoint `saved`; a failure is a warning."""
    if not c.push_to_hub or (saved is not None and c.hub_strategy != "every_save"):
        return
    try:
        push(run_dir, c, None if saved is None else saved / "model")
    except PushError as error:
        warnings.warn(str(error), stacklevel=2)


def _name(c: RunConfig) -> str:
    """Return the repo, as in transformers: the directory's name unless given; without a namespace, the user's."""
    return c.hub_model_id or Path(c.output_dir).absolute().name


def _step(folder: Path) -> int | None:
    """Return the step of a checkpoint's model; None for that of a finished run."""
    prefix, _, number = folder.parent.name.rpartition("-")
    return int(number) if prefix == "step" and number.isdigit() else None


# ---------------------------------------------------------------- model card

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
        (name, totals[name]) for name in (*SAMPLED, "void", "evaluation", "probe") if any(totals.get(name, {}).values())
    ]
    lines = [f"| {fate} | {row['rollouts']:,.0f} | {row['tokens']:,.0f} |" for fate, row in rows]
    return "| fate | rollouts | sampled tokens |\n|---|---|---|\n" + "\n".join(lines)


def _settings(c: RunConfig) -> str:
    """Return the settings that differ from the defaults, except where the run was."""
    changed = c.model_dump(mode="json", exclude_defaults=True, exclude={"output_dir", "report_to", "run_name"})
    text: Any = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    return f"```yaml\n{text}```"
