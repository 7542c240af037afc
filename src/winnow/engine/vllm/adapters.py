"""LoRA adapters over a model that stays as it is: one, in the one slot that vLLM has for them here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from ...base.weights import adapters_of
from ...config.options import LoraConfig
from ..facts import Facts
from ..loading import peft_config

ID: Final = 1


@dataclass(frozen=True)
class Adapters:
    """What an adapter looks like."""

    shapes: Mapping[str, torch.Size]
    """Shapes by name, see `adapters_of`."""
    rank: int
    scaling: float
    """The model's output gets `scaling` B A x."""

    @classmethod
    def from_model(cls, model: Any, lora: LoraConfig) -> Adapters:
        """Adapters that a run has over this model, which they change. Raises ValueError where there can be none."""
        options = peft_config(lora)
        import peft

        adapted = peft.get_peft_model(model, options).get_base_model()
        shapes = {name: tensor.shape for name, tensor in adapters_of(adapted).items()}
        _refuse(name.partition(".lora_embedding_")[0] for name in shapes if ".lora_embedding_" in name)
        return cls(shapes, options.r, options.lora_alpha / options.r)

    @property
    def modules(self) -> set[str]:
        """Names of what they are added to."""
        return {name.partition(".lora_")[0] for name in self.shapes}

    def facts(self, whole: Facts) -> Facts:
        """Facts of the model, for weights that are these adapters."""
        return replace(whole, shapes=self.shapes, tied={}, expected="the adapters of lora alone")

    def arguments(self) -> dict[str, Any]:
        """Arguments for vLLM's `EngineArgs`. Raises ValueError for a rank over vLLM's largest."""
        ranks = [rank for rank in sorted(get_args(MaxLoRARanks)) if rank >= self.rank]
        if not ranks:
            raise ValueError(f"its LoRA has no rank {self.rank}; set lora.r to {max(get_args(MaxLoRARanks))} or less")
        targets = sorted({module.rpartition(".")[2] for module in self.modules})
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": ranks[0], "lora_target_modules": targets}


class AdapterSlot:
    """The adapter that all requests use; new weights take the place of the old, and running requests go on with them.

    Raises ValueError for modules that vLLM adds nothing to.
    """

    request: Final = LoRARequest("policy", ID, "given by the learner")  # a path that vLLM would read, were it not there

    def __init__(self, runner: Any, adapters: Adapters) -> None:
        self._manager = runner.lora_manager._adapter_manager
        self._adapters = adapters
        mapper = getattr(runner.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()
        known = set(self._manager.modules) | {n for names in self._manager.packed_modules.values() for n in names}
        theirs = {m: parse_fine_tuned_lora_name(f"{m}.lora_A.weight", self._mapper)[0] for m in adapters.modules}
        _refuse(module for module, name in theirs.items() if name not in known)
        self.load({name: torch.zeros(shape) for name, shape in adapters.shapes.items()})

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The tensors of `Adapters.shapes`, which are left as they are."""
        rank = self._adapters.rank
        scaled = {  # not in place, as vLLM would: these are the learner's
            name: tensor * self._adapters.scaling if ".lora_B." in name else tensor for name, tensor in state.items()
        }
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        device = str(self._manager.device)
        dtype = self._manager.lora_config.lora_dtype
        adapter = LoRAModel.from_lora_tensors(ID, scaled, helper, device, dtype, weights_mapper=self._mapper)
        self._manager.remove_adapter(ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ID)


def _refuse(modules: Iterable[str]) -> None:
    if names := sorted({module.rpartition(".")[2] for module in modules}):
        raise ValueError(
            f"its LoRA has no place for {', '.join(names)}; leave that out of lora.target_modules, or set "
            "lora.merge: true"
        )
