"""Upload of a run's model to a Hugging Face hub, through huggingface_hub; HF_ENDPOINT says to which.

The token is the one of HF_TOKEN or `hf auth login`. It is in no configuration, and nothing here prints or keeps it.
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
    """An upload that failed; what was to be uploaded is where it was."""


@dataclass(frozen=True)
class Pushed:
    """What came of an upload."""

    repo: str
    """`namespace/name`."""
    url: str
    """Address of the commit."""
    folder: str


def check_hub(c: RunConfig) -> None:
    """Raises ConfigError when a run that is to be uploaded could not be: a bad name, or no token."""
    if not c.push_to_hub:
        return
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(_name(c))
    except HFValidationError as error:
        raise ConfigError(f"hub_model_id: {error}") from None
    if get_token() is None:
        raise ConfigError("push_to_hub: there is no token; set HF_TOKEN in the environment, or run `hf auth login`")


def push(run_dir: Path, c: RunConfig, folder: Path | None = None) -> Pushed:
    """Upload `folder`, by default the finished `model/` or that of the last checkpoint.

    Raises PushError, which names the cause and the command to try again; ConfigError when there is nothing yet.
    """
    with ExitStack() as stack:
        source, folder = (folder, folder) if folder else _latest(run_dir, stack)
        if _step(folder) is not None and c.save_dtype != "auto":  # those of checkpoints are float32
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="winnow-push-"))
            typed = Path(temporary, "model")
            recast(source, typed, types_from(c.save_dtype))
            source = typed
        return _upload(run_dir, c, source, folder)


def _upload(run_dir: Path, c: RunConfig, source: Path, folder: Path) -> Pushed:
    """`source`: where the files of `folder` are now."""
    step = _step(folder)
    try:
        from huggingface_hub import HfApi

        api = HfApi(library_name="winnow")
        repo = api.create_repo(_name(c), private=c.hub_private_repo, exist_ok=True).repo_id
        # Whole weights beside an earlier checkpoint's adapters would be loaded as a model under adapters.
        stale = None if (source / "adapter_config.json").exists() else ["adapter_*"]
        done = api.upload_folder(
            folder_path=source,
            repo_id=repo,
            commit_message="Upload of a finished run by Winnow" if step is None else f"Step {step}, by Winnow",
            delete_patterns=stale,
            ignore_patterns=None if step is None else ["README.md"],  # peft's is a form that nobody has filled in
        )
    except Exception as error:  # of the network, the hub or the disk: whatever it is, the run goes on
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PushError(
            f"{folder} could not be uploaded as {_name(c)}: {said}; it is as it was. Try again with: "
            f"winnow push {run_dir}"
        ) from error
    return Pushed(repo, str(done.commit_url), str(folder))


def push_if_due(run_dir: Path, c: RunConfig, saved: Path | None = None) -> Pushed | None:
    """Upload after a run has ended, or, with `saved`, after this checkpoint; a failure is a warning."""
    if not c.push_to_hub or (saved is not None and c.hub_strategy != "every_save"):
        return None
    try:
        return push(run_dir, c, None if saved is None else saved / "model")
    except PushError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def _name(c: RunConfig) -> str:
    """As in transformers: the directory's, unless another is given; without a namespace it is the token's user's."""
    return c.hub_model_id or Path(c.output_dir).absolute().name


def _latest(run_dir: Path, stack: ExitStack) -> tuple[Path, Path]:
    """The newest model as it stays while `stack` is open, and the directory it is of."""
    if (run_dir / "model").is_dir():
        return run_dir / "model", run_dir / "model"
    found = stack.enter_context(checkpoint.held(run_dir))
    if found is None:
        raise ConfigError(f"{run_dir}: has neither a model nor a checkpoint yet")
    return found / "model", run_dir / "checkpoints" / found.name / "model"


def _step(folder: Path) -> int | None:
    """The step of a checkpoint's model; None for that of a finished run."""
    prefix, _, number = folder.parent.name.rpartition("-")
    return int(number) if prefix == "step" and number.isdigit() else None
