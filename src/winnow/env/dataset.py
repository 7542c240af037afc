"""Prompts from any data set with a `prompt` column; every other column is passed to the reward functions by name."""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from ..base.dotted import nearest
from ..config.paths import on_texts, tilde
from ..types import Message, Prompt
from .base import OneTurn, RewardFn
from .chat import is_begun
from .presets import OF_MATH, PRESETS, READ
from .prompt_columns import refuse_pictures, template_values, unshown_columns
from .prompt_store import Store, StoredPrompts, content_of
from .rewards.math import math_reward, same_answers
from .rewards.scores import STANDARD
from .row_files import DataError, Row
from .rows import has_splits, may_be_sliced, read_rows, rows_of
from .synthetic_data import PREFIX

PRESET_COLUMNS = {"instruction": "alpaca", "conversations": "sharegpt"}
"""Columns by which rows of a preset are known."""
OF_WHOLE_CHATS = ("messages", "conversations")
"""Columns that usually hold the solution, too."""
MAX_IDS = 5
"""Ids named in an error message."""


@dataclass(frozen=True)
class DatasetConfig:
    """Files or a Hugging Face data set with a `prompt` column, or in the format of a preset."""

    path: str | list[str]
    """`.jsonl`, `.json`, `.csv` (each also `.gz`) or `.parquet` file(s) or globs, a directory of `save_to_disk`, or a
    directory or hub name for `datasets.load_dataset`."""
    test: str | list[str] | None = None
    """Held-out data in the same form; an error if it shares prompts with `path`."""
    test_size: int | float = 0
    """Hold out this many prompts (a share if below 1), chosen by a hash of their content."""
    preset: str | None = None
    """A known format: gsm8k, math, dapo_math, verl, verifiers, alpaca, sharegpt."""
    prompt_column: str = "prompt"
    id_column: str = "id"
    """Used when present; otherwise ids are hashes of the prompts."""
    system_prompt: str | None = None
    """System message added before every prompt."""
    prompt_format: Literal["as_is", "text"] = "as_is"
    """`text` joins messages into plain text, for models without chat template."""
    split: str = "train"
    """Split of a Hugging Face data set to train on; also a part of one, such as `train[:4]` or `train[10%:]`."""
    test_split: str = "test"
    """Split of a Hugging Face data set for `test`."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("dataset: path is empty")
        if self.preset is not None and self.preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(
                f"dataset: unknown preset '{self.preset}'.{nearest(self.preset, list(PRESETS))} All: {known}"
            )
        if self.test is None and self.test_split != "test":
            raise ValueError("dataset: test_split has no effect without test; give test, e.g. the same name as path")
        train, test = ([p] if isinstance(p, str) else p or [] for p in (self.path, self.test))
        subsets = [source for source in (*train, *test) if not source.startswith(PREFIX)]
        for key, sources in (("split", train), ("test_split", test), ("subset", subsets)):
            if "[" in (getattr(self, key) or "") and key != "subset":
                if whole := [source for source in sources if not may_be_sliced(source)]:
                    raise ValueError(
                        f"dataset: {key}: {getattr(self, key)} selects from Hugging Face data sets, and {whole[0]} is "
                        "none; put the rows you want into a file of their own, or pass them in Python: "
                        "train_dataset=rows[:4]"
                    )
                continue
            if getattr(self, key) != getattr(DatasetConfig, key) and not any(map(has_splits, sources)):
                raise ValueError(f"dataset: {key} has no effect on a file or a data set without splits; remove it")
        if self.test is not None and self.test_size:
            raise ValueError("dataset: give either test or test_size, not both")
        if self.test_size < 0 or (self.test_size >= 1 and self.test_size != int(self.test_size)):
            raise ValueError(f"dataset: test_size must be a share below 1 or a whole number, got {self.test_size}")
        if self.system_prompt is not None and self.prompt_format == "text":
            raise ValueError("dataset: system_prompt makes chat messages and has no effect with prompt_format: text")

    def build(self) -> DatasetTask:
        train = read_rows(self.path, self.split, self.subset)
        test = None if self.test is None else read_rows(self.test, self.test_split, self.subset)
        return DatasetTask(self, train, test)

    def with_rows(self, train: Iterable[Any], test: Iterable[Any] | None = None) -> DatasetTask:
        """Return the task of Python rows instead of `path`: a `datasets.Dataset`, a pandas data frame or any iterable
        of mappings, read to its end. Raises DataError naming the row."""
        if test is not None and self.test_size:
            raise DataError("eval_dataset: has held-out rows, so test_size has no effect; remove one of them")
        rows = rows_of(train, "train_dataset")
        return DatasetTask(self, rows, None if test is None else rows_of(test, "eval_dataset"))


class DatasetTask(OneTurn):
    """Task with training and held-out rows. Raises DataError naming file and line for unusable data."""

    name = "dataset"

    def __init__(self, config: DatasetConfig, train: Iterable[Row], test: Iterable[Row] | None = None) -> None:
        self.config = config
        self.reward_funcs: list[RewardFn] = [math_reward] if config.preset in OF_MATH else []
        self.unshown_columns: dict[str, str] = {}
        """Columns that usually belong to the prompt but are not in it, and the first row of each."""
        self._fingerprint: str | None = None
        self.train = StoredPrompts(self._stored(train), config.prompt_column)
        self.test: Sequence[Prompt] = []
        if test is not None:
            self.test = held_out = StoredPrompts(self._stored(test), config.prompt_column)
            _refuse_overlap(self.train, held_out, "eval_dataset" if config.test is None else "test")
        elif config.test_size:
            self.train, self.test = _split(self.train, config.test_size)
        self._warn_of_duplicates()

    def _stored(self, rows: Iterable[Row]) -> Store:
        """Store the rows with their prompts, read once. Raises DataError naming the row."""
        config = self.config
        store = Store()
        as_json: list[str] = []
        answered: list[str] = []
        convert = PRESETS[config.preset] if config.preset is not None else None
        for row in rows:
            if convert is not None:
                row = Row(row.place, row.number, convert(row))
            text, messages = _prompt_of(row, config, as_json)
            if config.prompt_column in OF_WHOLE_CHATS and messages is not None and is_begun(messages):
                answered.append(row.where)
            refuse_pictures(row, config.prompt_column)
            values = template_values(row, config.prompt_column, in_chat=messages is not None)
            known = READ.get(config.preset or "", ())
            for column in unshown_columns(row, config.prompt_column, known, in_chat=messages is not None):
                self.unshown_columns.setdefault(column, row.where)
            if reserved := set(STANDARD).intersection(row.values):
                raise DataError(
                    f"{row.where}: a column must not be called '{min(reserved)}', an argument of reward functions"
                )
            store.add(row, _given_id(row, config), text, messages, values)
        store.finish()
        if answered:
            warnings.warn(
                f"{answered[0]}: '{config.prompt_column}' ends in an assistant's turn, as in {len(answered)} of "
                f"{len(store)} rows, and the policy continues it; if it is the solution, leave it out of the prompt",
                stacklevel=2,
            )
        if as_json:
            warnings.warn(
                f"{as_json[0]}: '{config.prompt_column}' is a list of messages written as text, as in {len(as_json)} "
                f"of {len(store)} rows; it is read as messages. Store lists to be rid of this warning",
                stacklevel=2,
            )
        return store

    def answers(self, prompt: Prompt, texts: Sequence[str]) -> list[str | None]:
        """Return last boxed or marked answers, as in mathematics: equal in value, however written."""
        return same_answers(texts)

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            own = {field.name: getattr(self.config, field.name) for field in fields(DatasetConfig)}
            own = {key: on_texts(value, tilde) for key, value in own.items()}
            digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode())
            encode = json.JSONEncoder(sort_keys=True, default=str).encode
            for part in (self.train, self.test):
                for prompt in part:
                    digest.update(encode([prompt.id, content_of(prompt), self._identity(prompt)]).encode())
                digest.update(b"\n")
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _identity(self, prompt: Prompt) -> Mapping[str, Any]:
        """Return the columns of a prompt that the fingerprint counts."""
        return prompt.columns

    def _warn_of_duplicates(self) -> None:
        first_N = _first_with(self.train.digests())
        repeated = np.flatnonzero(first_N != np.arange(len(first_N)))
        if len(repeated):
            one = int(repeated[0])
            warnings.warn(
                f"{self.config.path}: {len(repeated)} of {len(self.train)} prompts repeat an earlier one, e.g. "
                f"'{self.train[one].id}' repeats '{self.train[int(first_N[one])].id}'; they are kept",
                stacklevel=2,
            )


def written_messages(text: str) -> list[Any] | None:
    """Return messages written as JSON or Python text; None for anything else."""
    if text.lstrip()[:1] not in ("[", "{") or "role" not in text or "content" not in text:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        messages = [value] if isinstance(value, dict) else value
        if messages and all(map(_is_message, messages)):
            return list(messages)
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _given_id(row: Row, config: DatasetConfig) -> str | None:
    value = row.values.get(config.id_column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{row.where}: '{config.id_column}' must be text or a whole number, found {value!r:.60}")
    return str(value)


def _prompt_of(row: Row, config: DatasetConfig, as_json: list[str]) -> tuple[str | None, tuple[Message, ...] | None]:
    """Return the text or the messages of a row; add its place to `as_json` if its messages are written as text.

    Raises DataError.
    """
    column = config.prompt_column
    if column not in row.values:
        has = list(row.values)
        presets = [f"use preset: {name}" for known, name in PRESET_COLUMNS.items() if known in has]
        preset = presets[0] if presets else "choose a preset"
        raise DataError(
            f"{row.where}: no column '{column}' (columns: {', '.join(sorted(has))}).{nearest(column, has)} "
            f"Name it with prompt_column, or {preset}"
        )
    value = row.values[column]
    if isinstance(value, str) and (written := written_messages(value)) is not None:
        as_json.append(row.where)
        value = written
    if isinstance(value, str):
        _check_text(value, f"{row.where}: '{column}'")
        if config.system_prompt is None:
            return value, None
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{row.where}: '{column}' must be text or a list of messages, found {value!r:.60}")
    messages = [_message(m, f"{row.where}: '{column}', message {i}") for i, m in enumerate(value, start=1)]
    if not any(str(m.get("content") or "").strip() for m in messages):
        raise DataError(f"{row.where}: '{column}' has no message with text")
    if config.prompt_format == "text":
        texts = [_plain_content(m, row.where) for m in messages]
        return "\n\n".join(text for text in texts if text.strip()), None
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError(f"{row.where}: has a system message already; remove that, or system_prompt")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return None, tuple(messages)


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        remedy = "; use preset: sharegpt" if isinstance(value, dict) and {"from", "value"} <= value.keys() else ""
        raise DataError(f'{where}: expected {{"role": ..., "content": ...}}, found {value!r:.60}{remedy}')
    message = {k: v for k, v in value.items() if v is not None}
    content: Any = message.get("content")
    parts = isinstance(content, list) and bool(content) and all(isinstance(part, dict) for part in content)
    calls = isinstance(message.get("tool_calls"), list) and content is None
    may_be_empty = bool(message.get("tool_calls")) or message["role"] not in ("user", "assistant")
    if isinstance(content, str):
        if content.strip() or not may_be_empty:
            _check_text(content, where)
    elif parts:
        for part in content:
            if not isinstance(part.get("text"), str):
                kind = part.get("type")
                raise DataError(f"{where}: a part of type '{kind}' does not reach the model, only text does; remove it")
    elif not calls:
        raise DataError(f"{where}: 'content' must be text or a list of parts, found {value.get('content')!r:.60}")
    return message


def _plain_content(message: Message, where: str) -> str:
    if not isinstance(message.get("content"), str):
        raise DataError(f"{where}: prompt_format: text needs messages of plain text")
    return str(message["content"])


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise DataError(f"{where} is empty")
    if "\0" in text:
        raise DataError(f"{where} contains a NUL character")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where} contains a lone surrogate ({text[error.start]!r}), which is not text") from None


def _first_with(digests_N: np.ndarray) -> np.ndarray:
    """Return int64 [N]: for each row, the first row with the same content."""
    _, first, inverse_N = np.unique(digests_N, return_index=True, return_inverse=True)
    first_N: np.ndarray = first[inverse_N]
    return first_N


def _refuse_overlap(train: StoredPrompts, test: StoredPrompts, key: str) -> None:
    first_N = _first_with(np.concatenate([train.digests(), test.digests()]))
    shared = np.flatnonzero(first_N[len(train) :] < len(train)).tolist()
    if shared:
        named = ", ".join(test[i].id for i in shared[:MAX_IDS])
        more = f" and {len(shared) - MAX_IDS} more" if len(shared) > MAX_IDS else ""
        raise DataError(
            f"{key}: {len(shared)} of {len(test)} prompts are also in the training data: {named}{more}; remove them "
            "from one side, or use test_size"
        )


def _split(prompts: StoredPrompts, test_size: int | float) -> tuple[StoredPrompts, StoredPrompts]:
    """Return train and test without a shared prompt: the contents with the lowest hashes are held out."""
    contents, rank_N = np.unique(prompts.digests(), return_inverse=True)
    different = len(contents)
    n = round(test_size * different) if test_size < 1 else int(test_size)
    if not 0 < n < different:
        raise DataError(f"test_size={test_size} would hold out {n} of {different} different prompts")
    return prompts.part(rank_N >= n), prompts.part(rank_N < n)
