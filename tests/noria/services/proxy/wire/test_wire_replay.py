import base64
import json
import struct
from typing import Any

import pytest

from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire.replay import Replay, replay
from noria.services.proxy.wire.to_call import to_call
from tests.noria.services.proxy.wire.exchanges import exchange, streamed

CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "prompt_token_ids": [1],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hé"},
            "finish_reason": "stop",
            "token_ids": [2],
            "logprobs": {"content": []},
        }
    ],
}
ANSWERS: dict[Kind, Any] = {
    Kind.CHAT: CHAT,
    Kind.COMPLETION: {"object": "text_completion", "choices": [{"index": 0, "text": "é", "finish_reason": "stop"}]},
    Kind.RESPONSE: {"id": "r", "object": "response", "status": "completed", "output": [], "usage": {"input_tokens": 1}},
    Kind.MESSAGE: {
        "type": "message",
        "role": "assistant",
        "content": [],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 2, "output_tokens": 1},
    },
    Kind.EMBEDDING: {"object": "list", "data": [{"embedding": [0.5, -1.0]}]},
}


@pytest.mark.parametrize("kind", list(Kind))
def test_unstreamed_it_is_what_was_recorded(kind: Kind) -> None:
    output = json.dumps(ANSWERS[kind], indent=1)
    request = {"return_token_ids": True, "logprobs": True}
    assert replay(kind, output, request) == Replay(output.encode(), None, "application/json", output)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.EMBEDDING])
def test_streamed_it_reads_as_what_was_recorded(kind: Kind) -> None:
    request = {"stream": True, "return_token_ids": True, "logprobs": True}
    made = replay(kind, json.dumps(ANSWERS[kind]), request)
    assert made.body is None
    assert made.events is not None
    assert made.content_type == "text/event-stream"
    call = to_call(streamed(kind, b"".join(made.events)))
    assert call.error_type is None
    assert json.loads(call.output) == json.loads(made.output) == ANSWERS[kind]


@pytest.mark.parametrize("stream", [False, True])
def test_token_fields_come_only_to_who_asks_for_them(stream: bool) -> None:
    made = replay(Kind.CHAT, json.dumps(CHAT), {"stream": stream, "return_token_ids": True})
    sent = made.body or b"".join(made.events or ())
    assert b"logprobs" not in sent
    assert b"token_ids" in sent
    made = replay(Kind.CHAT, json.dumps(CHAT, ensure_ascii=False), {"stream": stream})
    sent = made.body or b"".join(made.events or ())
    assert b"token_ids" not in sent
    assert b"logprobs" not in sent
    assert "token_ids" not in made.output
    assert "hé".encode() in sent


def test_usage_is_streamed_to_who_asks_for_it() -> None:
    output = json.dumps({**CHAT, "usage": {"total_tokens": 4}})
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(replay(Kind.CHAT, output, with_usage).events or ())
    assert b'"choices":[],"usage":{"total_tokens":4}' in events[-2]
    assert all(b'"usage":null' in event for event in events[:-2])
    assert b"usage" not in b"".join(replay(Kind.CHAT, output, {"stream": True}).events or ())


def test_embeddings_come_in_the_format_that_is_asked_for() -> None:
    floats = json.dumps(ANSWERS[Kind.EMBEDDING])
    asked_base64 = replay(Kind.EMBEDDING, floats, {"encoding_format": "base64"})
    packed = base64.b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
    assert json.loads(asked_base64.body or b"")["data"] == [{"embedding": packed}]
    asked_floats = replay(Kind.EMBEDDING, (asked_base64.body or b"").decode(), {})
    assert json.loads(asked_floats.body or b"") == ANSWERS[Kind.EMBEDDING]
    odd = json.dumps({"data": [{"embedding": "no base64!"}]})
    assert replay(Kind.EMBEDDING, odd, {}).body == odd.encode()


@pytest.mark.parametrize(
    ("wire", "content_type"),
    [(b"plain", "text/plain"), (b"\xff\x00", "application/octet-stream"), (b"7", "application/json")],
)
def test_what_was_no_object_comes_back_as_it_was(wire: bytes, content_type: str) -> None:
    output = to_call(exchange(Kind.CHAT, {}, wire)).output
    made = replay(Kind.CHAT, output, {"stream": True})
    assert (made.body, made.events, made.content_type) == (wire, None, content_type)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.EMBEDDING])
@pytest.mark.parametrize(
    "output",
    [
        '{"choices":[5]}',
        '{"choices":[{"message":"x"}]}',
        '{"output":[5]}',
        '{"output":[{"type":"message","content":[5]}]}',
        '{"content":[5]}',
        "{}",
        "not json",
        '{"choices":[{"message":{"tool_calls":[5]}}]}',
        '{"choices":5}',
        "[]",
    ],
)
def test_an_odd_recording_is_answered_somehow(kind: Kind, output: str) -> None:
    made = replay(kind, output, {"stream": True})
    assert (made.body is None) is (made.events is not None)
    assert made.body or list(made.events or ())
