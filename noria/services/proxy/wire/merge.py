"""How the pieces of a streamed value grow into the whole: text is joined, objects are merged, lists grow.

The OpenAI and Anthropic SDKs do the same with fields that they know; here it is the rule for those that nobody knows.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

_SAID_ONCE = frozenset({"id", "index", "type", "role", "name", "object", "status", "format", "model"})
"""Fields whose text is repeated where it comes again, never continued."""

_NEAR = 64
"""How far back a list is searched for the item that a piece continues."""


class _Text:
    """A text that grows, in its pieces: adding each to the one before would take quadratic time."""

    __slots__ = ("pieces",)

    def __init__(self, first: str) -> None:
        self.pieces = [first]


class Merger:
    """Grows the objects of one stream. Texts in them are whole after `settle`."""

    def __init__(self) -> None:
        self._texts: list[tuple[dict[str, Any], str, _Text]] = []

    def grow(self, whole: dict[str, Any], part: Mapping[str, Any]) -> None:
        """Take the next piece of an object in. Null says nothing new; numbers are replaced, as is what changes type."""
        for key, value in part.items():
            known = whole.get(key)
            if value is None:
                whole.setdefault(key, None)
            elif known is None:
                whole[key] = self.extended([], value) if isinstance(value, list) else value
            elif isinstance(value, str) and isinstance(known, str | _Text):
                self._continue(whole, key, value)
            elif isinstance(known, dict) and isinstance(value, dict):
                self.grow(known, value)
            elif isinstance(known, list):
                self.extended(known, value if isinstance(value, list) else [value])
            elif isinstance(value, list) and known:
                self.settle()
                whole[key] = [whole[key], *value]
            else:
                whole[key] = value

    def extended(self, whole: list[Any], part: list[Any]) -> list[Any]:
        """`whole` with the next items: those that say which item they continue (`index`) grow it, all others follow."""
        for item in part:
            known = _same(whole, item)
            if known is None:
                whole.append(item)
            else:
                self.grow(known, item)
        return whole

    def settle(self) -> None:
        """Make every text that has grown a `str` again."""
        for whole, key, text in self._texts:
            if whole.get(key) is text:
                whole[key] = "".join(text.pieces)
        self._texts.clear()

    def _continue(self, whole: dict[str, Any], key: str, value: str) -> None:
        known = whole[key]
        if key in _SAID_ONCE or not known:
            whole[key] = value or known
        elif isinstance(known, str):
            whole[key] = text = _Text(known)
            self._texts.append((whole, key, text))
            text.pieces.append(value)
        else:
            known.pieces.append(value)


def _same(whole: list[Any], item: Any) -> dict[str, Any] | None:
    index = item.get("index") if isinstance(item, dict) else None
    if not isinstance(index, int):
        return None
    near = islice(reversed(whole), _NEAR)
    return next((known for known in near if isinstance(known, dict) and known.get("index") == index), None)
