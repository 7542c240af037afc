"""Fixtures of the tests of samplers elsewhere."""

from __future__ import annotations

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
