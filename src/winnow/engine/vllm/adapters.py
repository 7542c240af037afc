"""LoRA adapters over a model that stays as it is: one, in the one slot that vLLM has for them here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from vllm import LLMEngine
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from ...base.weights import adapters_of, save_tensors
from ...config.options import LoraConfig
from ..facts import Facts
from ..loading import peft_config

LEAVE_OUT = "leave that out of lora.target_modules, or set lora.merge: true"


@dataclass(frozen=True)
class Adapters:
    """What an adapter looks like."""

    shapes: Mapping[str, torch.Size]
    """Shapes by name, see `adapters_of`."""
    rank: int
    alpha: float
    """The model's output gets `alpha` / `rank` B A x."""

    @classmethod
    def from_model(cls, model: Any, lora: LoraConfig) -> Adapters:
        """Adapters that a run has over this model, which they change. Raises ValueError where there can be none."""
        options = peft_config(lora)
        import peft

        adapted = peft.get_peft_model(model, options).get_base_model()
        shapes = {name: tensor.shape for name, tensor in adapters_of(adapted).items()}
        for name in shapes:
            module, embedding, _ = name.rpartition(".lora_embedding_")
            if embedding:
                raise ValueError(f"its LoRA has no place for {module.rpartition('.')[2]}; {LEAVE_OUT}")
        return cls(shapes, options.r, options.lora_alpha)

    def facts(self, whole: Facts) -> Facts:
        """Facts of the model, for weights that are these adapters."""
        return replace(whole, shapes=self.shapes, tied={}, expected="the adapters of lora alone")

    def arguments(self) -> dict[str, Any]:
        """Arguments for vLLM's `EngineArgs`. Raises ValueError for a rank over vLLM's largest."""
        ranks = [rank for rank in sorted(get_args(MaxLoRARanks)) if rank >= self.rank]
        if not ranks:
            raise ValueError(f"its LoRA has no rank {self.rank}; set lora.r to {max(get_args(MaxLoRARanks))} or less")
        targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in self.shapes})
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": ranks[0], "lora_target_modules": targets}


class AdapterSlot:
    """The adapter that all requests use. vLLM reads it from files, as it reads any adapter that peft has saved.

    Raises ValueError for modules that vLLM adds nothing to.
    """

    def __init__(self, llm: LLMEngine, adapters: Adapters, folder: Path) -> None:
        self._llm, self._folder = llm, folder
        folder.mkdir()
        config = {"r": adapters.rank, "lora_alpha": adapters.alpha, "target_modules": []}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        self.request = LoRARequest("policy", 1, str(folder))
        try:
            self.load({name: torch.zeros(shape) for name, shape in adapters.shapes.items()})
        except ValueError as error:
            raise ValueError(f"{error}; {LEAVE_OUT}") from None

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors of `Adapters.shapes` in the place of the old ones; running requests go on with them."""
        save_tensors(state, self._folder / "adapter_model.safetensors")
        self._llm.add_lora(LoRARequest("policy", 1, str(self._folder), load_inplace=True))
