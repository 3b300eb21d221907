"""What a recorded call asked and was answered, as the content attributes of the GenAI conventions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.contracts.call import END2END, Call
from noria.services.proxy.exchange import Kind
from noria.services.proxy.semconv import INPUT_MESSAGES, OUTPUT_MESSAGES, SYSTEM_INSTRUCTIONS, TOOL_DEFINITIONS
from noria.services.proxy.semconv_messages import Message, chat_messages, semconv_message, semconv_tool, tool_definition
from noria.services.proxy.wire.json_text import to_text

Body = Mapping[str, Any]


@dataclass(slots=True)
class _Asked:
    """What a request says, in the vocabulary of chat completions; `system` only where it stands beside the messages."""

    messages: list[Message] = field(default_factory=list[Message])
    system: list[Message] = field(default_factory=list[Message])
    tools: list[Any] = field(default_factory=list[Any])


def content_attributes(call: Call, request: Body, response: Body) -> dict[str, str]:
    """JSON texts for `gen_ai.input.messages` and the other content attributes; none for what a call has not.

    `request` and `response` are the parsed `input` and `output` of the call, empty where those are no objects.
    """
    if call.process_node == END2END:
        asked, answered = _Asked(chat_messages("user", call.input)), _task_answer(call)
    else:
        kind = str(call.attributes.get("endpoint", Kind.CHAT.value))
        asked, answered = _REQUESTS.get(kind, _nothing)(request), list(_RESPONSES.get(kind, _no_answer)(response))
    said: dict[str, Any] = {
        INPUT_MESSAGES: [semconv_message(message) for message in asked.messages],
        OUTPUT_MESSAGES: [{**semconv_message(message), "finish_reason": why or ""} for message, why in answered],
        SYSTEM_INSTRUCTIONS: [part for message in asked.system for part in semconv_message(message)["parts"]],
        TOOL_DEFINITIONS: [semconv_tool(tool_definition(tool)) for tool in asked.tools],
    }
    return {name: to_text(value) for name, value in said.items() if value}


def _chat_request(body: Body) -> _Asked:
    return _Asked([dict(one) for one in _objects(body.get("messages"))], tools=_list(body.get("tools")))


def _chat_response(body: Body) -> Iterator[tuple[Message, Any]]:
    for choice in _objects(body.get("choices")):
        message = choice.get("message")
        if isinstance(message, Mapping):
            yield {"role": "assistant", **message}, choice.get("finish_reason")


def _completion_request(body: Body) -> _Asked:
    return _Asked(chat_messages("user", body["prompt"]) if body.get("prompt") else [])


def _completion_response(body: Body) -> Iterator[tuple[Message, Any]]:
    for choice in _objects(body.get("choices")):
        yield {"role": "assistant", "content": choice.get("text")}, choice.get("finish_reason")


def _responses_request(body: Body) -> _Asked:
    asked = _Asked(tools=_list(body.get("tools")))
    if isinstance(body.get("instructions"), str):
        asked.system = chat_messages("system", body["instructions"])
    if isinstance(body.get("input"), str):
        asked.messages = chat_messages("user", body["input"])
    for item in _objects(body.get("input")):
        if item.get("type", "message") == "message":
            asked.messages += chat_messages(_role(item, "user"), item.get("content"))
        else:  # a call, a result or a thought stands beside the messages there
            asked.messages += chat_messages("assistant", [item])
    return asked


def _responses_response(body: Body) -> Iterator[tuple[Message, Any]]:
    blocks: list[Any] = []
    for item in _objects(body.get("output")):
        blocks += _list(item.get("content")) if item.get("type") == "message" else [item]
    if blocks:
        yield chat_messages("assistant", blocks)[-1], body.get("status")


def _anthropic_request(body: Body) -> _Asked:
    asked = _Asked(tools=_list(body.get("tools")))
    if body.get("system"):
        asked.system = chat_messages("system", body["system"])
    for message in _objects(body.get("messages")):
        asked.messages += chat_messages(_role(message, "user"), message.get("content"))
    return asked


def _anthropic_response(body: Body) -> Iterator[tuple[Message, Any]]:
    if body.get("content"):
        yield chat_messages("assistant", body["content"])[-1], body.get("stop_reason")


def _task_answer(call: Call) -> list[tuple[Message, Any]]:
    return [({"role": "assistant", "content": call.output}, "stop")] if call.output else []


def _nothing(_body: Body) -> _Asked:
    return _Asked()


def _no_answer(_body: Body) -> Iterator[tuple[Message, Any]]:
    return iter(())


_REQUESTS: Mapping[str, Callable[[Body], _Asked]] = {
    Kind.CHAT: _chat_request,
    Kind.COMPLETION: _completion_request,
    Kind.RESPONSE: _responses_request,
    Kind.MESSAGE: _anthropic_request,
}
_RESPONSES: Mapping[str, Callable[[Body], Iterator[tuple[Message, Any]]]] = {
    Kind.CHAT: _chat_response,
    Kind.COMPLETION: _completion_response,
    Kind.RESPONSE: _responses_response,
    Kind.MESSAGE: _anthropic_response,
}
"""Embeddings are in neither: the conventions have no attributes for texts that are embedded, nor for vectors."""


def _objects(value: Any) -> Iterator[Body]:
    return (one for one in _list(value) if isinstance(one, Mapping))


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _role(message: Body, otherwise: str) -> str:
    role = message.get("role")
    return role if isinstance(role, str) and role else otherwise
