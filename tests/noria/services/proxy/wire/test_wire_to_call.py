"""The record of a call, for every way in which an exchange ends and whatever its bytes are."""

import base64
import gzip
import json
import zlib
from datetime import timedelta
from typing import Any

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import Arm, Call, CallStatus
from noria.services.proxy.exchange import Ending, Kind, Wants
from noria.services.proxy.wire import messages, responses_events
from noria.services.proxy.wire.failure import error_event
from noria.services.proxy.wire.to_call import to_call
from tests.noria.services.proxy.wire.exchanges import NOW, exchange, sse, streamed

CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hé"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHUNKS = (
    {"id": "c1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "h"}}]},
    {"id": "c1", "choices": [{"index": 0, "delta": {"content": "é"}, "finish_reason": "stop"}]},
)
STREAM = sse(*CHUNKS) + b"data: [DONE]\n\n"


def storable(text: str) -> bool:
    """Whether PostgreSQL takes it as JSON text that Python can read."""
    text.encode()
    json.loads(text)
    return "\x00" not in text


def test_a_whole_answer_is_recorded_as_it_crossed_the_wire() -> None:
    text = '{\n "choices": [{"message":{"content":"h\\u00e9 \\u0000 \\ud800"},"finish_reason":"stop"}] , "x":1.10 }'
    call = to_call(
        exchange(
            Kind.CHAT,
            b' {"model" : "m\\u00e9", "big": 123456789012345678901234567890}',
            text.encode(),
            arm=Arm.CANARY,
            policy_version="p.r00001",
            agent_version="v7",
            subject="s",
            consent=False,
            first_byte_ms=4.5,
            attributes={"rollout": {"group": 1}},
            response_time=NOW - timedelta(seconds=9),  # the wall clock was set back
            duration_ms=-0.1,
        )
    )
    assert call == Call(
        uid="0190-u",
        tenant="t",
        app="a",
        process_node="n",
        trace_id="1" * 32,
        model_name="mé",
        policy_version="p.r00001",
        arm=Arm.CANARY,
        input=' {"model" : "m\\u00e9", "big": 123456789012345678901234567890}',
        output=text,
        status=CallStatus.OK,
        request_time=NOW,
        response_time=NOW - timedelta(seconds=9),
        duration_ms=0.0,
        finish_reasons=("stop",),
        agent_version="v7",
        subject="s",
        consent=False,
        attributes={
            "rollout": {"group": 1},
            "endpoint": "chat.completions",
            "http_status": 200,
            "stream": False,
            "first_byte_ms": 4.5,
        },
    )


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        (b"", "no_choices"),
        (b"{}", "no_choices"),
        (b'{"choices":[]}', "no_choices"),
        (b'{"choices":[5]}', "no_choices"),
        (b"<html>", "no_choices"),
        (b"[1]", "no_choices"),
        (b'{"error":{"message":"m","type":"server_error"}}', "server_error"),
        (b'{"error":{"message":"m","code":429}}', "http_429"),
    ],
)
def test_status_200_without_an_answer(body: bytes, error_type: str) -> None:
    call = to_call(exchange(Kind.CHAT, ASKED, body))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, error_type)


@pytest.mark.parametrize(
    ("status", "body", "error_type"),
    [
        (400, b'{"error":{"message":"m","type":"invalid_request_error","code":"x"}}', "invalid_request_error"),
        (401, b'{"error":{"message":"m","type":null,"code":"invalid_api_key"}}', "invalid_api_key"),
        (429, b'{"error":{"message":"m","code":"429"}}', "http_429"),
        (404, b'{"error":"model not found"}', "http_404"),
        (404, b'{"error":{"type":["odd"],"code":{}}}', "http_404"),
        (422, b'{"detail":[]}', "http_422"),
        (502, b"<html>", "http_502"),
        (500, json.dumps(CHAT).encode(), "http_500"),
        (301, b"", "http_301"),
        (400, b'{"error":{"type":"a\\u0000\\ud800"}}', "a\ufffd\ufffd"),
    ],
)
def test_an_error_of_the_upstream(status: int, body: bytes, error_type: str) -> None:
    call = to_call(exchange(Kind.CHAT, ASKED, body, http_status=status))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, error_type)
    assert call.attributes["http_status"] == status


