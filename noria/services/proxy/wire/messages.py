"""`POST /v1/messages` of Anthropic.

Events: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from collections.abc import Iterator, Mapping
from typing import Any

from noria.services.proxy.wire.api import Answer, Api, error_type_of, event
from noria.services.proxy.wire.json_text import parse, to_text
from noria.services.proxy.wire.merge import Merger

_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_INPUT = "input_json_delta"
_CITATION = "citations_delta"


class MessageAssembler:
    """Folds the events into the message that an unstreamed call would have returned."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._message: Answer = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}
        self._merger = Merger()
        self._error: str | None = None
        self._stopped = False

    @property
    def error(self) -> str | None:
        """The type of the error that the upstream reported in mid-stream."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether the message has said why it ended."""
        return self._stopped or bool(self._message.get("stop_reason"))

    @property
    def over(self) -> bool:
        """Whether `message_stop` has come."""
        return self._stopped

    def add(self, name: str, chunk: dict[str, Any]) -> None:
        """Take one event in; one of an unknown type says nothing that is known."""
        kind = chunk.get("type") or name
        if kind == "message_start":
            self._start(chunk["message"])
        elif kind == "content_block_start":
            self._blocks[_place(chunk)] = dict(chunk["content_block"])
        elif kind == "content_block_delta":
            self._grow(_place(chunk), chunk["delta"])
        elif kind == "message_delta":
            self._message.update(chunk["delta"])
            _grow_usage(self._message, chunk.get("usage"))
            known = ("type", "delta", "usage")
            self._message.update({key: value for key, value in chunk.items() if key not in known})
        elif kind == "message_stop":
            self._stopped = True
        elif kind == "error" or name == "error":
            self._error = error_type_of(chunk.get("error"), "error_in_stream")
            self._message["error"] = chunk.get("error") or chunk

    def answer(self) -> Answer:
        """The message so far."""
        self._merger.settle()
        content = [self._whole(place, block) for place, block in sorted(self._blocks.items())]
        return {**self._message, "content": content} if self._message or content else {}

    def _start(self, message: dict[str, Any]) -> None:
        self._message = dict(message)
        for place, block in enumerate(message.get("content") or ()):
            self._blocks[place] = dict(block)

    def _grow(self, place: int, delta: dict[str, Any]) -> None:
        block = self._blocks.setdefault(place, {})
        kind = delta["type"]
        if kind == _INPUT:
            piece = delta["partial_json"]
            if not isinstance(piece, str):
                raise TypeError(f"partial_json is a {type(piece).__name__}, not text")
            self._inputs.setdefault(place, []).append(piece)
        elif kind == _CITATION:
            self._merger.grow(block, {"citations": [delta["citation"]]})
        else:
            self._merger.grow(block, {key: value for key, value in delta.items() if key != "type"})

    def _whole(self, place: int, block: dict[str, Any]) -> dict[str, Any]:
        """The block with its input parsed; an input that was cut off stays the text that came."""
        text = "".join(self._inputs.get(place, ()))
        if not text:
            return block
        try:
            return {**block, "input": parse(text.encode(errors="surrogatepass"))}
        except ValueError:
            return {**block, "input": text}


def _grow_usage(message: Answer, usage: Any) -> None:
    """Usage in a stream is cumulative: a later count replaces an earlier, and null says nothing."""
    if isinstance(usage, Mapping):
        known = message.get("usage")
        said = {key: value for key, value in usage.items() if value is not None}
        message["usage"] = {**usage, **(known if isinstance(known, Mapping) else {}), **said}


def _place(chunk: Mapping[str, Any]) -> int:
    index = chunk["index"]
    if not isinstance(index, int):
        raise TypeError(f"content block index {index!r} is no integer")
    return index


def unfold(answer: Answer, request: Mapping[str, Any]) -> Iterator[bytes]:
    """The events that stream a recorded message, block by block."""
    usage = answer.get("usage")
    opening = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    if isinstance(usage, Mapping):
        opening["usage"] = {**usage, "output_tokens": 0}
    yield event({"type": "message_start", "message": opening}, "message_start")
    for index, block in enumerate(answer.get("content") or ()):
        start, deltas = _opened(block)
        yield event({"type": "content_block_start", "index": index, "content_block": start}, "content_block_start")
        for delta in deltas:
            yield event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
    ending = {"stop_reason": answer.get("stop_reason"), "stop_sequence": answer.get("stop_sequence")}
    yield event({"type": "message_delta", "delta": ending, "usage": usage or {}}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _opened(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as it begins, and the deltas that fill it."""
    start = dict(block)
    deltas: list[dict[str, Any]] = []
    for kind, key in _PIECES.items():
        if isinstance(block.get(key), str):
            start[key] = ""
            if block[key]:
                deltas.append({"type": kind, key: block[key]})
    for citation in block.get("citations") or ():
        start["citations"] = []
        deltas.append({"type": _CITATION, "citation": citation})
    if isinstance(block.get("input"), dict) and block["input"]:
        start["input"] = {}
        deltas.append({"type": _INPUT, "partial_json": to_text(block["input"])})
    return start, deltas


def fault(answer: Mapping[str, Any]) -> str | None:
    """`no_content` where a message has no list of content blocks; an empty list is an answer."""
    if isinstance(answer.get("content"), list) and answer.get("type") != "error":
        return None
    return error_type_of(answer.get("error"), "no_content")


def finish_reasons(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """The one reason why the message ended."""
    reason = answer.get("stop_reason")
    return (str(reason),) if reason else ()


def usage_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Token counts in Anthropic's names."""
    usage = answer.get("usage")
    return usage if isinstance(usage, Mapping) else None


API = Api(MessageAssembler, unfold, fault, finish_reasons, usage_of)
