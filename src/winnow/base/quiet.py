"""Silence of libraries that warn of their own business while they are imported."""

from __future__ import annotations

import logging

NOISY = ("torchao", "torch.utils._pytree")
"""torchao names its kernels for GPUs that are not here, and torch a deprecated call of torchao's."""


def quiet_imports() -> None:
    """For processes of our own; a program that imports the package keeps its logging as it is."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
