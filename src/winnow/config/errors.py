"""Pydantic errors as lines with a remedy, and what keys and values of other trainers (TRL, verl, prime-rl) are here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..base.dotted import did_you_mean


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?`, or the list of known names."""
    others = f" Known: {', '.join(sorted(known))}." if known else " There are none."
    return did_you_mean(name, known) or others


def explain(
    error: ValidationError, known: Sequence[str], where: str, sections: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return pydantic's errors, one a line, with our name for an unknown key, or the nearest valid name.

    `sections`: the keys of sections by name, without the section's name.
    """
    lines = []
    errors = error.errors()
    as_sections = [e for e in errors if e["loc"][-1:] == ("dict[str,any]",)]
    methods = {e["loc"][:-1] for e in as_sections if not isinstance(e["input"], dict)}
    for e in errors:
        key = ".".join(str(part) for part in e["loc"])
        if e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            for name, answer in key_hints(key, e["input"]):
                section, _, last = name.rpartition(".")
                own = (sections or {}).get(section)
                hint = f" Here {answer}." if answer else suggestion(last if own else name, own or known)
                lines.append(f"unknown key '{name}'.{hint}")
        elif e["type"] == "missing":
            lines.append(f"missing key '{key}'")
        elif e["type"] == "model_type":
            lines.append(_no_section(key, "a section, `{key: value}`", e["input"]))
        elif e["loc"][:-1] in methods and not isinstance(e["input"], list):
            if e["loc"][-1] == "str":  # this line stands for a method's other forms, too
                lines.append(_no_section(key.removesuffix(".str"), "a name, or a section `{name: NAME}`", e["input"]))
        elif not e["loc"] or (e["type"] == "value_error" and isinstance(e["input"], dict)):  # of a whole section
            lines.append((f"{key}: " if key else "") + str(e["msg"]).removeprefix("Value error, "))
        else:
            answer = answer_to(str(e["loc"][0]), e["input"])
            lines.append(f"{key}: {e['msg']} (got {e['input']!r})" + (f". Here {answer}." if answer else ""))
    return "\n".join(f"{where}: {line}" for line in lines)


def _no_section(key: str, expected: str, given: object) -> str:
    answer = meant_by(key, given)
    return f"{key}: expected {expected}, not {given!r}" + (f". Here {answer}." if answer else "")


HINTS = Path(__file__).with_name("migration_hints.yaml")
REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
REWARD_FACTORIES = ("get_soft_overlong_punishment", "get_cosine_scaled_reward", "get_repetition_penalty_reward")
"""Names in `trl.rewards` that TRL's scripts accept without a module."""


@cache
def load_hints(section: str) -> dict[str, str]:
    """Return the hint for each key of the section `flat`, or for each pattern of `nested` in order."""
    entries = yaml.safe_load(HINTS.read_text(encoding="utf-8"))[section]
    return {key: entry["hint"] for entry in entries for key in entry["keys"].split()}


def key_hints(key: str, value: Any) -> Iterator[tuple[str, str | None]]:
    """Yield each unknown key under `key`, dotted, and its hint; None if no other trainer has the key."""
    flat = load_hints("flat")
    if isinstance(value, dict) and value and key not in flat:
        for name, inner in value.items():
            yield from key_hints(f"{key}.{name}", inner)
        return
    patterns = load_hints("nested")
    matching = (hint for pattern, hint in patterns.items() if fnmatchcase(key, pattern))
    yield key, flat.get(key) or next(matching, None)


def reward_hint(target: str, own: Iterable[str]) -> str:
    """Return e.g. ` Did you mean 'trl.rewards:think_format_reward'?` for a reward of TRL's scripts, or empty text.

    `own`: plain names known here.
    """
    module, _, name = target.rpartition(".")
    if name in REWARD_FACTORIES:
        return (
            f" trl.rewards:{name} makes a reward function: call it in a file of your own, `made = {name}(...)`, and "
            "name that, 'my_rewards.py:made'."
        )
    if name == "py":
        return f" Name a function of the file: '{target}:function'."
    if module:
        return f" Did you mean '{module}:{name}'?"
    close = get_close_matches(target, (*own, *REWARDS), n=1, cutoff=0.6)
    if not close:
        return ""
    return f" Did you mean '{f'trl.rewards:{close[0]}' if close[0] in REWARDS else close[0]}'?"


NULL_IS_DEFAULT = frozenset(
    {"top_k", "top_p", "min_p", "repetition_penalty", "eval_top_k", "eval_top_p", "entropy_coef"}
    | {"chat_template_kwargs", "lr_scheduler_kwargs", "optim_args", "stop", "report_to"}
    | {"output_dir", "dtype", "gradient_checkpointing"}
)
"""Keys at which null means the trainer's default, which has the same effect here."""
_TRACKERS = "name the trackers, e.g. `report_to: [tensorboard]`"
_SHARE = "use a number of steps; a share of the run is not possible"
_8BIT = "use `optim: adamw_torch_8bit`"
_LOSSES = {
    "bnpo": "use `loss_type: dapo`, the mean over all tokens of the update; bnpo takes it in each micro-batch",
    "cispo": "use `policy_loss: {name: cispo, epsilon_high: 5}` with `loss_type: dapo`",
    "luspo": "use `loss_type: sequence_sum` with `importance_sampling_level: sequence`",
    "sapo": "use `policy_loss: sapo` with `loss_type: grpo`",
    "vespo": "use another loss; VESPO is not available",
}
_ANSWERS: dict[tuple[str, Any], str] = {
    **{("loss_type", name): answer for name, answer in _LOSSES.items()},
    **{("optim", name): _8BIT for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")},
    **{("optim", name): "use `optim: adamw_torch`" for name in ("adamw_hf", "paged_adamw", "paged_adamw_32bit")},
    ("report_to", "all"): _TRACKERS,
    ("max_steps", -1): "use a number of steps, or `num_train_epochs` (3 in TRL unless given)",
    ("max_prompt_length", None): "use a number of tokens; prompts with more fail, and are counted at the start",
    ("max_completion_length", None): "use a number of tokens",
}

_IN_SECTION = {
    "group_size": "num_generations: {}",
    "reuse": "reuse: {{updates: {}}}",
}
"""Keys of sections -> what is meant by a whole number above 1."""


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with unambiguous values of other trainers translated."""
    found = {key: value for key, value in values.items() if value is not None or key not in NULL_IS_DEFAULT}
    for key in ("top_k", "eval_top_k"):
        if found.get(key) == -1:
            found[key] = 0
    if found.get("max_steps") == -1 and found.get("num_train_epochs") is not None:
        del found["max_steps"]
    if found.get("max_grad_norm") == 0 and not isinstance(found["max_grad_norm"], bool):
        found["max_grad_norm"] = None
    if found.get("log_completions") is True:
        del found["log_completions"]
    elif found.get("log_completions") is False:
        found["log_completions"] = 0
    for key in ("report_to", "stop"):
        if isinstance(found.get(key), str):
            found[key] = [found[key]]
    if found.get("report_to") == ["none"]:
        found["report_to"] = []
    return found


def answer_to(key: str, value: Any) -> str | None:
    """Return the advice for a value known from another trainer, or None."""
    if key in ("save_steps", "eval_steps") and isinstance(value, float) and 0 < value < 1:
        return _SHARE
    if key == "resume":
        return (
            "use `warn` or `strict`, for a resume after your code has changed; to continue a run, `winnow resume RUN`"
        )
    return _ANSWERS.get((key, value)) if isinstance(value, str | int | None) else None


def meant_by(key: str, value: Any) -> str | None:
    """Return the advice for a number in the place of a section, or None."""
    if key in _IN_SECTION and isinstance(value, int) and value > 1:
        return f"use `{_IN_SECTION[key].format(value)}`"
    share = isinstance(value, float) and 0 < value < 1
    return f"use `audit: {{epsilon: {value}}}`" if key == "audit" and share else None
