"""Attributes that stand for something nested: numbered names, JSON in text, and values of any shape."""

from collections.abc import Iterator, Mapping
from typing import Any

from noria.services.proxy.wire.json_text import parse


def numbered(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Attributes `prefix.0.a.b`, `prefix.1.…` as a list of objects `{"a": {"b": …}}`, numbered lists inside as well."""
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        if not name.startswith(f"{prefix}."):
            continue
        *path, last = name[len(prefix) + 1 :].split(".", _MAX_PATH)
        node = tree
        for key in path:
            node = node.setdefault(key, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.setdefault(last, value)
    rows = _listed(tree)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


_MAX_PATH = 12
"""`llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments` has 7 steps behind its prefix."""


def _listed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inner = {key: _listed(value) for key, value in node.items()}
    if inner and all(key.isascii() and key.isdigit() and len(key) < 10 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def at(row: Any, *path: str) -> Any:
    """What stands at the end of a path of keys, None where it breaks off."""
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def json_value(value: Any) -> Any:
    """The value of JSON text; anything else, and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value.encode())
    except ValueError:
        return value


def object_of(value: Any) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects of a list; none for what is no list."""
    return (one for one in (value if isinstance(value, list | tuple) else ()) if isinstance(one, Mapping))
