"""Adapters of the tiny model, as users save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from .. import parity

REWARDS = [f"{parity.__file__}:parity_reward"]
CPU = torch.device("cpu")
IDS = torch.arange(3, 15)[None]


def adapted(base: Path, into: Path, *, tie: bool | None = None, **options: Any) -> Any:
    """An adapter with random weights over `base`, saved in `into`; the model with it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(into)
    return model


def changed(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    adapted(tiny_model, tmp_path / "adapter")
    return tmp_path / "adapter"
