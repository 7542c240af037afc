"""JSON Schema of the configuration, read from the method tables."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from ..config import METHODS, RunConfig
from ..run.resolved import AUTO, TABLES

OWN = {"type": "string", "pattern": ":", "description": "A class of your own: module:Class or file.py:Class."}


def config_schema() -> dict[str, Any]:
    """Return the schema (Draft 2020-12) of a YAML file for `winnow train`, with options and defaults of each method."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Winnow run"
    keys: list[tuple[str, str, TypeAdapter[Any]]] = [
        (field, name, TypeAdapter(cls)) for field, table in TABLES.items() for name, cls in table.items()
    ]
    found, shared = TypeAdapter.json_schemas([((f, n), "validation", adapter) for f, n, adapter in keys])
    schema.setdefault("$defs", {}).update(shared.get("$defs", {}))
    for field in METHODS:
        specs = [_spec(name, schema["$defs"], found[(field, name), "validation"]) for name in TABLES[field]]
        if field == "engine":
            specs.append({"properties": {"name": {"const": AUTO}}, "required": ["name"], "title": AUTO})
        own = [AUTO] if field == "engine" else []
        names = {"enum": own + list(TABLES[field]), "description": f"One of `winnow methods`, under {field}."}
        one = {"anyOf": [names, OWN, *specs]}
        given = schema["properties"][field]
        kinds = {"array" if part.get("type") == "array" else "one" for part in given.get("anyOf", [given])}
        many = {"type": "array", "items": one}
        shape: dict[str, Any] = {"anyOf": [one, many]}
        if len(kinds) == 1:
            shape = many if kinds == {"array"} else one
        schema["properties"][field] = {k: given[k] for k in ("default", "title") if k in given} | shape
    schema["properties"]["variants"] = {
        "type": "object",
        "description": "Keys by the name of a variant: `variant=NAME` takes one.",
        "additionalProperties": {"type": "object"},
    }
    return schema


def _spec(name: str, defs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a method as a section: its name and its options."""
    body = dict(defs[options["$ref"].rpartition("/")[2]]) if "$ref" in options else dict(options)
    body["properties"] = {"name": {"const": name}} | body.get("properties", {})
    body["required"] = ["name", *body.get("required", [])]
    return body | {"additionalProperties": False, "title": name}
