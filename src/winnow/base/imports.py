"""How processes of our own import large libraries: without what these say of their own business, and without pauses."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

NOISY = ("torchao", "torch.utils._pytree")
"""torchao names its kernels for GPUs that are not here, and torch a deprecated call of torchao's."""


def quiet_imports() -> None:
    """For processes of our own; a program that imports the package keeps its logging as it is."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Without garbage collections, which find nothing in what lasts as long as the process: a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
