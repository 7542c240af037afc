"""Sections of the configuration that belong to no method, and types of saved models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SaveDtype = Literal["float32", "bfloat16", "float16"]
"""Types in which a trained model is saved."""

OF_ADAPTER = ("r", "alpha", "dropout", "target_modules")
"""Keys of `lora` that an adapter which is trained on brings along."""


class LoraConfig(BaseModel):
    """Low-rank adapters through peft; leave `lora` out for full fine-tuning."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    r: int | None = Field(16, ge=1)
    alpha: int | float | None = Field(32, gt=0)
    dropout: float | None = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] | None = "all-linear"
    merge: bool = True
    """Engines get whole weights, adapters merged in; else the adapters alone."""
    resume: bool = False
    """Train the adapter that `model` is. Keys left out are the adapter's, which is what None means."""

    @model_validator(mode="before")
    @classmethod
    def _leave_to_the_adapter(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("resume") is True:
            return dict.fromkeys(OF_ADAPTER) | values
        return values

    @model_validator(mode="after")
    def _needs_values(self) -> LoraConfig:
        if not self.resume and (missing := [key for key in OF_ADAPTER if getattr(self, key) is None]):
            raise ValueError(f"{missing[0]} may be left to an adapter only with resume: true; give a value")
        return self


class AuditConfig(BaseModel):
    """Overrides of skips and stops at random, to see what the rules get wrong; leave `audit` out for none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    epsilon: float = Field(0.05, ge=1e-4, le=1)
    max_signal_loss: float | None = Field(None, gt=0, lt=1)


class SuccessConfig(BaseModel):
    """What counts as a right answer: a reward of at least `at_least`, of one function or of the weighted sum of all."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    function: str | None = None
    at_least: float = 1.0


def success_section(given: Any) -> Any:
    """A number is the least reward of a right answer, a text the function that decides."""
    if isinstance(given, str):
        return {"function": given}
    return {"at_least": given} if isinstance(given, int | float) and not isinstance(given, bool) else given
