"""Answers in every shape that the proxy has to let pass, by name."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire import completions, messages, responses_events
from tests.noria.services.proxy.wire.exchanges import sse

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class Shape:
    """What is asked, and the answer as an upstream sends it. `ok` is whether the record is one to learn from."""

    kind: Kind
    body: bytes
    ask: dict[str, Any]
    content_type: str = EVENTS
    ok: bool = True


def chunk(delta: Any, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


STOP = chunk({}, "stop")
HELLO = (chunk({"role": "assistant", "content": ""}), chunk({"content": "grü"}), chunk({"content": "ße 🌍"}), STOP)


def tool(index: int | None, call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    said = {"index": index, "id": call_id, "type": "function" if call_id else None}
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {**{key: value for key, value in said.items() if value is not None}, "function": function}


def tools(*deltas: Any) -> bytes:
    return sse(*[chunk({"tool_calls": [delta]}) for delta in deltas], chunk({}, "tool_calls")) + DONE


def raw_utf8(stream: bytes) -> bytes:
    """The stream with its characters in UTF-8 in place of escapes."""
    return b"".join(
        line
        if not line.startswith(b"data: {")
        else b"data: " + json.dumps(json.loads(line[6:]), ensure_ascii=False).encode() + b"\n"
        for line in stream.splitlines(keepends=True)
    )


IMAGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 8).decode()
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "grüße"},
        {"type": "tool_use", "id": "tu_1", "name": "find", "input": {"q": "ü"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "grüße", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c",
            "name": "find",
            "arguments": '{"q":"ü"}',
            "status": "completed",
        },
    ],
    "usage": {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    },
}
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "text": "grü", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "ße", "logprobs": None, "finish_reason": "length"},
    ],
    "usage": USAGE,
}
CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "grüße"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
EMBEDDING = {
    "object": "list",
    "model": "e",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1e-9]}],
    "usage": {"prompt_tokens": 2, "total_tokens": 2},
}


def _chat_streams() -> Iterator[tuple[str, bytes]]:
    hello = sse(*HELLO) + DONE
    yield "plain", hello
    yield "raw utf-8", raw_utf8(hello)
    yield "crlf", hello.replace(b"\n", b"\r\n")
    yield "cr", hello.replace(b"\n", b"\r")
    yield "comments and keep-alives", b": hi\n\n:\n\n" + hello.replace(b"data:", b": OPENROUTER PROCESSING\n\ndata:")
    yield "ids, retries, unknown fields", hello.replace(b"data:", b"id: 7\nretry: 10\nwhat: ever\ndata:")
    yield "data over several lines", hello.replace(b'"choices"', b'\ndata: "choices"')
    yield "no space after data", hello.replace(b"data: ", b"data:")
    yield "byte order mark", b"\xef\xbb\xbf" + hello
    yield "no [DONE]", sse(*HELLO)
    yield "no last blank line", hello.rstrip(b"\n")
    yield "more after [DONE]", hello + b": bye\n\n"
    yield "usage chunk", sse(*HELLO, {"id": "c1", "choices": [], "usage": USAGE}) + DONE
    yield "usage in every chunk", sse(*[{**one, "usage": USAGE} for one in HELLO]) + DONE
    yield "usage null", sse(*[{**one, "usage": None} for one in HELLO], {"choices": [], "usage": USAGE}) + DONE
    yield "usage without choices", sse(*HELLO, {"id": "c1", "usage": USAGE}) + DONE
    yield "choices null", sse({"id": "c1", "choices": None}, *HELLO) + DONE
    yield (
        "tool calls interleaved",
        tools(
            tool(0, "a", "find", ""),
            tool(1, "b", "buy", '{"n"'),
            tool(0, None, None, '{"q":"ü"}'),
            tool(1, None, None, ":2}"),
        ),
    )
    yield (
        "tool calls without index",
        tools(
            tool(None, "a", "find", "{"),
            tool(None, "b", "buy", ""),
            tool(None, "a", None, "}"),
            tool(None, "b", None, "{}"),
        ),
    )
    yield "tool calls all of index 0", tools(tool(0, "a", "find", "{}"), tool(0, "b", "find", "{}"))
    yield "arguments as object and null", tools(tool(0, "a", "find", {"q": 1}), tool(1, "b", "now", None))
    yield "n > 1, out of order", sse(chunk({"content": "b"}, "stop", 1), chunk({"content": "a"}), STOP) + DONE
    yield "content null", sse(chunk({"role": "assistant", "content": None}), STOP) + DONE
    yield "refusal", sse(chunk({"refusal": "I "}), chunk({"refusal": "won't"}), STOP) + DONE
    yield "reasoning_content", sse(chunk({"reasoning_content": "h"}), chunk({"reasoning_content": "m"}), STOP) + DONE
    legacy = [chunk({"function_call": {"name": "f", "arguments": "{"}}), chunk({"function_call": {"arguments": "}"}})]
    yield "legacy function", sse(*legacy, chunk({}, "function_call")) + DONE
    audio = {"id": "au", "data": "QUJD", "transcript": "Hey"}
    yield "audio", sse(chunk({"audio": audio}), chunk({"audio": {"data": "REVG", "expires_at": 7}}), STOP) + DONE
    yield "annotations", sse(chunk({"annotations": [{"type": "url_citation"}]}), STOP) + DONE
    yield "unknown fields", sse(chunk({"weird": {"a": [1]}, "content": "x"}, provider="p", x=None), STOP) + DONE
    logprobs = {**chunk({"content": "a"}), "prompt_token_ids": [1]}
    logprobs["choices"][0] |= {"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}, "token_ids": [2]}  # type: ignore[index]
    yield "tokens that nobody takes out", sse(logprobs, STOP) + DONE


CHAT_STREAMS = dict(_chat_streams())
_ASK_CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "grüße"}]}
_ASK_STREAM = {**_ASK_CHAT, "stream": True}
_ASK_IMAGE = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}],
}
_ASK_MESSAGE = {**_ASK_CHAT, "max_tokens": 9}

SHAPES: dict[str, Shape] = {
    **{f"chat: {name}": Shape(Kind.CHAT, body, _ASK_STREAM) for name, body in CHAT_STREAMS.items()},
    "chat: error in the stream": Shape(
        Kind.CHAT, sse(*HELLO[:2], {"error": {"message": "m", "type": "server_error"}}) + DONE, _ASK_STREAM, ok=False
    ),
    "chat: no JSON in an event": Shape(
        Kind.CHAT, sse(*HELLO[:2], b"data: nonsense\n\n", STOP) + DONE, _ASK_STREAM, ok=False
    ),
    "chat: cut off": Shape(Kind.CHAT, sse(*HELLO[:2]), _ASK_STREAM, ok=False),
    "chat: unstreamed": Shape(Kind.CHAT, json.dumps(CHAT).encode(), _ASK_CHAT, JSON),
    "chat: odd white space and an image": Shape(
        Kind.CHAT, json.dumps(CHAT, indent=3).encode() + b"\n", _ASK_IMAGE, JSON
    ),
    "chat: no JSON": Shape(Kind.CHAT, b"<html>\xff\x00", _ASK_CHAT, "text/html", ok=False),
    "completions: streamed": Shape(
        Kind.COMPLETION,
        b"".join(completions.unfold(COMPLETION, {"stream_options": {"include_usage": True}})),
        {"model": "m", "prompt": "p", "n": 2, "stream": True},
    ),
    "completions: unstreamed": Shape(
        Kind.COMPLETION, json.dumps(COMPLETION).encode(), {"model": "m", "prompt": "p"}, JSON
    ),
    "responses: streamed": Shape(
        Kind.RESPONSE, b"".join(responses_events.unfold(RESPONSE, {})), {"model": "m", "input": "i", "stream": True}
    ),
    "responses: unstreamed": Shape(Kind.RESPONSE, json.dumps(RESPONSE).encode(), {"model": "m", "input": "i"}, JSON),
    "messages: streamed": Shape(
        Kind.MESSAGE,
        b'event: ping\ndata: {"type": "ping"}\n\n' + b"".join(messages.unfold(MESSAGE, {})),
        {**_ASK_MESSAGE, "stream": True},
    ),
    "messages: unstreamed": Shape(Kind.MESSAGE, json.dumps(MESSAGE).encode(), _ASK_MESSAGE, JSON),
    "embeddings": Shape(Kind.EMBEDDING, json.dumps(EMBEDDING).encode(), {"model": "e", "input": "i"}, JSON),
}
"""Every shape by name."""
