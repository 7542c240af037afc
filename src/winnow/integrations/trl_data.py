"""TRL's `train_dataset` as a Winnow task."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from ..env.chat import messages_in
from ..env.dataset import DatasetConfig, DatasetTask
from ..env.prompt_columns import TOOLS, VALUES, is_empty, refuse_pictures
from ..env.prompt_store import Store
from ..env.row_files import DataError, Row
from ..env.rows import rows_of
from ..types import Message

PICTURES = ("image", "images")
"""Columns that TRL gives to the model."""


class TrlRows(DatasetTask):
    """Rows as TRL accepts them: any column, ids that repeat, empty messages, and no prompt if an environment gives it.

    Raises DataError naming a row without a prompt, or with a picture.
    """

    def __init__(self, rows: Iterable[Any], *, environments: bool) -> None:
        """`environments`: TRL has an `environment_factory`."""
        self._environments = environments
        super().__init__(DatasetConfig(path="train_dataset"), rows_of(rows, "train_dataset"))

    def row(self, ordinal: int) -> dict[str, Any]:
        """Return a row as it was read."""
        return dict(self._store[ordinal].columns)

    def _stored(self, rows: Iterable[Row]) -> Store:
        self._store = Store()
        unshown: dict[str, str] = {}
        for row in rows:
            for column in (TOOLS, VALUES):
                if not is_empty(row.values.get(column)):
                    unshown.setdefault(column, row.where)
            refuse_pictures(row, self.config.prompt_column, PICTURES)
            text, messages = self._prompt(row)
            given = row.values.get("id")
            own_id = str(given) if isinstance(given, str | int) and given != "" else None
            has_words = bool((text or "").strip()) or any(message.get("content") for message in messages or ())
            if own_id is None and not has_words:
                own_id = f"row-{row.number}"  # rows that differ only in their position
            self._store.add(row, own_id, text, messages)
        for column, where in unshown.items():
            warnings.warn(
                f"{where}: TRL's GRPOTrainer does not give column '{column}' to the chat template; give "
                + ("tools=[...] to the trainer" if column == TOOLS else "chat_template_kwargs in GRPOConfig"),
                stacklevel=2,
            )
        self._store.finish(may_repeat=True)
        return self._store

    def _prompt(self, row: Row) -> tuple[str | None, tuple[Message, ...] | None]:
        """Return the text or messages of a row; neither if an environment gives the prompt."""
        value = row.values.get("prompt")
        if isinstance(value, str):
            return value, None
        messages = messages_in(value)
        if messages is not None or self._environments:
            return None, messages
        if "prompt" not in row.values:
            raise DataError(f"{row.where}: no column 'prompt' (columns: {', '.join(sorted(row.values))}); rename one")
        raise DataError(f"{row.where}: 'prompt' must be text or a list of messages, not {value!r:.60}")

    def _warn_of_duplicates(self) -> None:
        if not self._environments:
            super()._warn_of_duplicates()
