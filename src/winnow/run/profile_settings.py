"""The settings that pass rates depend on: for the profile that is made, and the run that reads it."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.files import from_json
from ..config import RunConfig, section_of
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder
from ..methods.success import Success
from .resolved import sampling_params


def profile_settings(c: RunConfig, task: Task, rewarder: Rewarder, success: Success) -> dict[str, Any]:
    """Return what decides a profile's rates, but for the model, the seed and the number of rollouts."""
    template = [c.chat_template, c.chat_template_kwargs]
    sampling = asdict(sampling_params(c))
    sampling["stop"] = list(dict.fromkeys((*sampling["stop"], *task.stop)))
    return {
        "task": task.fingerprint(),
        "sampling": sampling,
        "max_prompt_length": c.max_prompt_length,
        "success": [success.function, success.at_least],
        "reward functions": rewarder.names,
        "reward weights": None if set(c.reward_weights or ()) <= {1.0} else c.reward_weights,
        "chat template": template if any(template) else None,
    }


def meta_path(profile: Path) -> Path:
    """Return the file that says what a profile was made with."""
    return profile.with_name(profile.name + ".meta.json")


def differences(there: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what differs between two settings, as text; empty if nothing does."""
    there, now = _by_key(there), _by_key(json.loads(json.dumps(now)))
    differs = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    return "; ".join(f"{name}: {_short(there.get(name))} there, {_short(now.get(name))} now" for name in differs)


def _by_key(settings: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:16] + "…"


def warn_of_profile(c: RunConfig, task: Task, rewarder: Rewarder, success: Success) -> None:
    """Warn where the profile that the selector reads was made with other settings than the run's.

    A profile without a file of its settings is taken as it is.
    """
    if not (profile := section_of(c.selector).get("profile")):
        return
    settings = profile_settings(c, task, rewarder, success)
    try:
        key = from_json(meta_path(Path(profile)).read_text(encoding="utf-8"))["key"]
        there = {name: key.get(name) for name in settings}
    except (OSError, ValueError, KeyError, TypeError):
        return
    if changed := differences(there, settings):
        warnings.warn(
            f"selector: {profile} was made with other settings ({changed}), so its pass rates may not be this run's; "
            "make it again with `winnow pass-rates`, or ignore this if they are close enough",
            stacklevel=2,
        )
