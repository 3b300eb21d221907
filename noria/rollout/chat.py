"""Reads requests and responses of the OpenAI chat completions format.

Every function accepts whatever crossed the wire: text that is no JSON, or JSON of another shape, gives the empty value.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def parse_object(text: str) -> Mapping[str, Any]:
    """The JSON object in `text`; empty if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def messages_of(request: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The messages of a request body."""
    messages = request.get("messages")
    if not isinstance(messages, list):
        return ()
    return tuple(message for message in messages if isinstance(message, dict))


def first_message(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """The assistant's message of the first choice of a response body."""
    message = _first_choice(response).get("message")
    return message if isinstance(message, dict) else {}


def finish_reason_of(response: Mapping[str, Any]) -> str | None:
    """`finish_reason` of the first choice."""
    reason = _first_choice(response).get("finish_reason")
    return reason if isinstance(reason, str) else None


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a message; of a list of content parts, the text parts joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def action_of(message: Mapping[str, Any]) -> str:
    """What an assistant's message does: the JSON of its tool calls if it has any, else its content."""
    calls = message.get("tool_calls")
    return json.dumps(calls, ensure_ascii=False) if calls else content_of(message)


def thought_of(message: Mapping[str, Any]) -> str:
    """The reasoning text of an assistant's message; content that goes with tool calls is reasoning too (ReAct)."""
    parts = [message.get("reasoning_content") or message.get("reasoning")]
    if message.get("tool_calls"):
        parts.append(content_of(message))
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def _first_choice(response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}