def test_an_error_that_is_streamed_with_an_error_status() -> None:
    stream = sse({"error": {"message": "m", "type": "rate_limit_error"}})
    call = to_call(streamed(Kind.CHAT, stream, http_status=429))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "rate_limit_error")


@pytest.mark.parametrize(
    ("stream", "error_type"),
    [
        (STREAM, None),
        (sse(*CHUNKS), None),  # no [DONE], but a reason
        (STREAM.replace(b"\n", b"\r\n"), None),
        (STREAM.rstrip(b"\n"), None),
        (b"\xef\xbb\xbf" + STREAM, None),
        (sse(CHUNKS[0]) + b"data: [DONE]\n\n", None),
        (sse(CHUNKS[0]), "incomplete_stream"),
        (b"", "incomplete_stream"),
        (b": nothing\n\n", "incomplete_stream"),
        (b"data: [DONE]\n\n", "incomplete_stream"),
        (sse({"id": "c1", "choices": []}) + b"data: [DONE]\n\n", "no_choices"),
        (sse(CHUNKS[0], b"data: nonsense\n\n", CHUNKS[1]), "malformed_stream"),
        (sse(CHUNKS[0], b"data: [1]\n\n", CHUNKS[1]), "malformed_stream"),
        (sse(CHUNKS[0], {"choices": [5]}, CHUNKS[1]), "malformed_stream"),
        (sse(CHUNKS[0], {"choices": [{"delta": "x"}]}, CHUNKS[1]), "malformed_stream"),
        (sse(CHUNKS[0], b'data: {"x": NaN}\n\n', CHUNKS[1]), "malformed_stream"),
        (sse(CHUNKS[0], b"data: " + b'{"a":' * 5000 + b"\n\n", CHUNKS[1]), "malformed_stream"),
        (sse(CHUNKS[0], {"error": {"type": "server_error"}}) + b"data: [DONE]\n\n", "server_error"),
        (sse(CHUNKS[0], {"error": "out of memory"}), "error_in_stream"),
        (
            sse(CHUNKS[0], {"object": "error", "message": "m", "type": "BadRequestError", "code": 400}),
            "BadRequestError",
        ),
        (sse(CHUNKS[0]) + b'event: error\ndata: {"message": "m", "code": "c"}\n\n', "c"),
        (sse(CHUNKS[0]) + error_event(Kind.CHAT, "m", "upstream_timeout"), "upstream_error"),
        (sse({**CHUNKS[0], "error": None}, CHUNKS[1]), None),
    ],
)
def test_how_a_stream_ended(stream: bytes, error_type: str | None) -> None:
    call = to_call(streamed(Kind.CHAT, stream))
    assert call.error_type == error_type
    assert call.status is (CallStatus.OK if error_type is None else CallStatus.UPSTREAM_ERROR)
    assert call.attributes["stream"] is True


def test_a_choice_that_was_asked_for_and_never_came_is_missing() -> None:
    assert to_call(streamed(Kind.CHAT, sse(*CHUNKS), request={"n": 2})).error_type == "incomplete_stream"
    assert to_call(streamed(Kind.CHAT, STREAM, request={"n": 2})).error_type is None


def test_json_that_calls_itself_a_stream_is_read_as_json() -> None:
    call = to_call(streamed(Kind.CHAT, json.dumps(CHAT).encode()))
    assert (call.status, call.output) == (CallStatus.OK, json.dumps(CHAT))
    assert call.attributes["stream"] is False


def test_a_stream_without_a_content_type_is_read_as_one() -> None:
    call = to_call(streamed(Kind.CHAT, STREAM, content_type=""))
    assert call.status is CallStatus.OK
    assert json.loads(call.output)["choices"][0]["message"]["content"] == "hé"


