"""vLLM's synchronous core, whole or cut into several processes.

With tensor parallelism each rank is a core of its own over its part of every layer, in a process of its own. All do the
same in the same order (as with vLLM's `external_launcher`): the engine's process, rank 0, tells the others what it is
about to do. Tokens are drawn on rank 0 alone.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from vllm import EngineArgs, LLMEngine, TokensPrompt
from vllm import SamplingParams as VllmParams
from vllm.distributed import cleanup_dist_env_and_memory, get_tp_group, model_parallel_is_initialized
from vllm.envs import disable_envs_cache
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from .adapters import Adapters, AdapterSlot
from .scratch import Scratch, environment
from .tied import repack_head

Shapes = list[tuple[str, tuple[int, ...], torch.dtype]]
Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(hidden states [N, H], logits [N, V]) to the token of each row [N]; None when vLLM tries itself out."""

LOOK_S: Final = 1.0
"""Seconds between two looks at the other ranks."""
GRACE_S: Final = 10.0
"""Seconds that a call which waits for a rank that ended has to notice."""
FOLLOW: Final = (
    "import sys; from winnow.base.forkserver import die_with; die_with(int(sys.argv[1])); "
    "from winnow.engine.vllm.core import follow; follow()"
)


class Core:
    """One rank's vLLM, and the only rank's where there is one. Raises ValueError and its like when vLLM refuses."""

    _open: ClassVar[weakref.WeakSet[Core]] = weakref.WeakSet()
    """Cores of this process that are not closed. They share vLLM's process groups."""
    _scratch: Scratch | None = None
    sleeps: bool = False
    """Whether it can; only one of a process."""

    def __init__(self, arguments: Mapping[str, Any], adapters: Adapters | None = None) -> None:
        disable_envs_cache()  # with the temporary directory of an earlier engine
        _forget_engines_of_before()
        sleeps = bool(arguments.get("enable_sleep_mode"))
        if sleeps and any(core.sleeps for core in Core._open):
            raise ValueError("this process has another vLLM engine that can sleep; close() its trainer first")
        self.sleeps = sleeps
        self._scratch = Scratch()
        with self._scratch.used():
            self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        # vLLM would shut down when this engine is collected, and destroy the process groups of the next engine.
        _, self._shut_down, *_ = self._llm.engine_core._finalizer.detach()
        Core._open.add(self)
        self.config = self._llm.vllm_config
        [self.runner] = self._llm.collective_rpc(lambda worker: worker.model_runner)
        folder = Path(self._scratch.path) / "adapter"
        self._slot = None if adapters is None else AdapterSlot(self._llm, adapters, folder)

    def draw_by(self, draw: Draw) -> None:
        """Draw tokens where the model hands its logits on; vLLM's sampler then finds one possible token."""
        compute = self.runner.model.compute_logits

        def only_what_is_drawn(hidden_NH: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            logits_NV: torch.Tensor = compute(hidden_NH, *rest, **named)
            tokens_N = draw(hidden_NH, logits_NV)
            if tokens_N is None:
                return logits_NV
            return torch.full_like(logits_NV, -torch.inf).scatter_(1, tokens_N[:, None], 0.0)

        self.runner.model.compute_logits = only_what_is_drawn

    def add(self, name: str, prompt_ids: tuple[int, ...], salt: str, max_tokens: int) -> str:
        """vLLM's inner name of the request. Keys and values are shared under the same salt."""
        params = VllmParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=salt)
        with self._together("add", name, prompt_ids, salt, max_tokens):
            return str(self._llm.add_request(name, prompt, params, lora_request=self._slot and self._slot.request))

    def abort(self, names: list[str]) -> None:
        with self._together("abort", names):
            self._llm.abort_request(names)

    def step(self) -> dict[str, list[int]]:
        """Tokens by request; none for a request in prefill."""
        with self._together("step"):
            return {o.request_id: o.outputs[0].token_ids for o in self._llm.step()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._load(state.items())

    def sleep(self, level: int) -> None:
        """Give up GPU memory: keys, values and at level 2 weights are gone. No request may be under way."""
        with self._together("sleep", level):
            self._llm.sleep(level)

    def wake(self, tag: str) -> None:
        """Take the memory of `weights`, or of `kv_cache`, again; after both, requests run."""
        with self._together("wake", tag):
            self._llm.wake_up([tag])

    def close(self) -> None:
        """End the other ranks, where there are some, and remove temporary files; both end with this process, too.

        The last open core shuts vLLM down, so that the next one makes process groups of its own.
        """
        if self._scratch is None:  # closed before
            return
        self._scratch.close()
        self._scratch = None
        was_open = self in Core._open
        Core._open.discard(self)
        if finalizer := getattr(getattr(self, "_llm", None), "_finalizer", None):
            finalizer()  # drops the compiler's hooks, which hold the model, before the last reference is dropped
        if not Core._open and was_open:
            self._shut_down()
        elif not Core._open and not hasattr(self, "_llm"):  # it failed to start
            cleanup_dist_env_and_memory()
        for name in ("_llm", "_shut_down", "runner", "_slot"):  # all hold the model
            vars(self).pop(name, None)

    def _together(self, method: str, *args: Any) -> AbstractContextManager[None]:
        """Let other ranks, where there are some, call this method of their cores in the meantime."""
        return nullcontext()

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._slot is not None:
            self._slot.load(dict(weights))
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.apply_model(repack_head)


def _forget_engines_of_before() -> None:
    """Destroy process groups and memory pools of engines that nobody has any more, but nobody closed."""
    if model_parallel_is_initialized():
        gc.unfreeze()  # vLLM hides an engine from the collector
        gc.collect()
        if not Core._open:
            if current_platform.is_cuda_alike():
                from vllm.device_allocator.cumem import CuMemAllocator

                if CuMemAllocator.instance is not None:  # it would refuse the next engine
                    CuMemAllocator.instance.release_pools()
            cleanup_dist_env_and_memory()


class RankExecutor(ExecutorWithExternalLauncher):
    """Executor of one rank. On a CPU ranks talk by gloo: over shared memory they would wait for one that died."""

    def _distributed_args(self) -> tuple[str, int, int]:
        method, rank, local_rank = super()._distributed_args()
        # vLLM shares memory among ranks whose addresses are the same
        return f"{method}?rank_of={rank}", rank, local_rank


class LeadingCore(Core):
    """Rank 0 of several. The others end with this process, and this one with them if it waits for them."""

    def __init__(self, arguments: Mapping[str, Any], adapters: Adapters | None = None) -> None:
        size = int(arguments["tensor_parallel_size"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        self._ranks = _Ranks([_start(rank, address) for rank in range(1, size)])
        try:
            told = self._ranks.telling((dict(arguments), adapters))
            with told, environment(address | {"RANK": "0", "LOCAL_RANK": "0"}):
                super().__init__(arguments, adapters)
        except BaseException:
            self.close()
            raise

    def draw_by(self, draw: Draw) -> None:
        def draw_and_tell(hidden_NH: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor | None:
            tokens_N = draw(hidden_NH, logits_NV)
            return None if tokens_N is None else get_tp_group().broadcast(tokens_N)

        super().draw_by(draw_and_tell)

    def _together(self, method: str, *args: Any) -> AbstractContextManager[None]:
        return self._ranks.telling((method, *args))

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        shapes: Shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
        with self._together("load_shapes", shapes):
            device = self.runner.device
            self._load((name, get_tp_group().broadcast(t.to(device).contiguous())) for name, t in state.items())

    def close(self) -> None:
        self._ranks.close()
        super().close()


class FollowingCore(Core):
    """Any other rank: does what it is told, with the tokens and weights of rank 0."""

    def __init__(self, arguments: Mapping[str, Any], adapters: Adapters | None) -> None:
        super().__init__(arguments, adapters)
        self.draw_by(self._hear)

    def load_shapes(self, shapes: Shapes) -> None:
        device = self.runner.device
        empty = ((name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in shapes)
        self._load((name, get_tp_group().broadcast(tensor)) for name, tensor in empty)

    def _hear(self, hidden_NH: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor | None:
        if len(self.runner.input_batch.req_ids) != len(hidden_NH):
            return None
        return get_tp_group().broadcast(torch.empty(len(hidden_NH), dtype=torch.int64, device=hidden_NH.device))


class _Ranks:
    """The processes of all ranks but the first."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._closed = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def telling(self, order: tuple[Any, ...]) -> Iterator[None]:
        """Tell all of them; the body does the same here. Raises RuntimeError when one has ended."""
        self._idle.clear()
        try:
            for process in self._processes:
                assert process.stdin is not None
                with suppress(OSError):  # it has ended
                    pickle.dump(order, process.stdin)
                    process.stdin.flush()
            if told := self.ended():
                raise RuntimeError(told)
            yield
        except RuntimeError as error:  # of a collective without that rank; it says less, and may come before its end
            deadline = time.monotonic() + LOOK_S
            while not (told := self.ended()) and time.monotonic() < deadline:
                time.sleep(0.05)
            if told:
                raise RuntimeError(told) from error
            raise
        finally:
            self._idle.set()

    def close(self) -> None:
        self._closed.set()
        for process in self._processes:
            process.kill()
            process.wait()
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            if self.ended() and not self._idle.wait(GRACE_S):
                # A collective may wait for the dead for ever, and no exception reaches it.
                print(f"engine: vllm: {self.ended()}", file=sys.stderr, flush=True)
                os._exit(1)

    def ended(self) -> str:
        """Return how one of them ended; empty while all run."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                return f"rank {rank} of vLLM's tensor parallelism ended with exit status {status}; see what it printed"
        return ""


def follow() -> None:
    """A rank's life: orders come through its standard input, the first says what it is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which may have a step to finish
    orders = sys.stdin.buffer
    core = FollowingCore(*pickle.load(orders))
    with torch.inference_mode(), suppress(EOFError):
        while True:
            name, *args = pickle.load(orders)
            getattr(core, name)(*args)


def _start(rank: int, address: Mapping[str, str]) -> subprocess.Popen[bytes]:
    paths = dict.fromkeys([*(os.path.abspath(p) for p in sys.path), os.getcwd()])
    env = os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", FOLLOW, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
