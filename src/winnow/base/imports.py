"""Imports of large libraries in our own processes: without their log noise and without pauses."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

NOISY = ("torchao", "torch.utils._pytree")
"""torchao names its kernels for absent GPUs; torch logs a deprecated call of torchao's."""


def quiet_imports() -> None:
    """Silence noisy loggers and progress bars in our own processes; a program that imports the package keeps both."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers follows it
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Disable garbage collection, a sixth of the import time: these objects last as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
