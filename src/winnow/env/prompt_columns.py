"""Columns that other libraries make part of the prompt: shown by the chat template, or refused by name.

`tools` and `chat_template_kwargs` reach the chat template, as in TRL's data formats. Pictures are refused. A column of
`INSTRUCTION_COLUMNS` needs a reward function or an environment that reads it; the model would not be given it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from numbers import Real
from typing import Any

from .row_files import DataError, Row

PICTURES = ("images", "image", "videos", "video", "audios", "audio")
"""Columns that hold a part of the prompt in multimodal data."""
INSTRUCTION_COLUMNS = ("system", "system_prompt", "history", "input", "documents")
"""Columns that hold a part of the prompt in instruction data."""
TOOLS, VALUES = "tools", "chat_template_kwargs"
RENAME = "or rename the column if rewards or environments alone read it"


def is_empty(value: Any) -> bool:
    """Return whether a column has nothing: None, an empty text or list, or pandas' missing value."""
    missing = value is None or (isinstance(value, Real) and value != value)
    return missing or (isinstance(value, Sized) and len(value) == 0)


def refuse_pictures(row: Row, prompt_column: str, columns: Sequence[str] = PICTURES) -> None:
    """Raise DataError if the row has something in one of these columns."""
    for column in columns:
        if column != prompt_column and not is_empty(row.values.get(column)):
            raise DataError(
                f"{row.where}: column '{column}' is a part of the prompt that the model would not be given: only text "
                "reaches it. Remove the column, or rename it if rewards or environments alone read it"
            )


def template_values(row: Row, prompt_column: str, *, in_chat: bool) -> dict[str, Any]:
    """Return what a row gives to the chat template: `tools`, and the values of `chat_template_kwargs`.

    Both may be written as JSON. `in_chat`: the prompt is a list of messages. `tools` that are names, or belong to a
    row of plain text, are a column (see `unshown_columns`). Raises DataError naming the column.
    """
    variables: dict[str, Any] = {}
    for column, read in ((VALUES, _values), (TOOLS, _schemas)):
        given = row.values.get(column)
        if column == prompt_column or is_empty(given) or (column == TOOLS and _only_named(given, in_chat)):
            continue
        where = f"{row.where}: column '{column}'"
        values = read(_from_json(given, where), where)
        if values and not in_chat:
            raise DataError(
                f"{where} is for a chat template, and this prompt is plain text; give messages, or remove the column, "
                f"{RENAME}"
            )
        variables |= values
    return variables


def _only_named(tools: Any, in_chat: bool) -> bool:
    """Return whether `tools` are for an agent or a reward function: names, or anything where no template is used."""
    names = isinstance(tools, list | tuple) and all(isinstance(each, str) and each.isidentifier() for each in tools)
    return names or not in_chat


def _from_json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{where} is text but not JSON ({error}); correct it, {RENAME}") from None


def _values(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} must be an object of template variables, found {value!r:.60}; correct it, {RENAME}")
    if TOOLS in value or "messages" in value:
        raise DataError(f"{where}: tools and messages have columns of their own; move them there")
    return {name: each for name, each in value.items() if each is not None}  # parquet fills in the missing ones


def _schemas(value: Any, where: str) -> dict[str, Any]:
    schemas = [_without_none(_from_json(each, where)) for each in value] if isinstance(value, list | tuple) else None
    if schemas is None or not all(isinstance(schema, dict) and _name_of(schema) for schema in schemas):
        raise DataError(
            f"{where} must be a list of JSON schemas of functions, found {value!r:.60}; for a Python function, "
            f"transformers.utils.get_json_schema makes one; correct it, {RENAME}"
        )
    return {TOOLS: schemas} if schemas else {}


def _name_of(schema: Mapping[str, Any]) -> Any:
    function = schema.get("function", schema)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]


def tool_names(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(_name_of(schema)) for schema in schemas]


def _without_none(value: Any) -> Any:
    """Return a schema without the keys that parquet adds, filled with None."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value


def unshown_columns(row: Row, prompt_column: str, known: Sequence[str] = (), *, in_chat: bool = False) -> list[str]:
    """Return the columns that usually belong to a prompt and that this row's prompt, and the preset, leave out.

    `known`: the columns that the preset reads.
    """
    names = [name for name in INSTRUCTION_COLUMNS if name not in known]
    if _only_named(row.values.get(TOOLS), in_chat):
        names.append(TOOLS)
    return [name for name in names if name != prompt_column and not is_empty(row.values.get(name))]