@pytest.mark.parametrize(
    ("ending", "known", "status", "error_type"),
    [
        (Ending.CLIENT_LEFT, None, CallStatus.CLIENT_DISCONNECT, "client_left"),
        (Ending.CLIENT_LEFT, "client_left", CallStatus.CLIENT_DISCONNECT, "client_left"),
        (Ending.UPSTREAM_DIED, None, CallStatus.UPSTREAM_ERROR, "connection_lost"),
        (Ending.UPSTREAM_DIED, "upstream_timeout", CallStatus.UPSTREAM_ERROR, "upstream_timeout"),
    ],
)
def test_what_had_arrived_is_recorded(ending: Ending, known: str | None, status: CallStatus, error_type: str) -> None:
    half = STREAM[: STREAM.index(b"\n\n") + 20]
    call = to_call(streamed(Kind.CHAT, half, ending=ending, error_type=known))
    assert (call.status, call.error_type, call.finish_reasons) == (status, error_type, ())
    assert json.loads(call.output)["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "h"},
        "finish_reason": None,
    }
    call = to_call(exchange(Kind.CHAT, ASKED, b'{"choices": [{"ind', ending=ending, error_type=known))
    assert (call.status, call.error_type, call.output) == (status, error_type, '"{\\"choices\\": [{\\"ind"')
    nothing = to_call(streamed(Kind.CHAT, b"", ending=ending, error_type=known, http_status=None, content_type=""))
    assert (nothing.status, nothing.output) == (status, "null")
    assert nothing.attributes == {"endpoint": "chat.completions", "stream": True}


def test_a_client_that_leaves_at_an_error_is_no_disconnect() -> None:
    stream = sse(CHUNKS[0], {"error": {"type": "server_error"}})
    call = to_call(streamed(Kind.CHAT, stream, ending=Ending.CLIENT_LEFT, error_type="client_left"))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "server_error")


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.EMBEDDING])
def test_a_client_that_leaves_when_all_has_come_had_all_of_it(kind: Kind) -> None:
    encoder = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    unended = encoder.compress(STREAMS[kind]) + encoder.flush(zlib.Z_SYNC_FLUSH)
    left: dict[str, Any] = {"ending": Ending.CLIENT_LEFT, "error_type": "client_left"}
    call = to_call(streamed(kind, unended, content_encoding="gzip", **left))
    assert (call.status, call.error_type) == (CallStatus.OK, None)
    before_last = STREAMS[kind][: STREAMS[kind].rindex(b"data: ")]
    call = to_call(streamed(kind, before_last, **left))
    assert (call.status, call.error_type) == (CallStatus.CLIENT_DISCONNECT, "client_left")


def test_no_answer_and_refusals() -> None:
    call = to_call(exchange(Kind.CHAT, ASKED, ending=Ending.NO_ANSWER, http_status=None, error_type="unreachable"))
    assert (call.status, call.error_type, call.output) == (CallStatus.UPSTREAM_ERROR, "unreachable", "null")
    refusal = b'{"error": {"message": "m", "code": "over_limit"}}'
    call = to_call(
        exchange(Kind.CHAT, b"{", refusal, ending=Ending.REFUSED, http_status=400, error_type="invalid_request")
    )
    assert (call.status, call.error_type) == (CallStatus.REFUSED, "invalid_request")
    assert (call.input, call.output, call.model_name) == ('"{"', refusal.decode(), "")


def test_what_the_proxy_knows_to_be_wrong_counts_for_a_whole_answer_too() -> None:
    call = to_call(exchange(Kind.CHAT, ASKED, json.dumps(CHAT).encode(), error_type="too_large"))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "too_large")


