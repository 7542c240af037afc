"""vLLM servers as samplers: a process on the learner's machine for each server runs its rollouts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, PositiveInt
from pydantic.dataclasses import dataclass

from ..base.errors import ConfigError
from ..config.options import CHECKED, in_a_list
from ..engine.server.client import ServerError
from ..engine.server.options import ServerOptions, connect
from .base import PoolOptions, SamplerContext
from .pool import SamplerPool
from .processes import WEIGHTS, open_pipe
from .weights import PublishedWeights


@dataclass(frozen=True, config=CHECKED)
class Server(PoolOptions):
    """vLLM servers that you start yourself; they get new weights from files, also while rollouts run."""

    provides: ClassVar[frozenset[str]] = frozenset({"asynchronous", "own_engine"})

    url: Annotated[tuple[str, ...], BeforeValidator(in_a_list, json_schema_input_type=str | list[str])] = ()
    """Address of each server, e.g. http://127.0.0.1:8000."""
    slots: PositiveInt = 256
    """Sequences that run at once on each server."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ValueError("url: missing; give the address of a vLLM server, e.g. http://127.0.0.1:8000")
        for url in self.url:
            _require_address(url)
        if len(set(self.url)) < len(self.url):
            raise ValueError("url: one server is named twice; name each once")
        if self.samplers not in (1, len(self.url)):
            raise ValueError(f"samplers: {self.samplers}, but there is one for each of {len(self.url)} url; remove it")
        object.__setattr__(self, "samplers", len(self.url))

    def engine_of(self, slot: int) -> ServerOptions:
        return ServerOptions(self.url[slot], self.timeout_s, self.slots)

    def build(self, context: SamplerContext) -> SamplerPool:
        """Build the pool. Raises ConfigError when a server does not answer, or cannot sample for the run."""
        for slot in range(self.samplers):
            try:
                connect(self.engine_of(slot), wait_s=0.0)
            except ServerError as error:
                raise ConfigError(str(error)) from None
        transport = PublishedWeights(context.run_dir / WEIGHTS)
        return SamplerPool(
            self, context, transport, partial(open_pipe, threads=self.threads, entry=f"{context.entry}:main")
        )


def _require_address(url: str) -> None:
    """Raise ValueError unless it is the root of a server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"url: {url!r} is not the address of a server; expected e.g. http://127.0.0.1:8000")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"url: {url!r} is the path of one interface; leave out /v1")
