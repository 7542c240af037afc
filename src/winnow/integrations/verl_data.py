"""verl's training rows as a Winnow task: what selectors know of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..base.errors import ConfigError
from ..env.chat import messages_in
from ..env.dataset import DatasetConfig, DatasetTask, written_messages
from ..env.prompt_columns import TOOLS, VALUES, template_values
from ..env.prompt_store import Store
from ..env.row_files import DataError, Row
from ..env.rows import rows_of
from ..types import Prompt

FILES = "data.train_files"
IDENTITY = ("data_source", "reward_model")
"""Columns that belong to the identity of a prompt, as its text does; others are for selectors."""
READ = (*IDENTITY, "extra_info", "id", TOOLS, VALUES)
"""Columns that are read in any form; others only if they are texts or numbers."""


class VerlRows(DatasetTask):
    """Rows of verl's data set in its order. Ids of prompts are those of `winnow pass-rates`.

    Its columns are texts and numbers, of the row and of `extra_info`, and `reward_model`. Raises DataError naming a row
    without a prompt.
    """

    def __init__(self, rows: Iterable[Any], prompt_key: str = "prompt") -> None:
        self._prompt_key = prompt_key
        super().__init__(DatasetConfig(path=FILES), rows_of(rows, FILES))

    def require_batch(self, size: int) -> None:
        """Raise ConfigError if verl, which drops incomplete batches, would train no step."""
        if len(self.train) < size:
            raise ConfigError(
                f"{FILES}: {len(self.train)} prompts, but a batch has {size} (data.train_batch_size): verl would train "
                "no step; give more prompts, or lower data.train_batch_size"
            )

    def _stored(self, rows: Iterable[Row]) -> Store:
        store = Store()
        for row in rows:
            prompt = row.values.get(self._prompt_key)
            if isinstance(prompt, str):
                prompt = written_messages(prompt) or prompt
            if self._prompt_key not in row.values:
                has = ", ".join(sorted(row.values))
                raise DataError(f"{row.where}: no column '{self._prompt_key}' (columns: {has}); set data.prompt_key")
            text = prompt if isinstance(prompt, str) else None
            messages = messages_in(prompt)
            if text is None and messages is None:
                raise DataError(f"{row.where}: '{self._prompt_key}' must be text or messages, not {prompt!r:.60}")
            columns = _columns(row.values, self._prompt_key)
            shown = _shown(row, self._prompt_key, in_chat=messages is not None)
            store.add(Row(row.place, row.number, columns), _own_id(row), text, messages, shown)
        store.finish(may_repeat=True)
        return store

    def _identity(self, prompt: Prompt) -> Mapping[str, Any]:
        return {name: prompt.columns.get(name) for name in IDENTITY}


def _own_id(row: Row) -> str | None:
    value = row.values.get("id")
    usable = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value) if usable else None  # `winnow pass-rates` refuses others


def _shown(row: Row, prompt_key: str, *, in_chat: bool) -> dict[str, Any]:
    """Return what the row gives to the chat template of `winnow pass-rates`: a part of the id."""
    try:
        return template_values(row, prompt_key, in_chat=in_chat)
    except DataError:
        return {}  # refused there, but verl does not read these columns


def _columns(values: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    extra = values.get("extra_info")
    named = {**(extra if isinstance(extra, Mapping) else {}), **values}
    del named[prompt_key]
    return {name: value for name, value in named.items() if name in IDENTITY or isinstance(value, str | int | float)}