@pytest.mark.parametrize(
    ("body", "recorded"),
    [
        (b"", "null"),
        ("grüße".encode(), '"grüße"'),
        (b"a\x00b", '"a\\u0000b"'),
        (b"\xff\x00", json.dumps({"base64": base64.b64encode(b"\xff\x00").decode()}, separators=(",", ":"))),
        (b"\xef\xbb\xbf{}", '"\ufeff{}"'),
        (b'{"a": NaN}', '"{\\"a\\": NaN}"'),
        (b"7", "7"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, recorded: str) -> None:
    call = to_call(exchange(Kind.CHAT, body, body))
    assert (call.input, call.output) == (recorded, recorded)


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("br", brotli.compress)])
def test_compressed_bodies_are_recorded_decoded(encoding: str, encode: Any) -> None:
    asked = json.dumps(ASKED).encode()
    call = to_call(
        exchange(
            Kind.CHAT,
            encode(asked),
            encode(json.dumps(CHAT).encode()),
            request_encoding=encoding,
            content_encoding=encoding,
        )
    )
    assert (call.input, call.output, call.model_name) == (asked.decode(), json.dumps(CHAT), "m")
    whole = encode(STREAM * 50)
    call = to_call(streamed(Kind.CHAT, whole[: len(whole) - 3], content_encoding=encoding, ending=Ending.CLIENT_LEFT))
    assert json.loads(call.output)["choices"][0]["message"]["content"].startswith("hé")


def test_a_body_that_is_not_in_its_coding_is_recorded_as_it_came() -> None:
    call = to_call(exchange(Kind.CHAT, b"{}", b"{}", content_encoding="gzip", request_encoding="compress"))
    encoded = base64.b64encode(b"{}").decode()
    assert json.loads(call.output) == {"base64": encoded, "content_encoding": "gzip"}
    assert json.loads(call.input) == {"base64": encoded, "content_encoding": "compress"}
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "undecodable_body")


def test_tokens_are_recorded_and_taken_out_of_what_the_caller_saw() -> None:
    tokens: dict[str, Any] = {"token_ids": [3], "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", **tokens}
    stream = sse({"id": "c1", "prompt_token_ids": [1, 2], "choices": [choice]})
    body = json.dumps({"prompt_token_ids": [1, 2], "choices": [{"index": 0, "message": {}, **tokens}]}).encode()
    for found in (
        streamed(Kind.CHAT, stream, wants=Wants(False, False)),
        exchange(Kind.CHAT, ASKED, body, wants=Wants(False, False)),
    ):
        call = to_call(found)
        assert call.tokens is not None
        assert call.tokens.prompt_token_ids == (1, 2)
        assert call.tokens.completion_token_ids == (3,)
        assert call.tokens.logprobs == (-0.5,)
        assert call.usage == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        assert "token_ids" not in call.output
        assert "logprobs" not in call.output
    call = to_call(streamed(Kind.CHAT, stream, wants=Wants(token_ids=True, logprobs=True)))
    assert json.loads(call.output)["choices"][0]["token_ids"] == [3]


def test_embeddings() -> None:
    body = b'{"object":"list","data":[{"embedding":[0.1,1e-9]}],"usage":{"prompt_tokens":2,"total_tokens":2}}'
    call = to_call(exchange(Kind.EMBEDDING, {"model": "e", "input": "x"}, body))
    assert (call.status, call.output, call.finish_reasons) == (CallStatus.OK, body.decode(), ())
    assert call.usage == {"prompt_tokens": 2, "total_tokens": 2}
    assert to_call(exchange(Kind.EMBEDDING, {}, b'{"data":[]}')).error_type == "no_data"
    assert to_call(streamed(Kind.EMBEDDING, b"data: {}\n\n")).error_type == "incomplete_stream"


RESPONSE = {
    "id": "r",
    "status": "completed",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "é"}]}],
}
MESSAGE = {"type": "message", "content": [{"type": "text", "text": "é"}, {"type": "tool_use", "input": {"a": "é"}}]}
STREAMS = {
    Kind.CHAT: STREAM,
    Kind.COMPLETION: sse({"choices": [{"index": 0, "text": "é", "finish_reason": "stop"}]}) + b"data: [DONE]\n\n",
    Kind.RESPONSE: b"".join(responses_events.unfold(RESPONSE, {})),
    Kind.MESSAGE: b"".join(messages.unfold({**MESSAGE, "stop_reason": "end_turn"}, {})),
    Kind.EMBEDDING: b"data: {}\n\n",
}


def check(call: Call) -> None:
    """What must hold for every record."""
    assert storable(call.input)
    assert storable(call.output)
    for text in (call.model_name, call.error_type or "", *call.finish_reasons):
        assert "\x00" not in text
        text.encode()
    json.dumps(dict(call.usage or {}))
    assert call.duration_ms >= 0
    assert (call.error_type is None) == (call.status is CallStatus.OK)


