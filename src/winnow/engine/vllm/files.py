"""Weights from files, for a vLLM server: a backend of vLLM's weight-transfer interface.

vLLM imports this module in its workers, if the server is started with

    --worker-extension-cls winnow.engine.vllm.files.Files --weight-transfer-config '{"backend": "winnow"}'
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .tied import repack_head

BACKEND: Final = "winnow"


class Files:
    """Worker extension that adds nothing: vLLM imports its module, which registers the backend."""


@dataclass
class ModelFacts(WeightTransferInitInfo):
    """What the run knows of its model."""

    model: dict[str, Any]
    """Settings of its config by name."""


@dataclass
class WeightFile(WeightTransferUpdateInfo):
    """Whole weights, under the names of the Hugging Face model's state dict."""

    path: str


class FileTransfer(WeightTransferEngine[ModelFacts, WeightFile]):
    """Loads safetensors files; each worker reads the whole file and keeps its part."""

    init_info_cls = ModelFacts
    update_info_cls = WeightFile

    def init_transfer_engine(self, init_info: ModelFacts) -> None:
        """Raise ValueError unless the server's model has the run's shapes."""
        own = self.vllm_config.model_config.hf_text_config
        for name, wanted in init_info.model.items():
            found = getattr(own, name, wanted)
            if found != wanted:
                raise ValueError(f"another model: its {name} is {found}, that of the run's model is {wanted}")

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightFile) -> None:
        """Load the weights. Raises ValueError when the file cannot be read here."""
        try:
            with safe_open(update_info.path, framework="pt") as file:
                self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except Exception as error:
            with suppress(Exception):  # the next one must not begin with half of this
                finalize_layerwise_reload(self.model, self.model_config)
            if isinstance(error, OSError | SafetensorError):
                raise ValueError(f"cannot read {update_info.path}: {error}") from None
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def shutdown(self) -> None:
        """Hold nothing between updates."""


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
