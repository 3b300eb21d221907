"""Server-sent events of a chat completion: split the bytes into events, fold the deltas into one response, unfold it.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html; deltas as the OpenAI API streams them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DONE = b"[DONE]"

# Atomic groups: without them "\r\n" alone would match as two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LISTS = ("token_ids",)


class EventSplitter:
    """Cuts a stream of bytes, however it arrives, into whole events; concatenated they are the stream again."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, each with the blank line that ends it."""
        searched = max(0, len(self._rest) - 3)  # a blank line may be cut between two chunks
        data = self._rest + chunk if self._rest else chunk
        events: list[bytes] = []
        start = 0
        while match := _BLANK_LINE.search(data, max(start, searched)):
            events.append(data[start : match.end()])
            start = match.end()
        self._rest = data[start:]
        return events

    def rest(self) -> bytes:
        """What came after the last whole event."""
        rest, self._rest = self._rest, b""
        return rest


def data_of(event: bytes) -> bytes:
    """The payload of an event: its `data` lines joined by newlines; empty for a comment."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and event.endswith(b"\n\n"):
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)


def with_data(event: bytes, payload: bytes) -> bytes:
    """The event with another payload on one `data` line; its other lines stay."""
    others = [line for line in _LINE_END.split(event) if line and not line.startswith(b"data:")]
    return b"\n".join([*others, b"data: " + payload, b"", b""])


class Assembler:
    """Folds the chunks of a stream into the `chat.completion` object that an unstreamed call would have returned."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.error: dict[str, Any] | None = None
        """What the upstream reported in mid-stream, if anything."""

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take one parsed chunk in."""
        for key, value in chunk.items():
            if key == "error":
                self.error = value if isinstance(value, dict) else {"message": str(value)}
            elif key == "choices":
                for choice in value or ():
                    self._add_choice(choice)
            elif value is not None or key not in self._top:
                self._top[key] = value

    @property
    def finished(self) -> bool:
        """Whether every choice that began has said why it ended."""
        return bool(self._choices) and all(choice.get("finish_reason") for choice in self._choices.values())

    def completion(self) -> dict[str, Any]:
        """The response assembled so far."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            message = {"role": "assistant", "content": None, **choice["message"]}
            if "tool_calls" in message:
                message["tool_calls"] = [call for _, call in sorted(message["tool_calls"].items())]
            rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
            choices.append({"index": index, "message": message, "finish_reason": choice.get("finish_reason"), **rest})
        return {**self._top, "object": "chat.completion", "choices": choices}

    def _add_choice(self, part: Mapping[str, Any]) -> None:
        choice = self._choices.setdefault(part.get("index", 0), {"message": {}})
        for key, value in part.items():
            if key == "delta":
                _merge_delta(choice["message"], value or {})
            elif key == "logprobs":
                _merge_logprobs(choice, value)
            elif key in _LISTS:
                choice[key] = _extend(choice.get(key), value) or []
            elif key != "index" and (value is not None or key not in choice):
                choice[key] = value


def unfold(completion: Mapping[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """The events, `[DONE]` included, that stream a recorded response: a role, the message, why it ended, usage."""
    shared = {key: value for key, value in completion.items() if key not in ("choices", "usage", "prompt_token_ids")}
    shared["object"] = "chat.completion.chunk"
    first = {key: completion[key] for key in ("prompt_token_ids",) if key in completion}
    for choice in completion.get("choices", ()):
        index = choice.get("index", 0)
        message = dict(choice.get("message") or {})
        role = message.pop("role", "assistant")
        yield _event({**shared, **first, "choices": [_part(index, {"role": role, "content": ""})]})
        first = {}
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        delta = {key: value for key, value in message.items() if value not in (None, [])}
        rest = {
            key: value for key, value in choice.items() if key not in ("index", "message", "finish_reason", "delta")
        }
        if delta or rest:
            yield _event({**shared, "choices": [{**_part(index, delta), **rest}]})
        yield _event({**shared, "choices": [_part(index, {}, choice.get("finish_reason"))]})
    if include_usage:
        yield _event({**shared, "choices": [], "usage": completion.get("usage")})
    yield b"data: " + DONE + b"\n\n"


def _merge_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value or ():
                calls = message.setdefault("tool_calls", {})
                _merge_call(calls.setdefault(call.get("index", 0), {}), call)
        elif key == "function_call" and isinstance(value, dict):
            _merge_call(message.setdefault("function_call", {}), value)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None or key not in message:
            message[key] = value


def _merge_call(call: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if key == "function" and isinstance(value, dict):
            _merge_call(call.setdefault("function", {}), value)
        elif key == "arguments" and isinstance(value, str):
            call[key] = (call.get(key) or "") + value
        elif key != "index" and value is not None:
            call[key] = value


def _merge_logprobs(choice: dict[str, Any], value: Mapping[str, Any] | None) -> None:
    if value is None:
        choice.setdefault("logprobs", None)
        return
    merged = choice.get("logprobs") or {}
    for key, part in value.items():
        merged[key] = _extend(merged.get(key), part)
    choice["logprobs"] = merged


def _extend(whole: list[Any] | None, part: Any) -> list[Any] | None:
    if part is None:
        return whole
    if whole is None:
        whole = []
    whole.extend(part)
    return whole


def _part(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
