"""`POST /v1/chat/completions` of OpenAI and of all who speak it."""

from collections.abc import Iterator, Mapping
from typing import Any

from noria.services.proxy.wire import choices
from noria.services.proxy.wire.api import Answer, Api, event
from noria.services.proxy.wire.choices import ChoicesAssembler
from noria.services.proxy.wire.sse import DONE
from noria.services.proxy.wire.tool_calls import ToolCalls, grow_function

_FIRST_ONLY = ("prompt_token_ids",)


class ChatAssembler(ChoicesAssembler):
    """Folds chunks into the `chat.completion` object that an unstreamed call would have returned."""

    object_name = "chat.completion"

    def _grow(self, choice: dict[str, Any], part: Mapping[str, Any]) -> None:
        message = choice.setdefault("message", {})
        for key, value in part.items():
            if key == "delta":
                self._grow_message(message, value or {})
            elif key == "message" and isinstance(value, dict):
                for name, said in value.items():  # some servers end a stream with the whole message
                    message.setdefault(name, said)
            elif key != "index":
                self._grow_beside(choice, key, value)

    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **choice["message"]}
        if isinstance(message.get("tool_calls"), ToolCalls):
            message["tool_calls"] = message["tool_calls"].whole()
        rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
        return {"message": message, "finish_reason": choice.get("finish_reason"), **rest}

    def _grow_message(self, message: dict[str, Any], delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls" and isinstance(value, list):
                if not isinstance(message.get(key), ToolCalls):
                    message[key] = ToolCalls(self._merger)
                for call in value:
                    message[key].add(call)
            elif key == "function_call" and isinstance(value, dict):
                if not isinstance(message.get(key), dict):
                    message[key] = {}
                grow_function(self._merger, message[key], value)
            elif key != "tool_calls" or key not in message:
                self._merger.grow(message, {key: value})


def wants_usage(request: Mapping[str, Any]) -> bool:
    """Whether a streaming request asks for a last chunk with usage."""
    options = request.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def unfold(answer: Answer, request: Mapping[str, Any]) -> Iterator[bytes]:
    """The events, `[DONE]` included, that stream a recorded response: a role, the message, why it ended, usage."""
    shared = {key: value for key, value in answer.items() if key not in ("choices", "usage", *_FIRST_ONLY)}
    shared["object"] = "chat.completion.chunk"
    first = {key: answer[key] for key in _FIRST_ONLY if key in answer}
    with_usage = wants_usage(request) and answer.get("usage") is not None
    open_usage = {"usage": None} if with_usage else {}
    for choice in answer.get("choices") or ():
        index = choice.get("index", 0)
        message = dict(choice.get("message") or {})
        empty = {key: value for key, value in message.items() if value is None or value == ""}
        opening = {"role": message.pop("role", "assistant"), **empty}
        if isinstance(message.get("content"), str):
            opening["content"] = ""
        yield event({**shared, **first, "choices": [_part(index, opening)], **open_usage})
        first = {}
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
        delta = {key: value for key, value in message.items() if value is not None and value != ""}
        rest = {key: value for key, value in choice.items() if key not in ("index", "message", "finish_reason")}
        if delta or rest:
            yield event({**shared, "choices": [{**_part(index, delta), **rest}], **open_usage})
        yield event({**shared, "choices": [_part(index, {}, choice.get("finish_reason"))], **open_usage})
    if with_usage:
        yield event({**shared, "choices": [], "usage": answer["usage"]})
    yield b"data: " + DONE + b"\n\n"


def _part(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}


API = Api(ChatAssembler, unfold, choices.fault, choices.finish_reasons, choices.usage)
