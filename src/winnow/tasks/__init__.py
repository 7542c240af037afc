"""Winnow's own environments, by their names in `env:` of a config. Their contract is `winnow.env.base`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module


class LazyTable(Mapping[str, type]):
    """Name -> class, imported on lookup: a worker process must start without torch and data libraries."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> type:
        module, _, attribute = self._targets[name].partition(":")
        found: type = getattr(import_module(module, __name__), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


ENVS: Mapping[str, type] = LazyTable(
    {
        "countdown": ".countdown:CountdownConfig",
        "reasoning_gym": ".reasoning_gym:ReasoningGymConfig",
        "dataset": "..env.dataset:DatasetConfig",
        "python_tool": ".python_tool:PythonToolConfig",
        "agent": ".agents:AgentConfig",
        "verifiers": ".agents.verifiers:VerifiersConfig",
        "textworld": ".games.textworld.task:TextWorldConfig",
        "alfworld": ".games.alfworld.task:AlfworldConfig",
    }
)
"""Name -> frozen dataclass of options with `build() -> Task`."""
