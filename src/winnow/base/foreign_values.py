"""Values of TRL and transformers for keys that also exist here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "cispo": "use `policy_loss: plain` with `correction: {name: truncate, level: token, high: ...}`, which clips the "
    "weight of a token and keeps its gradient",
    "luspo": "use `loss_type: sequence_sum` with `importance_sampling_level: sequence`",
    "sapo": "use another loss; SAPO is not available",
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
    return _ANSWERS.get((key, value)) if isinstance(value, str | int | None) else None


def meant_by(key: str, value: Any) -> str | None:
    """Return the advice for a number in the place of a section, or None."""
    if key in _IN_SECTION and isinstance(value, int) and value > 1:
        return f"use `{_IN_SECTION[key].format(value)}`"
    share = isinstance(value, float) and 0 < value < 1
    return f"use `audit: {{epsilon: {value}}}`" if key == "audit" and share else None
