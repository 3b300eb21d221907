"""Streamed tool calls: which call a delta belongs to, and how it grows."""

from collections.abc import Mapping
from typing import Any

from noria.services.proxy.wire.json_text import to_text
from noria.services.proxy.wire.merge import Merger


class _Growing:
    """One call, and the `index` under which the stream names it."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.call: dict[str, Any] = {}

    @property
    def name(self) -> Any:
        function = self.call.get("function")
        return function.get("name") if isinstance(function, dict) else None


class ToolCalls:
    """The calls of one message, in whatever order and with whatever names their deltas come.

    A delta belongs to the call with its `index`; without one to the call with its `id`; without either to the last
    call. It begins a new call where none fits, where `index` is known but its id is new and it brings a name (Gemini
    sends every parallel call as index 0), and where without index and id it brings a name and the last call has one.
    """

    def __init__(self, merger: Merger) -> None:
        self._merger = merger
        self._calls: list[_Growing] = []
        self._by_index: dict[int, _Growing] = {}
        self._by_id: dict[str, _Growing] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Take one delta in."""
        growing = self._find(delta)
        call = growing.call
        for key, value in delta.items():
            if key == "id":
                call[key] = call.get(key) or value
                if isinstance(value, str) and value:
                    self._by_id.setdefault(value, growing)
            elif key == "function" and isinstance(value, dict):
                if not isinstance(call.get(key), dict):
                    call[key] = {}
                grow_function(self._merger, call[key], value)
            elif key != "index":
                self._merger.grow(call, {key: value})

    def whole(self) -> list[dict[str, Any]]:
        """The calls by index; those without one stand where they began."""
        places = [(place if one.index is None else one.index, place) for place, one in enumerate(self._calls)]
        return [self._calls[place].call for _, place in sorted(places)]

    def _find(self, delta: Mapping[str, Any]) -> _Growing:
        index = delta.get("index")
        index = index if isinstance(index, int) else None
        fit = self._known(index, delta)
        if fit is None:
            fit = _Growing(index)
            self._calls.append(fit)
            if index is not None:
                self._by_index[index] = fit
        return fit

    def _known(self, index: int | None, delta: Mapping[str, Any]) -> _Growing | None:
        said = delta.get("id")
        new_id = said if isinstance(said, str) and said else None
        function = delta.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if index is not None:
            fit = self._by_index.get(index)
            if fit is not None and new_id and name and fit.call.get("id") not in (None, "", new_id):
                fit = self._by_id.get(new_id)
            return fit
        last = self._calls[-1] if self._calls else None
        if new_id:
            fit = self._by_id.get(new_id)
            return last if fit is None and last is not None and not name and not last.call.get("id") else fit
        return None if last is not None and name and last.name else last


def grow_function(merger: Merger, function: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Take a piece of `{"name": …, "arguments": …}` in.

    A name that is said again in every delta is said once. Arguments are text that grows; where a server sends them as
    an object, they stay one, unless text stands before them.
    """
    for key, value in delta.items():
        known = function.get(key)
        if key == "name" and isinstance(known, str) and isinstance(value, str):
            function[key] = known if value == known else known + value
        elif key == "arguments" and isinstance(value, dict | list) and known and not isinstance(known, dict | list):
            merger.grow(function, {key: to_text(value)})
        elif key == "arguments" and isinstance(known, dict | list) and value == "":
            continue
        else:
            merger.grow(function, {key: value})
