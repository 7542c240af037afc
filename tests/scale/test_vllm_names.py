"""What Winnow takes of vLLM's inside, in the installed vLLM: an upgrade without a name fails here, by that name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from winnow.engine.server.engine import SERVER_PREFIX
from winnow.engine.vllm.options import ENVIRONMENT, OURS

pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(vllm[\w.]*:[\w.]+)`", TABLE)))
PUBLIC = {
    "vllm",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
    "vllm.lora.request",
    "vllm.platforms",
    "vllm.sampling_params",
}
"""Modules that vLLM documents."""


@pytest.mark.parametrize("name", NAMES)
def test_vllm_has_each_name_of_the_page(name: str) -> None:
    """As an attribute, or as one that its owner's code assigns."""
    module, _, path = name.partition(":")
    *outer, last = path.split(".")
    owner = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    assert hasattr(owner, last) or re.search(rf"\.{last}\b(:[^=\n]+)? = ", inspect.getsource(owner))


def test_the_page_has_each_name_that_is_imported() -> None:
    imported = set()
    for file in (ROOT / "src" / "winnow" / "engine" / "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] == "vllm" and module not in PUBLIC:
                imported |= {f"{module}:{alias.name}" for alias in node.names}
    assert imported
    assert {name for name in imported if not any(f"{there}.".startswith(f"{name}.") for there in NAMES)} == set()


def test_vllm_has_each_argument_variable_and_prefix() -> None:
    from vllm import EngineArgs
    from vllm.entrypoints.scale_out.token_in_token_out import serving
    from vllm.envs import environment_variables

    assert {field.name for field in fields(EngineArgs)} >= OURS
    assert environment_variables.keys() >= ENVIRONMENT.keys()
    assert SERVER_PREFIX in inspect.getsource(serving)
