"""What a cassette's response says, read without the code that is tested: by the OpenAI SDK, or line by line."""

import json
from dataclasses import dataclass
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from noria.services.proxy.exchange import Kind
from tests.recordings.cassettes import Recorded


@dataclass(frozen=True)
class Said:
    """The text, the tool calls as (name, parsed arguments), why it ended, and the count of all tokens that came out."""

    texts: tuple[str, ...]
    calls: tuple[tuple[str, Any], ...]
    reasons: tuple[str, ...]
    tokens_out: int | None


def said_on_wire(recorded: Recorded) -> Said:
    """What the response of the cassette says."""
    if not recorded.streamed:
        return said_in(recorded.kind, json.loads(recorded.text))
    events = [json.loads(line[6:]) for line in recorded.text.splitlines() if line.startswith("data: {")]
    if recorded.kind is Kind.CHAT:
        return _chat_stream(events)
    if recorded.kind is Kind.MESSAGE:
        return _message_stream(events)
    assert recorded.kind is Kind.RESPONSE
    (whole,) = [event["response"] for event in events if event["type"] == "response.completed"]
    return said_in(recorded.kind, whole)


def said_in(kind: Kind | None, answer: dict[str, Any]) -> Said:
    """What an unstreamed response says, or the record of a streamed one."""
    usage = answer.get("usage") or {}
    if kind is Kind.EMBEDDING:
        return Said((), (), (), None)
    if kind is Kind.CHAT:
        messages = [choice["message"] for choice in answer["choices"]]
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        return Said(
            tuple(message.get("content") or "" for message in messages),
            tuple((call["name"], json.loads(call["arguments"])) for call in calls),
            tuple(choice["finish_reason"] for choice in answer["choices"] if choice.get("finish_reason")),
            usage.get("completion_tokens"),
        )
    items = answer["output"] if kind is Kind.RESPONSE else answer["content"]
    if kind is Kind.RESPONSE:
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
        reasons = (answer["status"],)
    else:
        parts = [item for item in items if item["type"] == "text"]
        calls = [(item["name"], item["input"]) for item in items if item["type"] == "tool_use"]
        reasons = (answer["stop_reason"],)
    return Said(tuple(part["text"] for part in parts), tuple(calls), reasons, usage.get("output_tokens"))


def _chat_stream(events: list[dict[str, Any]]) -> Said:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    tokens_out = None
    for event in events:
        state.handle_chunk(ChatCompletionChunk.construct(**event))
        tokens_out = (event.get("usage") or {}).get("completion_tokens", tokens_out)
    answer = state.current_completion_snapshot.model_dump()
    return Said(*[getattr(said_in(Kind.CHAT, answer), name) for name in ("texts", "calls", "reasons")], tokens_out)


def _message_stream(events: list[dict[str, Any]]) -> Said:
    texts: dict[int, str] = {}
    inputs: dict[int, str] = {}
    names: dict[int, str] = {}
    reason, tokens_out = "", None
    for event in events:
        delta = event.get("delta", {})
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]] = event["content_block"]["name"]
        elif delta.get("type") == "text_delta":
            texts[event["index"]] = texts.get(event["index"], "") + delta["text"]
        elif delta.get("type") == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            reason, tokens_out = delta["stop_reason"], event["usage"]["output_tokens"]
    calls = tuple((name, json.loads(inputs.get(index) or "{}")) for index, name in names.items())
    return Said(tuple(texts.values()), calls, (reason,), tokens_out)
