"""Messages in the shape of a chat completion, from the blocks of any vocabulary, and as parts of the GenAI conventions.

The vocabularies: parts of the conventions (`tool_call`, `tool_call_response`, `blob`, `uri`, …; `docs/gen-ai/
gen-ai-input-messages.json` of 1.41.1), content parts of OpenAI's chat completions and Responses, content blocks of
Anthropic, and those of Bedrock's Converse, which have no `type`. Text, tool calls and tool results come through without
loss; a block of an unknown type is kept as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from noria.services.proxy.wire.json_text import parse, to_text

Message = dict[str, Any]
Block = Mapping[str, Any]

_ROLES: Mapping[str, str] = {"human": "user", "ai": "assistant", "model": "assistant"}

_SAYS = ("content", "tool_calls", "reasoning_content", "refusal")

REDACTED = "__REDACTED__"
"""What OpenInference writes where content is hidden."""


def chat_messages(role: str, content: Any, **more: Any) -> list[Message]:
    """One message of any vocabulary as chat messages: a result of a tool becomes a message of its own, before the rest.

    `content` is text, a list of blocks, or None; `more` are further keys of the message (`name`, `tool_call_id`, …),
    left out where None.
    """
    found = _Found()
    for block in content if isinstance(content, list | tuple) else () if content is None else (content,):
        found.take(block)
    message: Message = {"role": _ROLES.get(role, role), "content": found.content()}
    if found.calls:
        message["tool_calls"] = found.calls
    if found.reasoning:
        message["reasoning_content"] = "\n".join(found.reasoning)
    if found.refusal is not None:
        message["refusal"] = found.refusal
    message.update({key: value for key, value in more.items() if value is not None})
    return found.results if found.results and not says_something(message) else [*found.results, message]


def says_something(message: Message) -> bool:
    """Whether the content of a message was captured: a role alone says nothing."""
    return any(message.get(key) not in (None, "", []) for key in _SAYS)


def tool_call(name: Any, arguments: Any, call_id: Any) -> dict[str, Any]:
    """A tool call of a chat message; arguments are JSON text there."""
    text = arguments if isinstance(arguments, str) else to_text({} if arguments is None else arguments)
    call: dict[str, Any] = {"type": "function", "function": {"name": _str(name), "arguments": text}}
    return {"id": call_id, **call} if isinstance(call_id, str) and call_id else call


def tool_definition(tool: Any) -> Any:
    """A tool as the `tools` of a chat completion have it, from any vocabulary."""
    if not isinstance(tool, Mapping) or "function" in tool or "name" not in tool:
        return tool
    parameters = next((tool[key] for key in ("parameters", "input_schema") if tool.get(key) is not None), None)
    if tool.get("type") not in (None, "function", "custom") and parameters is None:
        return dict(tool)  # a tool that the provider runs itself
    said = {"name": tool["name"], "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


def semconv_tool(tool: Any) -> Any:
    """The same as `gen_ai.tool.definitions` have it."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return {"type": "function", **function} if isinstance(function, Mapping) else tool


def semconv_message(message: Message) -> dict[str, Any]:
    """A chat message as the conventions have it: `{"role", "parts"}`."""
    role = _str(message.get("role") or "user")
    content = message.get("content")
    if role in ("tool", "function"):
        response = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        parts: list[Any] = [_without_none(response)]
    else:
        parts = [_part(one) for one in (content if isinstance(content, list) else [content]) if one is not None]
        if isinstance(message.get("reasoning_content"), str):
            parts.insert(0, {"type": "reasoning", "content": message["reasoning_content"]})
    if isinstance(message.get("refusal"), str):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    calls = message.get("tool_calls")
    legacy = [{"function": message["function_call"]}] if isinstance(message.get("function_call"), Mapping) else []
    for call in [*(calls if isinstance(calls, list) else ()), *legacy]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            said = {"id": call.get("id"), "name": _str(function.get("name"))}
            parts.append(_without_none({"type": "tool_call", **said, "arguments": _parsed(function.get("arguments"))}))
        else:
            parts.append(call if isinstance(call, Mapping) else {"type": "tool_call", "name": "", "arguments": call})
    return _without_none({"role": role, "parts": parts, "name": message.get("name")})


