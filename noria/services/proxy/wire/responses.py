"""`POST /v1/responses` of OpenAI: fold its events into the response, say how it ended.

Events: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from collections.abc import Mapping
from typing import Any

from noria.services.proxy.wire.api import Answer, Api, error_type_of
from noria.services.proxy.wire.merge import Merger
from noria.services.proxy.wire.responses_events import unfold

_WITH_RESPONSE = frozenset(
    f"response.{state}" for state in ("created", "queued", "in_progress", "completed", "failed", "incomplete")
)
_LAST = frozenset({"response.completed", "response.failed", "response.incomplete"})


class ResponseAssembler:
    """Folds the events into the response that an unstreamed call would have returned.

    The last event holds the whole response; what came item by item counts where that event is missing, or where it
    leaves its output empty, as some servers do.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._response: Answer = {}
        self._items: dict[int, dict[str, Any]] = {}
        self._done: set[int] = set()
        self._error: str | None = None
        self._over = False
        self._merger = Merger()

    @property
    def error(self) -> str | None:
        """The type of the error that the upstream reported in mid-stream."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether the event has come that holds the whole response."""
        return self._over

    @property
    def over(self) -> bool:
        """The same: nothing else says that a response is whole."""
        return self._over

    def add(self, name: str, chunk: dict[str, Any]) -> None:
        """Take one event in."""
        kind = chunk.get("type") or name
        if kind in _WITH_RESPONSE:
            self._response = dict(chunk["response"])
            self._over = kind in _LAST
        elif kind == "error" or name == "error" or (not name and "error" in chunk and "type" not in chunk):
            error = chunk.get("error")
            self._error = error_type_of(error if error else {"code": chunk.get("code")}, "error_in_stream")
            self._response["error"] = error or {key: chunk.get(key) for key in ("code", "message", "param")}
        elif kind == "response.output_item.added":
            self._items[_place(chunk, "output_index")] = dict(chunk["item"])
        elif kind == "response.output_item.done":
            self._items[_place(chunk, "output_index")] = dict(chunk["item"])
            self._done.add(_place(chunk, "output_index"))
        elif isinstance(kind, str) and "output_index" in chunk:
            place = _place(chunk, "output_index")
            if place not in self._done:
                _grow_item(self._merger, self._items.setdefault(place, {}), kind, chunk)

    def answer(self) -> Answer:
        """The response so far."""
        self._merger.settle()
        items = [item for _, item in sorted(self._items.items())]
        if not items or self._response.get("output"):
            return self._response
        return {**self._response, "output": items}


def _grow_item(merger: Merger, item: dict[str, Any], kind: str, chunk: Mapping[str, Any]) -> None:
    """Take in what one event says about an item that has not ended."""
    parts_name = "summary" if "summary_index" in chunk else "content"
    index = chunk.get("summary_index", chunk.get("content_index"))
    if kind.endswith(("_part.added", "_part.done")):
        _part(item, parts_name, index).update(chunk["part"])
        return
    *_, subject, action = kind.split(".")
    where = item if index is None else _part(item, parts_name, index)
    if action == "added" and subject == "annotation":
        merger.grow(where, {"annotations": [chunk["annotation"]]})
        return
    field = _FIELDS.get(subject)
    if field is None:
        return
    if action == "delta":
        if index is not None:
            where.setdefault("type", _PART_TYPES.get(subject, subject))
        merger.grow(where, {field: chunk["delta"]})
    elif action == "done" and chunk.get(field) is not None:
        where[field] = chunk[field]


_FIELDS = {
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "reasoning_summary_text": "text",
    "function_call_arguments": "arguments",
    "mcp_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "code_interpreter_call_code": "code",
}
"""Which field of the item, or of its part, the deltas of this event grow."""

_PART_TYPES = {"reasoning_summary_text": "summary_text"}
"""The type of the part that these deltas grow, where it has another name than they."""


def _part(item: dict[str, Any], name: str, index: Any) -> dict[str, Any]:
    parts = item.get(name)
    if not isinstance(parts, list):
        parts = item[name] = []
    if not isinstance(index, int) or not 0 <= index <= len(parts):
        raise ValueError(f"part {index!r} of an item with {len(parts)}; parts come one after the other")
    if index == len(parts):
        parts.append({})
    part = parts[index]
    if not isinstance(part, dict):
        raise TypeError(f"part {index} is a {type(part).__name__}")
    return part


def _place(chunk: Mapping[str, Any], name: str) -> int:
    index = chunk[name]
    if not isinstance(index, int):
        raise TypeError(f"{name} {index!r} is no integer")
    return index


def fault(answer: Mapping[str, Any]) -> str | None:
    """Why a response is no answer: its error, a status like `response_cancelled`, or `no_output`.

    One that is `incomplete` is an answer, as a chat completion is that ended by `length`. Servers that leave the
    status out have answered.
    """
    status = answer.get("status") or "completed"
    error = answer.get("error")
    if isinstance(error, Mapping):
        return error_type_of({"code": error.get("code") or error.get("type")}, "response_failed")
    if status not in ("completed", "incomplete"):
        return f"response_{status}"
    return None if isinstance(answer.get("output"), list) else "no_output"


def finish_reasons(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Why an incomplete response ended, else the status with which it ended."""
    status = answer.get("status")
    if status in ("queued", "in_progress"):
        return ()
    details = answer.get("incomplete_details")
    reason = details.get("reason") if status == "incomplete" and isinstance(details, Mapping) else None
    said = reason or status
    return (str(said),) if said else ()


def usage(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Token counts in the names of the responses API."""
    found = answer.get("usage")
    return found if isinstance(found, Mapping) else None


API = Api(ResponseAssembler, unfold, fault, finish_reasons, usage)