_fields = st.sampled_from(
    [
        "choices",
        "delta",
        "message",
        "tool_calls",
        "function",
        "arguments",
        "name",
        "id",
        "index",
        "content",
        "usage",
        "error",
        "type",
        "code",
        "finish_reason",
        "logprobs",
        "token_ids",
        "prompt_token_ids",
        "content_block",
        "text",
        "response",
        "output",
        "item",
        "output_index",
        "content_index",
        "part",
        "status",
        "stop_reason",
        "object",
        "data",
        "partial_json",
        "summary_index",
        "annotation",
        "x_groq",
        "stream",
        "n",
        "model",
        "function_call",
        "citation",
    ]
)
_types = st.sampled_from(
    [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "message_delta",
        "error",
        "input_json_delta",
        "response.created",
        "response.completed",
        "response.output_item.added",
        "response.output_text.delta",
        "response.content_part.added",
        "response.output_text.annotation.added",
        "citations_delta",
        "text_delta",
        "a.b",
    ]
)
_leaves = st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=3) | _types
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_fields, inner, max_size=4), max_leaves=15
)
_typed = st.dictionaries(_fields, _values, max_size=5).flatmap(
    lambda chunk: _types.map(lambda kind: {**chunk, "type": kind, "index": 0, "output_index": 0})
)
_chunks = st.lists((_values | _typed).map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n"), max_size=6)
_bodies = st.binary() | _chunks.map(b"".join) | _values.map(lambda value: json.dumps(value).encode())


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(list(Kind)),
    st.sampled_from(list(Ending)),
    _bodies,
    _bodies,
    st.sampled_from(["text/event-stream", "application/json", ""]),
    st.sampled_from(["", "", "", "gzip", "br", "zstd", "deflate", "what"]),
    st.none() | st.builds(Wants, st.booleans(), st.booleans()),
    st.sampled_from([None, 200, 404]),
)
def test_no_bytes_break_it(
    kind: Kind,
    ending: Ending,
    request: bytes,
    response: bytes,
    content_type: str,
    encoding: str,
    wants: Wants | None,
    status: int | None,
) -> None:
    found = exchange(
        kind,
        request,
        response,
        ending=ending,
        content_type=content_type,
        content_encoding=encoding,
        request_encoding=encoding,
        wants=wants,
        http_status=status,
    )
    check(to_call(found))


@pytest.mark.parametrize("kind", list(STREAMS))
def test_a_stream_cut_off_anywhere_is_a_record(kind: Kind) -> None:
    stream = STREAMS[kind]
    for place in range(len(stream)):
        for ending in (Ending.CLIENT_LEFT, Ending.WHOLE):
            check(to_call(streamed(kind, stream[:place], ending=ending)))


@pytest.mark.parametrize("kind", list(STREAMS))
@pytest.mark.parametrize(
    "hostile",
    [
        b'{"a":' * 250 + b"1" + b"}" * 250,
        b'{"choices":[{"delta":{"x":' + b'{"a":' * 245 + b"1" + b"}" * 245 + b"}}]}",
        b'{"usage":' + b"[" * 250 + b"]" * 250 + b"}",
        b'{"type":"error","error":{"type":"' + b"x" * 100_000 + b'"}}',
        b'{"choices":[{"index":123456789012345678901234567890,"delta":{}}]}',
        b'{"type":"content_block_start","index":-5,"content_block":{}}',
        b'{"type":"response.content_part.added","output_index":0,"content_index":999999999,"part":{}}',
    ],
    ids=lambda chunk: chunk[:20].decode(),
)
def test_hostile_chunks(kind: Kind, hostile: bytes) -> None:
    chunk = b"data: " + hostile + b"\n\n"
    check(to_call(streamed(kind, chunk + chunk + STREAMS[kind])))
    check(to_call(exchange(kind, hostile, hostile)))
    check(to_call(exchange(kind, hostile, hostile, http_status=500)))
