"""From the bytes of an exchange to the record of a call."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.contracts.call import Call, CallStatus, CallTokens
from noria.services.proxy.exchange import Ending, Exchange
from noria.services.proxy.wire.api import Api, error_type_of
from noria.services.proxy.wire.apis import APIS
from noria.services.proxy.wire.decode import decode_body, decode_so_far
from noria.services.proxy.wire.json_text import parse, plain, to_text
from noria.services.proxy.wire.streams import INCOMPLETE, asks_for_stream, looks_like_stream, read_stream
from noria.services.proxy.wire.tokens import TokenGatherer, strip_body

NOTHING = "null"
"""The `output` of a call that nothing came back for."""

_MAX_DECODED = 1 << 28
"""Bytes. A compressed body that is larger when decoded is recorded as it came."""

_OTHERWISE = {
    Ending.CLIENT_LEFT: (CallStatus.CLIENT_DISCONNECT, "client_left"),
    Ending.UPSTREAM_DIED: (CallStatus.UPSTREAM_ERROR, "connection_lost"),
    Ending.NO_ANSWER: (CallStatus.UPSTREAM_ERROR, "no_answer"),
    Ending.REFUSED: (CallStatus.REFUSED, "refused"),
}
"""The status of every ending but a whole one, and its error type where the exchange gives none."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A response as the record needs it.

    text     the recorded output
    answer   the parsed object; empty where there is none
    error    the type of an error that the upstream reported inside a stream
    fault    why it is not an answer to learn from, None if it is
    over     whether a stream came to the event after which a client stops reading
    """

    text: str
    answer: Mapping[str, Any]
    streamed: bool
    error: str | None = None
    fault: str | None = None
    over: bool = False
    tokens: CallTokens | None = None


def to_call(exchange: Exchange) -> Call:
    """The record of one call; never raises, whatever the bytes are.

    `input` and `output` are the wire's own text where that is JSON in UTF-8; a stream is assembled; other text becomes
    a JSON string and other bytes `{"base64": …}`; where nothing came, `output` is `null`.
    """
    text, asked = _text_of(*_decoded(exchange.request, exchange.request_encoding, whole=True))
    request = asked if isinstance(asked, dict) else {}
    api = APIS[exchange.kind]
    read = _read(exchange, api, request)
    status, error_type = _status(exchange, read)
    model = request.get("model")
    usage = _usage(api, read)
    facts = {
        "endpoint": exchange.kind.value,
        "http_status": exchange.http_status,
        "stream": read.streamed,
        "first_byte_ms": None if exchange.first_byte_ms is None else max(0.0, exchange.first_byte_ms),
    }
    return Call(
        uid=exchange.uid,
        tenant=exchange.tenant,
        app=exchange.app,
        process_node=exchange.process_node,
        trace_id=exchange.trace_id,
        model_name=plain(model) if isinstance(model, str) else "",
        policy_version=exchange.policy_version,
        arm=exchange.arm,
        input=text,
        output=read.text,
        status=status,
        request_time=exchange.request_time,
        response_time=exchange.response_time,
        duration_ms=max(0.0, exchange.duration_ms),
        error_type=error_type,
        finish_reasons=tuple(plain(reason) for reason in api.finish_reasons(read.answer)),
        usage=usage,
        agent_version=exchange.agent_version,
        subject=exchange.subject,
        consent=exchange.consent,
        attributes={**exchange.attributes, **{key: value for key, value in facts.items() if value is not None}},
        tokens=None if _fewer(read.tokens, usage) else read.tokens,
    )


def _read(exchange: Exchange, api: Api, request: Mapping[str, Any]) -> _Read:
    asked_for_stream = api.assembler is not None and asks_for_stream(request)
    body, encoding = _decoded(exchange.response, exchange.content_encoding, whole=exchange.ending is Ending.WHOLE)
    if encoding:
        return _Read(_text_of(body, encoding)[0], {}, asked_for_stream, fault="undecodable_body")
    said_stream = exchange.content_type.partition(";")[0].strip().lower() == "text/event-stream"
    if api.assembler is not None and (said_stream or (asked_for_stream and looks_like_stream(body))):
        stream = read_stream(body, api.assembler(request))
        if stream.answer is not None:
            text = to_text(stream.answer)
            if exchange.wants is not None:
                text = strip_body(text.encode(), exchange.wants).decode()
            fault = stream.fault or api.fault(stream.answer)
            return _Read(text, stream.answer, True, stream.error, fault, stream.over, stream.tokens)
    text, value = _text_of(body)
    if not isinstance(value, dict):
        return _Read(text, {}, said_stream or asked_for_stream, fault=INCOMPLETE if said_stream else api.fault({}))
    gatherer = TokenGatherer()
    gatherer.take(value)
    if exchange.wants is not None:
        text = strip_body(body, exchange.wants).decode()
    return _Read(text, value, False, fault=api.fault(value), tokens=gatherer.tokens())


def _status(exchange: Exchange, read: _Read) -> tuple[CallStatus, str | None]:
    ending = exchange.ending
    error = exchange.error_type
    if ending is Ending.CLIENT_LEFT and (read.over or read.error is not None):
        # It left because it had all of it, or because of an error. `TerminalWatch` does not see this in a compressed
        # stream.
        ending = Ending.WHOLE
        error = None
    if ending is not Ending.WHOLE:
        status, otherwise = _OTHERWISE[ending]
        return status, plain(error or read.error or otherwise)
    if error is None and exchange.http_status is not None and exchange.http_status >= 300:
        error = read.error or error_type_of(read.answer.get("error"), f"http_{exchange.http_status}")
    error = error or read.error or read.fault
    return (CallStatus.OK, None) if error is None else (CallStatus.UPSTREAM_ERROR, plain(error))


def _usage(api: Api, read: _Read) -> Mapping[str, Any] | None:
    """Token counts as the upstream said them, or counted where it sent the tokens alone."""
    said = api.usage(read.answer)
    if said is not None or read.tokens is None:
        return said
    prompt, completed = len(read.tokens.prompt_token_ids), len(read.tokens.completion_token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def _fewer(tokens: CallTokens | None, usage: Mapping[str, Any] | None) -> bool:
    """Whether the upstream counts more sampled tokens than it sent: a parser of tool calls may swallow whole chunks."""
    counted = (usage or {}).get("completion_tokens")
    return tokens is not None and isinstance(counted, int) and counted > len(tokens.completion_token_ids)


def _decoded(body: bytes, encoding: str, *, whole: bool) -> tuple[bytes, str]:
    """The body without its content coding and "", or as it came and its coding where that cannot be undone."""
    if not encoding:
        return body, ""
    try:
        return (decode_body if whole else decode_so_far)(body, encoding, _MAX_DECODED), ""
    except ValueError:
        return body, encoding


def _text_of(body: bytes, encoding: str = "") -> tuple[str, Any]:
    """A body as JSON text, and its value; None where it is no JSON itself."""
    if not body:
        return NOTHING, None
    if encoding:
        return to_text({"base64": base64.b64encode(body).decode(), "content_encoding": encoding}), None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return to_text({"base64": base64.b64encode(body).decode()}), None
    try:
        return text, parse(body)
    except ValueError:
        return to_text(text), None
