"""A CUDA device that is only pretended: everything is computed on the CPU, but tensors say that they are on `cuda:0`.

    with PretendCuda(memory=24 << 30) as gpu:
        engine = LocalEngine(model, tokenizer, device="cuda")
        ...
    assert not gpu.mixed, gpu.report()

While it is active `torch.cuda.is_available()` is true, factories and `.to` accept `cuda`, `tensor.device` is `cuda:0`,
`.numpy()` of such a tensor raises TypeError, and every operation (forward, backward, optimizer) is recorded:

- `mixed`: operations on tensors of both devices, which CUDA refuses (or, for fused optimizers, reads wild memory);
- `syncs`: places where the host waits for the device (`.item()`, masks as indices, copies between host and device);
- `launches`: kernels that would be started, at least (views and empty tensors start none), by source line;
- `traffic`: bytes that these kernels read and write, at least (where an index says which rows, only those);
- `shapes`: shapes of attention calls, for backends that prepare a plan for each (cuDNN);
- `bytes` and `peak_bytes`: memory of all live tensors on the device, also through `torch.cuda.memory_allocated`;
- `host_bytes` and `peak_host_bytes`: memory of live copies that were made from the device on the host.

Limits: kernels that CUDA lacks or that round differently, the allocator's fragmentation, streams and other processes.

How it works: the storage of a tensor carries a mark (its Python object lives as long as the storage), views share it,
and a `TorchDispatchMode` marks what comes out of an operation on marked tensors.
"""

from __future__ import annotations

import collections
import functools
import importlib
import os
import sys
import threading
import types
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .pretended_tensors import (
    _REAL_DEVICE,
    ATTENTION,
    CUDA,
    FACTORIES,
    INDEX_OK,
    LIKE,
    NEW,
    NO_DETERMINISTIC,
    NO_KERNEL,
    PRODUCTS,
    SCALAR_OK,
    SYNC,
    mark,
    on_cuda,
    product,
    storage_of,
    tensors_in,
    traffic,
)

aten = torch.ops.aten


