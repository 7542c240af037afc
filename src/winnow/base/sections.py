"""Configuration sections that belong to no method, and dtypes of saved models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SaveDtype = Literal["float32", "bfloat16", "float16"]
"""Dtypes a trained model can be saved in."""

OF_ADAPTER = ("r", "alpha", "dropout", "target_modules")
"""Keys of `lora` that a resumed adapter sets."""


def weighs_equally(loss_type: str, group_weighting: str | None) -> bool:
    """Return whether every group counts the same in the loss, whatever its size."""
    return (group_weighting or ("size" if loss_type == "dapo" else "equal")) == "equal"


class LoraConfig(BaseModel):
    """Low-rank adapters through peft; leave `lora` out for full fine-tuning."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    r: int | None = Field(16, ge=1)
    alpha: int | float | None = Field(32, gt=0)
    dropout: float | None = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] | None = "all-linear"
    merge: bool = True
    """Publish whole weights with adapters merged in; false: the adapters alone."""
    resume: bool = False
    """Train the adapter given as `model`. Keys left out (None) take the adapter's values."""

    @model_validator(mode="before")
    @classmethod
    def _leave_to_the_adapter(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("resume") is True:
            return dict.fromkeys(OF_ADAPTER) | values
        return values

    @model_validator(mode="after")
    def _needs_values(self) -> LoraConfig:
        missing = [key for key in OF_ADAPTER if getattr(self, key) is None]
        if missing and not self.resume:
            raise ValueError(f"{missing[0]}: may be null only with resume: true; give a value")
        return self


class AuditConfig(BaseModel):
    """Random overrides of skips and stops, which measure the errors of the rules; leave `audit` out to disable it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    epsilon: float = Field(0.05, ge=1e-4, le=1)
    max_signal_loss: float | None = Field(None, gt=0, lt=1)


class ReuseConfig(BaseModel):
    """Several updates on a group, in later steps; leave `reuse` out to train on every group once."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    updates: int = Field(4, ge=2)
    max_age: int = Field(16, ge=1)
    min_ess: float = Field(0.5, ge=0, le=1)
    audit: float = Field(0.0, ge=0, le=1)


class SuccessConfig(BaseModel):
    """Definition of a right answer: a reward of at least `at_least`, of one function or of the weighted sum of all."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    function: str | None = None
    at_least: float = 1.0


def success_section(given: Any) -> Any:
    """Expand the short forms of `success`: a number is `at_least`, a text is `function`."""
    if isinstance(given, str):
        return {"function": given}
    return {"at_least": given} if isinstance(given, int | float) and not isinstance(given, bool) else given
