"""The agent of `examples/compacting_agent.py`, and a model for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "compacting_agent.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("compacting_agent", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = example.make_model(tmp_path_factory.mktemp("chat"))
    return folder