class Looker(TorchDispatchMode):
    def __init__(self, gpu: PretendCuda) -> None:
        super().__init__()
        self.gpu = gpu
        self.whole: set[Any] = set()
        """Operations that are no composites."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.whole and func._overloadname != "out" and func.name() not in ("aten::rms_norm",):
            with self:  # composites, which inference mode leaves whole
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
            self.whole.add(func)
        name = func._schema.name.removeprefix("aten::")
        tensors = tensors_in([*args, *kwargs.values()])
        cuda = [on_cuda(x) for x in tensors]
        any_cuda, mixed = any(cuda), any(cuda) and not all(cuda)
        base = name.rstrip("_") if not name.startswith("__") else name
        refused = name in NO_DETERMINISTIC and torch.are_deterministic_algorithms_enabled()
        if refused and any_cuda and tensors[0].is_floating_point():
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        if mixed:
            self._judge(name, base, args, kwargs, tensors, cuda)
        before = {storage_of(x) for x in tensors}
        if any_cuda and name in PRODUCTS and func._overloadname == "default" and tensors[0].dtype == torch.bfloat16:
            result = product(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if any_cuda:
            for x in tensors_in([result]):
                if storage_of(x) not in before:
                    mark(x, True, self.gpu)
            self._count(name, base, func, args, tensors, tensors_in([result]))
        return result

    def _judge(self, name: str, base: str, args: Any, kwargs: Any, tensors: Any, cuda: Any) -> None:
        host = [x for x, there in zip(tensors, cuda, strict=True) if not there]
        if base == "copy":
            self.gpu.sync("copy_ between devices")
        elif (
            base in INDEX_OK
            and on_cuda(args[0])
            and all(x.dtype in (torch.int64, torch.bool, torch.int32) or x.ndim == 0 for x in host)
        ):
            self.gpu.sync(f"{name} with indices of the host")
        elif not (base in SCALAR_OK and all(x.ndim == 0 for x in host)) and base not in LIKE:
            shapes = ", ".join(f"{'cuda' if c else 'cpu'}{list(x.shape)}" for x, c in zip(tensors, cuda, strict=True))
            self.gpu.mix(f"{name}({shapes})")

    def _count(self, name: str, base: str, func: Any, args: Any, tensors: Any, results: Any) -> None:
        idle = func.is_view or base in NO_KERNEL or name in NO_KERNEL
        if not idle and any(x.numel() for x in tensors):
            self.gpu.launch(name)
            self.gpu.traffic += traffic(base, tensors, results)
        if base in SYNC:
            self.gpu.sync(name)
        elif base in INDEX_OK and any(i.dtype in (torch.bool, torch.uint8) for i in tensors_in(args[1])):
            self.gpu.sync(f"{name} with a mask")
        if name.startswith(ATTENTION) and "backward" not in name:
            self.gpu.shapes[tuple((tuple(x.shape), x.dtype) for x in tensors)] += 1


class PretendCuda:
    """See the module's docstring. `package`: whose lines are named as places."""

    def __init__(self, package: str = "winnow", *, memory: int = 80 << 30, name: str = "pretended GPU") -> None:
        self.root = os.path.dirname(os.path.abspath(importlib.import_module(package).__file__ or "")) + os.sep
        self.memory, self.name = memory, name
        self.stack = ExitStack()
        self.bytes = self.peak_bytes = self.host_bytes = self.peak_host_bytes = 0
        self.clear()

    def allocate(self, storage: Any) -> None:
        """Count a storage for as long as it lives."""
        size = storage.nbytes()
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.bytes -= size

    def _copied(self, storage: Any) -> None:
        """Count a copy on the host."""
        self.host_bytes += storage.nbytes()
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, size: int) -> None:
        self.host_bytes -= size

    def reset_peak(self) -> None:
        self.peak_bytes, self.peak_host_bytes = self.bytes, self.host_bytes

    def clear(self) -> None:
        """Forget operations so far; bytes stay."""
        self.mixed: collections.Counter[tuple[str, str]] = collections.Counter()
        self.syncs: collections.Counter[tuple[str, str]] = collections.Counter()
        self.launches: collections.Counter[tuple[str, str]] = collections.Counter()
        self.shapes: collections.Counter[Any] = collections.Counter()
        self.traffic = 0

    # ---- what is noted ------------------------------------------------------------------------------------------

    def place(self) -> str:
        frame: types.FrameType | None = sys._getframe(2)
        last = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self.root):
                return f"{file.removeprefix(self.root)}:{frame.f_lineno}"
            if not last and "/torch/" not in file and file != __file__:
                last = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return last or "?"

    def mix(self, what: str) -> None:
        self.mixed[self.place(), what] += 1

    def sync(self, what: str) -> None:
        self.syncs[self.place(), what] += 1

    def launch(self, what: str) -> None:
        self.launches[self.place(), what] += 1

    def report(self, most: int = 25) -> str:
        lines = [f"mixed devices: {sum(self.mixed.values())}"]
        lines += [f"  {n:6} {where}: {what}" for (where, what), n in self.mixed.most_common(most)]
        lines += [f"host waits for device: {sum(self.syncs.values())}"]
        lines += [f"  {n:6} {where}: {what}" for (where, what), n in self.syncs.most_common(most)]
        lines += [f"kernels: {sum(self.launches.values())}, attention shapes: {len(self.shapes)}"]
        by_place: collections.Counter[str] = collections.Counter()
        for (where, _), n in self.launches.items():
            by_place[where] += n
        lines += [f"  {n:6} {where}" for where, n in by_place.most_common(most)]
        return "\n".join(lines)

    # ---- what is put in the place of torch's own ----------------------------------------------------------------

    def __enter__(self) -> PretendCuda:
        import torch.utils._device

        torch.utils._device._device_constructors()  # it looks functions up, once, by what they are now
        for name in FACTORIES:
            self._patch(torch, name, self._factory(getattr(torch, name)))
        for name in NEW:
            self._patch(torch.Tensor, name, self._factory(getattr(torch._C.TensorBase, name)))
        real = {n: getattr(torch.Tensor, n) for n in ("to", "cpu", "numpy", "tolist", "__array__")}
        self._patch(torch.Tensor, "device", property(lambda x: CUDA if on_cuda(x) else _REAL_DEVICE(x)))
        self._patch(torch.Tensor, "is_cuda", property(on_cuda))
        self._patch(torch.Tensor, "is_cpu", property(lambda x: _REAL_DEVICE(x).type == "cpu" and not on_cuda(x)))
        self._patch(torch.Tensor, "get_device", lambda x: 0 if on_cuda(x) else -1)
        self._patch(torch.Tensor, "pin_memory", lambda x, *_: x)
        self._patch(torch.Tensor, "to", self._to(real["to"]))
        self._patch(torch.Tensor, "cpu", lambda x, *a, **k: self._move(real["to"], x, torch.device("cpu"), x.dtype))
        self._patch(torch.Tensor, "cuda", lambda x, *a, **k: self._move(real["to"], x, CUDA, x.dtype))
        self._patch(torch.Tensor, "numpy", self._host_only(real["numpy"]))
        self._patch(torch.Tensor, "__array__", self._host_only(real["__array__"]))
        self._patch(torch.Tensor, "tolist", self._tolist(real["tolist"]))
        clone = torch.storage._StorageBase.clone

        def cloned(storage: Any) -> Any:
            found = clone(storage)
            found.pretended = getattr(storage, "pretended", False)
            if found.pretended:
                self.allocate(found)
            return found

        self._patch(torch.storage._StorageBase, "clone", cloned)
        self._autocast()
        self._cuda()
        self._patch(importlib.import_module("winnow.engine.local.graphs"), "capturing", lambda device: self._captured)
        self._threads()
        self.stack.enter_context(Looker(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def _patch(self, where: Any, name: str, new: Any) -> None:
        self.stack.enter_context(mock.patch.object(where, name, new, create=True))

    def _factory(self, real: Any) -> Any:
        @functools.wraps(real)
        def made(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is None:
                found = real(*args, **kwargs)
                like = args[0] if args and isinstance(args[0], torch.Tensor) else None
                if like is not None and on_cuda(like):
                    mark(found, True, self)  # outside of operations that are looked at, as in other threads
                return found
            cuda = torch.device(device).type == "cuda"
            given = next((x for x in args if isinstance(x, torch.Tensor)), None)
            found = real(*args, **kwargs | ({"device": "cpu"} if cuda else {}))
            if given is not None and storage_of(found) == storage_of(given):
                if on_cuda(given) == cuda:
                    return found
                found = found.clone()
            if cuda and real.__name__ in ("tensor", "as_tensor", "asarray"):
                self.sync(f"{real.__name__} from the host")
            return mark(found, cuda, self) if torch.device(device).type in ("cpu", "cuda") else found

        return made

    def _to(self, real: Any) -> Any:
        def to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            target: Any = kwargs.pop("device", None)
            if args and isinstance(args[0], str | int | torch.device):
                target, args = args[0], args[1:]
            elif args and isinstance(args[0], torch.Tensor):
                target, args = args[0].device, (args[0].dtype, *args[1:])
            elif args and args[0] is None and not isinstance(args[0], torch.dtype):
                args = args[1:]  # a device that is not said
            names = ("dtype", "non_blocking", "copy")
            kwargs |= {name: value for name, value in zip(names, args, strict=False) if value is not None}
            device = CUDA if isinstance(target, int) else None if target is None else torch.device(target)
            if device is None:
                return real(x, **kwargs) if kwargs else x
            if device.type not in ("cpu", "cuda"):
                return real(x, device, **kwargs)
            if _REAL_DEVICE(x).type != "cpu":
                return mark(real(x, "cpu", **kwargs), device.type == "cuda", self)
            if (device.type == "cuda") == on_cuda(x):
                return real(x, **kwargs) if kwargs else x
            return self._move(real, x, device, kwargs.get("dtype") or x.dtype, kwargs.get("non_blocking", False))

        return to

    def _move(self, to: Any, x: torch.Tensor, device: torch.device, dtype: Any, free: bool = False) -> torch.Tensor:
        if (device.type == "cuda") == on_cuda(x) and x.dtype == dtype:
            return x
        if not free or device.type == "cpu":
            self.sync("copy to the device" if device.type == "cuda" else "copy to the host")
        with _disable_current_modes() if device.type == "cpu" else nullcontext():  # else it counts on the device
            found = to(x, dtype, copy=True)
        if storage_of(found) == storage_of(x):
            found = found.clone()
        if device.type == "cpu" and on_cuda(x):
            self._copied(found.untyped_storage())
        return mark(found, device.type == "cuda", self)

    def _host_only(self, real: Any) -> Any:
        def checked(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if on_cuda(x):
                self.mix("numpy() of a CUDA tensor")
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
            return real(x, *args, **kwargs)

        return checked

    def _tolist(self, real: Any) -> Any:
        def tolist(x: torch.Tensor) -> Any:
            if on_cuda(x):
                self.sync("tolist()")
            return real(x)

        return tolist

    def _autocast(self) -> None:
        """Autocast of a CPU in the place of CUDA's; their lists of operations differ in details."""
        real = torch.autocast

        class Autocast(real):  # type: ignore[misc, valid-type]
            def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
                super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        self._patch(torch, "autocast", Autocast)
        self._patch(torch.amp, "autocast", Autocast)
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            function = getattr(torch, name)
            self._patch(torch, name, lambda kind="cpu", f=function: f("cpu" if kind == "cuda" else kind))
        self._patch(torch.amp, "is_autocast_available", lambda kind: True)

    def _cuda(self) -> None:
        properties = types.SimpleNamespace(
            total_memory=self.memory, name=self.name, major=9, minor=0, multi_processor_count=132
        )

        @contextmanager
        def nothing(*_: Any) -> Any:
            yield

        for name, value in {
            "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "synchronize": None,
            "is_bf16_supported": True, "get_device_name": self.name, "get_device_properties": properties,
            "get_device_capability": (9, 0), "empty_cache": None, "_lazy_init": None, "manual_seed_all": None,
            "set_device": None, "manual_seed": None,
            "_is_in_bad_fork": False, "is_current_stream_capturing": False,
        }.items():  # fmt: skip
            self._patch(torch.cuda, name, lambda *a, _value=value, **k: _value)
        for name in ("memory_allocated", "memory_reserved"):
            self._patch(torch.cuda, name, lambda *a: self.bytes)
        for name in ("max_memory_allocated", "max_memory_reserved"):
            self._patch(torch.cuda, name, lambda *a: self.peak_bytes)
        self._patch(torch.cuda, "reset_peak_memory_stats", lambda *a: self.reset_peak())
        self._patch(torch.cuda, "mem_get_info", lambda *a: (self.memory - self.bytes, self.memory))
        for name in ("device", "stream"):
            self._patch(torch.cuda, name, nothing)
        self._patch(torch.cuda, "get_rng_state", lambda *a: torch.get_rng_state())
        self._patch(torch.cuda, "set_rng_state", lambda *a: None)

    def _captured(self, step: Any, first: bool) -> Any:
        """In the place of a CUDA graph's replay: the step itself, which may not wait, as in a capture."""

        def replay() -> torch.Tensor:
            before = self.syncs.total()
            found: torch.Tensor = step()
            assert self.syncs.total() == before, self.report()
            return found

        return replay

    def _threads(self) -> None:
        """Dispatch modes are of one thread: enter this one in threads that start meanwhile, too."""
        real = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            with Looker(self):
                real(thread)

        self._patch(threading.Thread, "run", run)