class _Found:
    """What the blocks of one message hold."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[Message] = []
        self.reasoning: list[str] = []
        self.refusal: str | None = None

    def take(self, block: Any) -> None:
        if not isinstance(block, Mapping):
            self._text(block if isinstance(block, str) else to_text(block))
            return
        kind = block.get("type")
        if kind is None:
            kind = next((key for key in ("toolUse", "toolResult", "text") if key in block), None)
        take = _TAKE.get(kind) if isinstance(kind, str) else None
        if take is None or not take(self, block):
            self.parts.append(dict(block))

    def content(self) -> Any:
        """Text alone as text, as most clients send it; None where there is none."""
        if len(self.parts) == 1 and self.parts[0].keys() == {"type", "text"}:
            return self.parts[0]["text"]
        return self.parts or None

    def _text(self, text: str) -> bool:
        self.parts.append({"type": "text", "text": text})
        return True

    def text(self, block: Block) -> bool:
        text = next((block[key] for key in ("content", "text", "value") if isinstance(block.get(key), str)), None)
        return text is not None and self._text(text)

    def call(self, block: Block) -> bool:
        arguments = next((block[key] for key in ("arguments", "input") if key in block), None)
        call_id = next((block[key] for key in ("id", "call_id", "toolUseId") if block.get(key)), None)
        if not isinstance(block.get("name"), str):
            return False
        self.calls.append(tool_call(block["name"], arguments, call_id))
        return True

    def result(self, block: Block) -> bool:
        said = next((block[key] for key in ("response", "result", "content", "output") if key in block), None)
        call_id = next((block[key] for key in ("id", "tool_use_id", "call_id", "toolUseId") if block.get(key)), None)
        content: Any = said if isinstance(said, str) or _is_texts(said) else to_text(said)
        if isinstance(content, list) and len(content) == 1:
            content = content[0]["text"]
        message = {"role": "tool", "content": content}
        self.results.append({**message, "tool_call_id": call_id} if isinstance(call_id, str) else message)
        return True

    def thought(self, block: Block) -> bool:
        keys = ("content", "thinking", "text")
        text = next((block[key] for key in keys if isinstance(block.get(key), str)), None)
        if text is None:
            summary = block.get("summary")  # of the Responses API
            parts = [one for one in summary if isinstance(one, Mapping)] if isinstance(summary, list) else []
            text = "\n".join(one["text"] for one in parts if isinstance(one.get("text"), str)) or None
        if text is not None:
            self.reasoning.append(text)
        return text is not None

    def refuse(self, block: Block) -> bool:
        self.refusal = _str(block.get("refusal") or block.get("content"))
        return True

    def blob(self, block: Block) -> bool:
        """Inline bytes of the conventions, base64."""
        data, kind = block.get("content"), _str(block.get("mime_type") or f"{_str(block.get('modality'))}/*")
        if not isinstance(data, str):
            return False
        if kind.startswith("audio/"):
            audio = {"data": data, "format": kind.partition("/")[2].removeprefix("x-")}
            self.parts.append({"type": "input_audio", "input_audio": audio})
        else:
            self._image(f"data:{kind};base64,{data}")
        return True

    def uri(self, block: Block) -> bool:
        return isinstance(block.get("uri"), str) and self._image(block["uri"])

    def file(self, block: Block) -> bool:
        if not isinstance(block.get("file_id"), str):
            return False
        self.parts.append({"type": "file", "file": {"file_id": block["file_id"]}})
        return True

    def image(self, block: Block) -> bool:
        """An image of the Responses API (`image_url`) or of Anthropic (`source`)."""
        source = block.get("source")
        if isinstance(source, Mapping) and isinstance(source.get("data"), str):
            return self._image(f"data:{_str(source.get('media_type'))};base64,{source['data']}")
        url = source.get("url") if isinstance(source, Mapping) else block.get("image_url")
        return isinstance(url, str) and self._image(url)

    def _image(self, url: str) -> bool:
        self.parts.append({"type": "image_url", "image_url": {"url": url}})
        return True


_TAKE: Mapping[str, Callable[[_Found, Block], bool]] = {
    "text": _Found.text,
    "input_text": _Found.text,
    "output_text": _Found.text,
    "tool_call": _Found.call,
    "tool_use": _Found.call,
    "function_call": _Found.call,
    "tool_call_response": _Found.result,
    "tool_result": _Found.result,
    "function_call_output": _Found.result,
    "toolUse": lambda found, block: isinstance(block["toolUse"], Mapping) and found.call(block["toolUse"]),
    "toolResult": lambda found, block: isinstance(block["toolResult"], Mapping) and found.result(block["toolResult"]),
    "reasoning": _Found.thought,
    "thinking": _Found.thought,
    "refusal": _Found.refuse,
    "blob": _Found.blob,
    "uri": _Found.uri,
    "file": _Found.file,
    "image": _Found.image,
    "input_image": _Found.image,
}


def _part(block: Any) -> Any:
    """A content part of a chat message as a part of the conventions; what they have no part for stays as it is."""
    if isinstance(block, str):
        return {"type": "text", "content": block}
    if not isinstance(block, Mapping):
        return {"type": "text", "content": to_text(block)}
    inner = block.get(block.get("type") if isinstance(block.get("type"), str) else "")
    match block.get("type"):
        case "text" if isinstance(inner, str):
            return {"type": "text", "content": inner}
        case "image_url" if isinstance(inner, Mapping) and isinstance(inner.get("url"), str):
            return _media(inner["url"])
        case "input_audio" if isinstance(inner, Mapping) and isinstance(inner.get("data"), str):
            kind = f"audio/{_str(inner.get('format'))}"
            return {"type": "blob", "modality": "audio", "mime_type": kind, "content": inner["data"]}
        case "file" if isinstance(inner, Mapping) and isinstance(inner.get("file_id"), str):
            return {"type": "file", "modality": "document", "file_id": inner["file_id"]}
    return dict(block) if isinstance(block.get("type"), str) else {**block, "type": "unknown"}


def _media(url: str) -> dict[str, Any]:
    header, comma, data = url.partition(",")
    if comma and header.startswith("data:") and header.endswith(";base64"):
        kind = header.removeprefix("data:").removesuffix(";base64")
        return {"type": "blob", "modality": "image", "mime_type": kind, "content": data}
    return {"type": "uri", "modality": "image", "uri": url}


def _is_texts(value: Any) -> bool:
    """Whether a tool's result is a list of texts, as content parts have them."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, Mapping) and isinstance(one.get("text"), str) and len(one) <= 2 for one in value)


def _parsed(arguments: Any) -> Any:
    """Arguments as the value they are the JSON text of; text that is no JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse(arguments.encode())
    except ValueError:
        return arguments


def _str(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else to_text(value)


def _without_none(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}
