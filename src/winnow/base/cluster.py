"""A Ray cluster to work on: joined, or started on this machine."""

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

from .install import install

ANSWER_S = 5.0
"""Most that the head of a cluster may take to answer."""

TOKEN = "RAY_AUTH_TOKEN"
TOKENS = (
    "if the cluster asks for a token, give this machine the one that `ray get-auth-token` prints on the head, in "
    f"~/.ray/auth_token or {TOKEN}"
)

OWN: list[Path] = []
"""Ray's folder of the cluster that this process has started."""


class ClusterError(ValueError):
    """There is no cluster, or no room on it."""


def join(key: str, address: str | None, specs: Sequence[str | Mapping[str, Any]]) -> None:
    """Connect this process, once. A cluster started here has room for all that `specs` ask for.

    `key`: of the configuration, for errors. Raises ClusterError when Ray is not installed or no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ClusterError(f"{key}: ray is not installed; {install('ray')}")
    import ray

    if ray.is_initialized():
        return
    elsewhere = address or os.environ.get("RAY_ADDRESS")
    if elsewhere and (host_port := re.fullmatch(r"(.+):(\d+)", elsewhere)) and "://" not in elsewhere:
        try:  # Ray itself would ask for minutes
            socket.create_connection((host_port[1].strip("[]"), int(host_port[2])), timeout=ANSWER_S).close()
        except OSError as error:
            raise ClusterError(f"{key}: ray_address={elsewhere}: nobody answers there ({error})") from None
    cores = {} if elsewhere else {"num_cpus": max(sum(map(_cores, specs)), os.cpu_count() or 1)}
    try:
        with _token(own=not elsewhere):
            # "local", or Ray would join whatever it finds running on this machine.
            where = address or (None if elsewhere else "local")
            started = ray.init(where, log_to_driver=False, include_dashboard=False, **cores)
            if not elsewhere:
                OWN.append(Path(started.address_info["session_dir"]))
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        what = f"{key}: ray_address={elsewhere}: {str(error).splitlines()[0]}"
        raise ClusterError(what + ("; " + TOKENS if elsewhere else "")) from None


@contextlib.contextmanager
def _token(*, own: bool) -> Iterator[None]:
    """Authenticate to a cluster that is joined with the user's token, and to one of our `own` with a throwaway.

    Ray by itself would write a token to the home directory for its first local cluster, and then refuse to join
    clusters by their address without RAY_AUTH_MODE=token. A cluster without tokens accepts any.
    """
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
        from ray._raylet import AuthenticationTokenLoader
    except ImportError:  # Ray before it had tokens
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
    """End a cluster that this process has started, with its files."""
    while OWN:
        import ray

        ray.shutdown()
        shutil.rmtree(OWN.pop(), ignore_errors=True)


def _cores(spec: str | Mapping[str, Any]) -> int:
    """That a sync or a learner may ask for; one that is no part of the cluster counts, too."""
    options: Mapping[str, Any] = {} if isinstance(spec, str) else spec
    members = options.get("samplers", options.get("ranks", 2))
    return int(members) * int(options.get("threads", 1))


def require(key: str, who: str, **needed: float) -> None:
    """Raises ClusterError when the whole cluster has less than `needed` of a resource."""
    import ray

    there = ray.cluster_resources()
    for kind, amount in needed.items():
        if amount > there.get(kind, 0.0):
            raise ClusterError(f"{key}: {who} need {amount:g} {kind}s, and the cluster has {there.get(kind, 0.0):g}")


def alive_nodes() -> list[dict[str, Any]]:
    """Nodes as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def node_name(node: Mapping[str, Any]) -> str:
    """Address and the beginning of its id: several nodes may have one address."""
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
