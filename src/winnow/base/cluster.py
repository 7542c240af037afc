"""Ray cluster of a run, joined by its address or started on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import install, usable_cores

HOLD_S = 30.0
"""Timeout for starting the process that holds a GPU."""
ANSWER_S = 5.0
"""Timeout for the cluster's head to answer."""

AT_IMPORT = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
PRIVATE = ("HF_TOKEN", *_PROXIES, *(name.lower() for name in _PROXIES))

TOKEN = "RAY_AUTH_TOKEN"
TOKENS = (
    "if the cluster asks for a token, give this machine the one that `ray get-auth-token` prints on the head, in "
    f"~/.ray/auth_token or {TOKEN}"
)

OWN: list[Path] = []
"""Ray's session directory of the cluster started by this process."""


class ClusterError(ValueError):
    """No cluster, or not enough resources on it."""


def join(key: str, address: str | None, cores: int = 1) -> None:
    """Connect this process to Ray, once. A cluster started here gets at least `cores` CPUs.

    `key`: configuration key named in errors. Raises ClusterError when Ray is not installed or no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ClusterError(f"{key}: ray is not installed; {install('ray')}")
    import ray

    if ray.is_initialized():
        return
    given = address or os.environ.get("RAY_ADDRESS")
    host_port = re.fullmatch(r"(.+):(\d+)", given or "")
    if host_port and "://" not in host_port[0]:
        try:  # Ray itself retries for minutes
            socket.create_connection((host_port[1].strip("[]"), int(host_port[2])), timeout=ANSWER_S).close()
        except OSError as error:
            raise ClusterError(
                f"{key}: ray_address={given}: no answer ({error}); start the cluster, or correct the address"
            ) from None
    own = {} if given else {"num_cpus": max(cores, usable_cores())}
    try:
        with _token(own=not given):
            # "local": otherwise Ray joins any cluster already running on this machine.
            where = address or (None if given else "local")
            started = ray.init(where, log_to_driver=False, include_dashboard=False, **own)
            if not given:
                OWN.append(Path(started.address_info["session_dir"]))
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        what = f"{key}: ray_address={given}: {str(error).splitlines()[0]}"
        raise ClusterError(what + ("; " + TOKENS if given else "")) from None


@contextlib.contextmanager
def _token(*, own: bool) -> Iterator[None]:
    """Authenticate with the user's token to a joined cluster, with a throwaway to one of our `own`.

    For its first local cluster Ray would write a token to the home directory. It would then refuse to join clusters
    by address without RAY_AUTH_MODE=token. A cluster without tokens accepts any.
    """
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
        from ray._raylet import AuthenticationTokenLoader
    except ImportError:  # older Ray, without tokens
        yield
        return
    tokens = AuthenticationTokenLoader.instance()
    tokens.reset_cache()
    throwaway = own and not tokens.has_token(ignore_auth_mode=True)
    if throwaway:
        os.environ[TOKEN] = secrets.token_hex(32)
    elif not own:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        yield
    finally:
        if throwaway:
            del os.environ[TOKEN]


def discard() -> None:
    """Shut down the cluster started by this process and delete its files."""
    while OWN:
        import ray

        ray.shutdown()
        shutil.rmtree(OWN.pop(), ignore_errors=True)


def gpus_each(given: float | None, device: str, usual: int = 1) -> float:
    """Return the GPUs of a sampler or rank: `given`, else `usual` if the cluster has any and `device` is not cpu."""
    import ray

    if given is not None:
        return given
    return float(usual) if device != "cpu" and ray.cluster_resources().get("GPU", 0.0) else 0.0


def actor_options(threads: int, gpus: float | None, place: Any) -> dict[str, Any]:
    """Return the options of an actor that Ray never restarts, with variables that libraries read at import.

    `place`: Ray's scheduling strategy. Ray logs the variables; actors set `private_environment` themselves.
    """
    passed = {name: os.environ[name] for name in AT_IMPORT if name in os.environ}
    return {
        "num_cpus": threads,
        "num_gpus": gpus,
        "scheduling_strategy": place,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)} | passed},
    }


def private_environment(names: Sequence[str]) -> dict[str, str]:
    """Return variables that actors need and that may be secret: `names`, the hub's token, proxies."""
    return {name: os.environ[name] for name in (*PRIVATE, *names) if name in os.environ}


def hold_gpu(index: int) -> Any:
    """Return an actor that keeps Ray from giving this process's GPU to others; None if Ray has no GPUs here.

    `index`: as this process numbers its GPUs. Raises ClusterError when other work holds the GPU.
    """
    import ray

    here, count = ray.get_runtime_context().get_node_id(), gpus_here()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    mine = visible[index] if visible else str(index)
    held = []
    try:
        for _ in range(count):
            there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
            options = ray.remote(_Holder).options(num_cpus=0, num_gpus=1, max_restarts=0, scheduling_strategy=there)
            held.append(options.remote())
            if mine in ray.get(held[-1].gpus.remote(), timeout=HOLD_S):
                return held.pop()
    except ray.exceptions.GetTimeoutError:
        pass
    finally:
        for other in held:
            release(other)
    if not count:
        return None
    raise ClusterError(
        f"device: cuda:{index}: another job of the Ray cluster holds this GPU; set another device, or end that job"
    )


def gpus_here() -> int:
    """Return the number of GPUs Ray has on this node."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    for node in alive_nodes():
        if node["NodeID"] == here:
            return int(node["Resources"].get("GPU", 0))
    return 0


def release(held: Any) -> None:
    """Release the GPU that `hold_gpu` holds."""
    import ray

    if held is not None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.kill(held)


class _Holder:
    def gpus(self) -> list[str]:
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


def alive_nodes() -> list[dict[str, Any]]:
    """Return live nodes as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def node_name(node: Mapping[str, Any]) -> str:
    """Return a node's address and the start of its id; several nodes may share an address."""
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
