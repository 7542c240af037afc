"""Fixtures of several test files: pools of samplers, and the table of the gate paper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from winnow.sampler.pool import SamplerPool

from .fake_samplers import pools


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a pool of two samplers that work; see `pools`."""
    return pools(tmp_path, monkeypatch)


@pytest.fixture
def sampler(made: Any) -> SamplerPool:
    found: SamplerPool = made()
    return found


@pytest.fixture
def buffer() -> Path:
    path = os.environ.get("WINNOW_GATE_FEATURES")
    if not path or not Path(path).is_file():
        pytest.skip("WINNOW_GATE_FEATURES does not name the table of the paper's 100 ALFWorld groups")
    return Path(path)
