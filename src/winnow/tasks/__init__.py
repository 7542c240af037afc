"""Winnow's own environments, by their names in `env:` of a config. Their contract is `winnow.env.base`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name


class LazyTable(Mapping[str, type]):
    """Name -> class, imported on lookup: a worker process must start without torch and data libraries."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> type:
        found: type = resolve_name(f"winnow.{self._targets[name]}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


ENVS: Mapping[str, type] = LazyTable(
    {
        "countdown": "tasks.countdown:CountdownConfig",
        "reasoning_gym": "tasks.reasoning_gym:ReasoningGymConfig",
        "dataset": "env.dataset:DatasetConfig",
        "python_tool": "tasks.python_tool:PythonToolConfig",
        "agent": "tasks.agents:AgentConfig",
        "verifiers": "tasks.agents.verifiers:VerifiersConfig",
        "textworld": "tasks.games.textworld.task:TextWorldConfig",
        "alfworld": "tasks.games.alfworld.task:AlfworldConfig",
    }
)
"""Name -> frozen dataclass of options with `build() -> Task`."""
