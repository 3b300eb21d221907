"""A recorded output as an answer again, in the shape that the request asks for."""

import base64
import binascii
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire.apis import APIS
from noria.services.proxy.wire.embeddings import in_format
from noria.services.proxy.wire.json_text import parse, to_text
from noria.services.proxy.wire.streams import asks_for_stream
from noria.services.proxy.wire.tokens import strip_body, wants_of

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Replay:
    """Either a body or the events of a stream, and the output that this call is recorded with."""

    body: bytes | None
    events: Iterator[bytes] | None
    content_type: str
    output: str


def replay(kind: Kind, output: str, request: Mapping[str, Any]) -> Replay:
    """Make an answer of what `to_call` recorded.

    Token fields that the recording holds are taken out unless this caller asks for them too. An output that no stream
    can be made of is answered unstreamed.
    """
    body = strip_body(output.encode(), wants_of(request))
    try:
        value = parse(body)
    except ValueError:
        return Replay(body, None, JSON, output)
    if isinstance(value, str):
        return Replay(value.encode(errors="replace"), None, "text/plain", output)
    if not isinstance(value, dict):
        return Replay(body, None, JSON, output)
    if value.keys() <= {"base64", "content_encoding"} and isinstance(value.get("base64"), str):
        return _bytes(value["base64"], body, output)
    unfold = APIS[kind].unfold
    if unfold is not None and asks_for_stream(request):
        try:
            return Replay(None, iter(list(unfold(value, request))), EVENTS, body.decode())
        except (TypeError, ValueError, AttributeError, LookupError):
            return Replay(body, None, JSON, body.decode())
    if kind is Kind.EMBEDDING:
        body = _formatted(value, request, body)
    return Replay(body, None, JSON, body.decode())


def _bytes(encoded: str, body: bytes, output: str) -> Replay:
    try:
        return Replay(base64.b64decode(encoded, validate=True), None, "application/octet-stream", output)
    except binascii.Error:
        return Replay(body, None, JSON, output)


def _formatted(answer: dict[str, Any], request: Mapping[str, Any], body: bytes) -> bytes:
    try:
        changed = in_format(answer, request)
    except (TypeError, ValueError, OverflowError, LookupError, struct.error):
        return body
    return body if changed is None else to_text(changed).encode()
