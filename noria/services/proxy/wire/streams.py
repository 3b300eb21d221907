"""A recorded stream, whole or as much of it as arrived, read into the answer it carried."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.contracts.call import CallTokens
from noria.services.proxy.wire.api import Answer, Assembler
from noria.services.proxy.wire.json_text import parse
from noria.services.proxy.wire.sse import DONE, EventSplitter, read_event
from noria.services.proxy.wire.tokens import TokenGatherer

MALFORMED = "malformed_stream"
INCOMPLETE = "incomplete_stream"


@dataclass(frozen=True, slots=True)
class StreamRead:
    """What a stream said.

    answer   the object that an unstreamed call would have returned, None where not one event could be read
    error    the type of an error that the upstream reported in it, None if it did not
    fault    `malformed_stream` or `incomplete_stream`, None if it was well formed and whole
    over     whether the line or event came after which a client stops reading
    tokens   token ids and logprobs, None where the upstream sent none
    """

    answer: Answer | None
    error: str | None
    fault: str | None
    over: bool
    tokens: CallTokens | None


def looks_like_stream(body: bytes) -> bool:
    """Whether a body that is no JSON begins as a stream of events does."""
    return body[:64].lstrip(b"\xef\xbb\xbf\r\n").startswith((b"data:", b"event:", b":", b"id:", b"retry:"))


def read_stream(body: bytes, assembler: Assembler) -> StreamRead:
    """Fold a stream's events; one that cannot be read is passed over and makes the stream malformed."""
    splitter = EventSplitter()
    gatherer = TokenGatherer()
    has_tokens = b"token_ids" in body
    read = False
    done = False
    malformed = False
    for event in [*splitter.feed(body), splitter.rest()]:  # an upstream may leave out the last blank line
        name, payload = read_event(event)
        if not payload:
            continue
        if payload.strip() == DONE:
            done = True
            continue
        try:
            chunk = _object(parse(payload))
            if has_tokens:
                gatherer.take(chunk)
            assembler.add(name.decode(errors="replace"), chunk)
            read = True
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            malformed = True
    fault = MALFORMED if malformed else None
    if fault is None and not done and not assembler.ended:
        fault = INCOMPLETE
    answer = assembler.answer() if read else None
    return StreamRead(answer, assembler.error, fault, done or assembler.over, gatherer.tokens())


def _object(chunk: Any) -> dict[str, Any]:
    if not isinstance(chunk, dict):
        raise TypeError(f"an event's data is a {type(chunk).__name__}, not an object")
    return chunk


def asks_for_stream(request: Mapping[str, Any]) -> bool:
    """Whether a request body asks for a streamed answer."""
    return bool(request.get("stream"))
