"""State models: checkpoint contents of a part, checked before the part loads them.

A model is defined next to its part. Its fields are the keys of `state_dict`; arrays are annotated with `Packed`:

    class Trace(State):
        z: Annotated[np.ndarray, Packed("f4", "prompts")]

    saved = Trace.of(state, prompts=len(self.prompts))

A part whose state is plain attributes derives from `Stateful` and names its model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from .errors import ConfigError

STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True, revalidate_instances="always"
)
Count = NonNegativeInt
Probability = Annotated[float, Field(ge=0, le=1)]
Loose = Field(strict=False)
"""Annotates a tuple, which JSON has as a list."""


class State(BaseModel):
    """State of a part. Strict: no unknown keys, no conversions, only finite numbers."""

    model_config = STRICT | ConfigDict(frozen=True, revalidate_instances="never", populate_by_name=True)

    @classmethod
    def of(cls, state: Any, **axes: int) -> Self:
        """Return `state` as a model; `axes`: lengths of axes of its arrays. Raises ValidationError."""
        return cls.model_validate(state, context=axes)


class Stateful:
    """Part whose state is the attributes named by `state_model`. Aliases are the keys of the state."""

    state_model: ClassVar[type[State]] = State

    def axes(self) -> dict[str, int]:
        """Return the lengths of axes known to the part."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""
        return self.state_model.model_validate(self, from_attributes=True).model_dump(mode="json", by_alias=True)

    def load_state_dict(self, state: Any) -> None:
        """Load the output of `state_dict`. Raises ValueError on anything else."""
        for name, value in self.state_model.of(state, **self.axes()):
            setattr(self, name, value)


class StateError(ValueError):
    """A state not saved by its part; the message begins with the key."""


@contextmanager
def at(key: str) -> Iterator[None]:
    """Prefix any error raised while a part loads its state with `key`, as StateError."""
    try:
        yield
    except ConfigError:
        raise
    except StateError as error:
        raise StateError(f"{key}.{error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in (key, *first["loc"]))
        got = "" if first["type"] == "missing" else f" (got {first['input']!r:.50})"
        raise StateError(f"{place}: {first['msg'].removeprefix('Value error, ')}{got}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, zlib.error) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise StateError(f"{key}: {kind}{error}") from error
