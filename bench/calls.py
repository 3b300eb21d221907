"""The calls that the benchmarks of the proxy make: five kinds that an agent's traffic is made of, and two that echo.

Each kind is one request body and the bytes that the mock upstream answers it with. The request's model names the kind,
so that the mock needs no more of a body than that, whoever has serialized it again on the way.
"""

import json
from dataclasses import dataclass
from typing import Any

SSE = "text/event-stream"
JSON = "application/json"

DELTAS = 64
LONG_BYTES = 16_384
IMAGE_BYTES = 2_000_000

ECHO = "echo"
"""Answers with the marker that the request carries, so that every call has content of its own."""
ECHO_STREAM = "echo_stream"
"""The same as a stream, the marker in the middle of `ECHO_DELTAS` deltas."""
ECHO_DELTAS = 8


@dataclass(frozen=True, slots=True)
class CallKind:
    """One kind of call: what is asked, and what the upstream answers.

    `pieces` is the body of the answer in the pieces in which the upstream writes it: one, or an SSE event each.
    """

    name: str
    request: bytes
    pieces: tuple[bytes, ...]
    content_type: str = JSON

    @property
    def answer(self) -> bytes:
        """The whole body of the answer."""
        return b"".join(self.pieces)

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.content_type == SSE


def request_body(model: str, content: Any, **more: Any) -> bytes:
    """The JSON of a chat completion request with one message of a user."""
    return _json({"model": model, "messages": [{"role": "user", "content": content}], **more})


def completion(model: str, content: str | None, **message: Any) -> bytes:
    """The JSON of a whole chat completion."""
    reason = "tool_calls" if "tool_calls" in message else "stop"
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "logprobs": None,
        "finish_reason": reason,
    }
    return _json(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "created": 1_750_000_000,
            "model": model,
            "choices": [choice],
            "usage": {"prompt_tokens": 12, "completion_tokens": 9, "total_tokens": 21},
        }
    )


def event(model: str, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    """One SSE event of a streamed chat completion."""
    chunk = {
        "id": "chatcmpl-bench",
        "object": "chat.completion.chunk",
        "created": 1_750_000_000,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }
    return b"data: " + _json(chunk) + b"\n\n"


def stream(model: str, texts: list[str]) -> tuple[bytes, ...]:
    """The events of a streamed answer, one for each text, with the ending that OpenAI sends."""
    deltas = [event(model, {"role": "assistant", "content": text} if n == 0 else {"content": text})
              for n, text in enumerate(texts)]  # fmt: skip
    return (*deltas, event(model, {}, "stop") + b"data: [DONE]\n\n")


def echo_texts(marker: str) -> list[str]:
    """The texts of the deltas of an echo that is a stream."""
    return [marker if n == ECHO_DELTAS // 2 else f" {n} " for n in range(ECHO_DELTAS)]


def echo_stream(marker: str) -> tuple[bytes, ...]:
    """The events of an echo that is a stream."""
    return stream(ECHO_STREAM, echo_texts(marker))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _kinds() -> dict[str, CallKind]:
    sentence = "The quick brown fox jumps over the lazy dog. "
    long_text = (sentence * (LONG_BYTES // len(sentence) + 1))[:LONG_BYTES]
    tools = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "look_up", "arguments": json.dumps({"city": city, "day": n})},
        }
        for n, city in enumerate(("Oslo", "Lima", "Pune"))
    ]
    offered = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "The weather of one day.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
                "required": ["city", "day"],
            },
        },
    }
    image = [
        {"type": "text", "text": "What is on this picture?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * (IMAGE_BYTES // 8)}},
    ]
    words = [f"word{n} " for n in range(DELTAS)]
    kinds = [
        CallKind("short", request_body("short", "Say hello."), (completion("short", "Hello, how can I help?"),)),
        CallKind("long", request_body("long", long_text), (completion("long", long_text),)),
        CallKind("stream", request_body("stream", "Count.", stream=True), stream("stream", words), SSE),
        CallKind(
            "tools",
            request_body("tools", "The weather of three cities?", tools=[offered], parallel_tool_calls=True),
            (completion("tools", None, tool_calls=tools),),
        ),
        CallKind("image", request_body("image", image), (completion("image", "A grey square."),)),
    ]
    return {kind.name: kind for kind in kinds}


KINDS = _kinds()
"""`short`, `long` (16 KB each way), `stream` (64 deltas), `tools` (three parallel calls), `image` (2 MB asked)."""
