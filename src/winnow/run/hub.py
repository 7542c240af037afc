"""Uploads a run's model to the Hugging Face hub of HF_ENDPOINT.

The token is that of HF_TOKEN or `hf auth login`. It is in no configuration, and is never printed or stored.
"""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..config import ConfigError, RunConfig
from ..engine.saving import recast, types_from
from . import checkpoint


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
        if step is not None and c.save_dtype != "auto":  # checkpoints are float32
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="winnow-push-"))
            typed = Path(temporary, "model")
            recast(source, typed, types_from(c.save_dtype))
            source = typed
        try:
            from huggingface_hub import HfApi

            api = HfApi(library_name="winnow")
            repo = api.create_repo(_name(c), private=c.hub_private_repo, exist_ok=True).repo_id
            # With adapters of an earlier upload left, whole weights would be loaded as a model under adapters.
            stale = None if (source / "adapter_config.json").exists() else ["adapter_*"]
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


def push_if_due(run_dir: Path, c: RunConfig, saved: Path | None = None) -> Pushed | None:
    """Upload the finished run, or checkpoint `saved`; a failure is a warning."""
    if not c.push_to_hub or (saved is not None and c.hub_strategy != "every_save"):
        return None
    try:
        return push(run_dir, c, None if saved is None else saved / "model")
    except PushError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def _name(c: RunConfig) -> str:
    """Return the repo, as in transformers: the directory's name unless given; without a namespace, the user's."""
    return c.hub_model_id or Path(c.output_dir).absolute().name


def _step(folder: Path) -> int | None:
    """Return the step of a checkpoint's model; None for that of a finished run."""
    prefix, _, number = folder.parent.name.rpartition("-")
    return int(number) if prefix == "step" and number.isdigit() else None
