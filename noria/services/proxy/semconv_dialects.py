"""What spans say of the content of a call, in each of the ways in which deployed instrumentations say it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from noria.services.proxy.semconv import (
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    SYSTEM_INSTRUCTIONS,
    TOOL_DEFINITIONS,
    Attributes,
    as_text,
)
from noria.services.proxy.semconv_messages import (
    REDACTED,
    Message,
    chat_messages,
    says_something,
    tool_call,
    tool_definition,
)
from noria.services.proxy.semconv_tree import at, json_value, numbered, object_of, objects

Event = tuple[str, Attributes]
"""Name and attributes of a span event."""


class Dialect(StrEnum):
    """Where the messages of a call stand in its span."""

    GEN_AI = "gen_ai"
    """Attributes with a JSON list each, on the span or on one event: the conventions from 1.37 on."""
    GEN_AI_EVENTS = "gen_ai.events"
    """An event for each message (`gen_ai.user.message`, …, `gen_ai.choice`): 1.28 to 1.36, as span events."""
    GEN_AI_CONTENT = "gen_ai.content"
    """The attributes `gen_ai.prompt` and `gen_ai.completion`, on two events or on the span: 1.27 and before."""
    OPENLLMETRY = "openllmetry"
    """Numbered attributes `gen_ai.prompt.0.content`, `gen_ai.completion.0.…`: OpenLLMetry, for OpenAI before 0.55."""
    OPENINFERENCE = "openinference"
    """Numbered attributes `llm.input_messages.0.message.content`, and the JSON of the call itself as `input.value`."""


@dataclass(slots=True)
class Content:
    """What was found. `messages` and `choices` are chat messages; a choice comes with why it ended.

    request, response    the JSON text of the call itself where the span has it
    response_id  of that response
    parameters           of the request, by their keys in its body, where the span has them as one JSON object
    fault                why what is there is not all of it, None if nothing speaks against it
    """

    dialect: Dialect
    messages: list[Message] = field(default_factory=list[Message])
    choices: list[tuple[Message, str | None]] = field(default_factory=list[tuple[Message, str | None]])
    tools: list[Any] = field(default_factory=list[Any])
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    request: str | None = None
    response: str | None = None
    response_id: str | None = None
    fault: str | None = None

    @property
    def whole(self) -> bool:
        """Whether every message and every choice of the call was captured."""
        said = [*self.messages, *(message for message, _ in self.choices)]
        return self.fault is None and bool(self.messages and self.choices) and all(map(says_something, said))

    @property
    def lacks_tools(self) -> bool:
        """Whether the model used tools whose definitions were not captured: then the prompt was a longer one."""
        said = [*self.messages, *(message for message, _ in self.choices)]
        return self.request is None and not self.tools and any(message.get("tool_calls") for message in said)


def content_of(attributes: Attributes, events: Sequence[Event]) -> Content | None:
    """The content of a model call, None where the span has none. What is malformed is left out and named as `fault`."""
    return next((content for read in _READERS if (content := read(attributes, events)) is not None), None)


def task_text(attributes: Attributes, events: Sequence[Event]) -> tuple[str | None, str | None]:
    """What a whole task was asked and what it answered, as one text each; None for what was not captured."""
    content = content_of(attributes, events)
    asked = [one for one in content.messages if one.get("role") == "user"] if content is not None else []
    answered = [message for message, _ in content.choices] if content is not None else []
    return (
        _task_side(attributes, ("input.value", "traceloop.entity.input"), asked),
        _task_side(attributes, ("output.value", "traceloop.entity.output"), answered),
    )


def _task_side(attributes: Attributes, names: tuple[str, ...], messages: list[Message]) -> str | None:
    """The text that one of these attributes has, else that of the last message."""
    said = [as_text(attributes.get(name)) for name in names]
    text = next((one for one in said if one is not None), None)
    if text is None and messages:
        text = as_text(messages[-1].get("content"))
    return None if text is None or REDACTED in text else text


def embedded_texts(attributes: Attributes, events: Sequence[Event]) -> list[str]:
    """The texts of an embeddings call, as far as they were captured."""
    rows = numbered(attributes, "embedding.embeddings")
    texts = [at(row, "embedding", "text") for row in rows]
    if not texts and (content := content_of(attributes, events)) is not None:
        texts = [message.get("content") for message in content.messages]
    return [text for text in texts if isinstance(text, str) and text != REDACTED]


def _gen_ai(attributes: Attributes, events: Sequence[Event]) -> Content | None:
    names = (INPUT_MESSAGES, OUTPUT_MESSAGES, SYSTEM_INSTRUCTIONS, TOOL_DEFINITIONS)
    said: dict[str, Any] = {}
    for source in (attributes, *(details for _, details in events)):
        said.update({name: source[name] for name in names if name in source})
    if said.keys().isdisjoint((INPUT_MESSAGES, OUTPUT_MESSAGES)):
        return None
    content = Content(Dialect.GEN_AI)
    for name, value in said.items():
        said[name] = json_value(value)
        if not isinstance(said[name], list) and not (name == SYSTEM_INSTRUCTIONS and isinstance(said[name], str)):
            said[name] = []
            content.fault = f"{name} is no JSON list; a limit on the length of attributes cuts it off"
    if said.get(SYSTEM_INSTRUCTIONS):
        content.messages += chat_messages("system", said[SYSTEM_INSTRUCTIONS])
    for message in objects(said.get(INPUT_MESSAGES)):
        content.messages += _of_message(message, "user")
    for message in objects(said.get(OUTPUT_MESSAGES)):
        content.choices.append((_of_message(message, "assistant")[-1], as_text(message.get("finish_reason"))))
    content.tools = [tool_definition(tool) for tool in said.get(TOOL_DEFINITIONS) or ()]
    return content


def _openinference(attributes: Attributes, _events: Sequence[Event]) -> Content | None:
    content = Content(Dialect.OPENINFERENCE)
    for row in numbered(attributes, "llm.input_messages"):
        content.messages += _of_openinference(at(row, "message"))
    for row in numbered(attributes, "llm.output_messages"):
        content.choices.append((_of_openinference(at(row, "message"), "assistant")[-1], None))
    for row in numbered(attributes, "llm.prompts"):
        content.messages += chat_messages("user", at(row, "prompt", "text"))
    for row in numbered(attributes, "llm.choices"):
        content.choices.append(({"role": "assistant", "content": at(row, "completion", "text")}, None))
    asked = _call_itself(attributes, "input", "messages", lambda one: isinstance(one.get("role"), str))
    if asked is not None:
        content.request = attributes["input.value"]
        content.messages = [dict(one) for one in asked["messages"]]
    answered = _call_itself(attributes, "output", "choices", lambda one: isinstance(one.get("message"), Mapping))
    if answered is not None:
        content.response = attributes["output.value"]
        content.response_id = as_text(answered.get("id"))
        content.choices = [(dict(one["message"]), as_text(one.get("finish_reason"))) for one in answered["choices"]]
    if not content.messages and not content.choices:
        return None
    schemas = [json_value(at(row, "tool", "json_schema")) for row in numbered(attributes, "llm.tools")]
    content.tools = [tool_definition(schema) for schema in schemas if isinstance(schema, Mapping)]
    parameters = json_value(attributes.get("llm.invocation_parameters"))
    if isinstance(parameters, Mapping):
        content.parameters = {key: value for key, value in parameters.items() if key not in ("messages", "tools")}
    said = [value for name, value in attributes.items() if name.startswith(_SAYS)]
    if any(REDACTED in value for value in said if isinstance(value, str)):
        content.fault = "content is hidden (OPENINFERENCE_HIDE_…)"
    return content


_SAYS = ("input.value", "output.value", "llm.input_messages", "llm.output_messages", "llm.prompts", "llm.choices")


def _openllmetry(attributes: Attributes, _events: Sequence[Event]) -> Content | None:
    content = Content(Dialect.OPENLLMETRY)
    for row in numbered(attributes, "gen_ai.prompt"):
        content.messages += _of_message(row, "user")
    for row in numbered(attributes, "gen_ai.completion"):
        content.choices.append((_of_message(row, "assistant")[-1], as_text(row.get("finish_reason"))))
    if not content.messages and not content.choices:
        return None
    for row in numbered(attributes, "llm.request.functions"):
        content.tools.append(tool_definition({**row, "parameters": json_value(row.get("parameters"))}))
    return content


def _gen_ai_events(_attributes: Attributes, events: Sequence[Event]) -> Content | None:
    content = Content(Dialect.GEN_AI_EVENTS)
    for name, attributes in events:
        body = {**attributes, **object_of(json_value(attributes.get("gen_ai.event.content")))}
        if name == "gen_ai.choice":
            said = json_value(body.get("message"))
            message = {**body, **said} if isinstance(said, Mapping) else {**body, "content": body.get("message")}
            content.choices.append((_of_message(message, "assistant")[-1], as_text(body.get("finish_reason"))))
        elif name in _EVENT_ROLES:
            answered = {"tool_call_id": body.get("id")} if name == "gen_ai.tool.message" else {}
            content.messages += _of_message({**answered, **body}, _EVENT_ROLES[name])
        else:
            continue
        calls = [object_of(call.get("function", call)) for call in objects(json_value(body.get("tool_calls")))]
        if any("arguments" not in call for call in calls):
            content.fault = f"{name} has a tool call without its arguments: content was not captured"
    return content if content.messages or content.choices else None


_EVENT_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}


def _gen_ai_content(attributes: Attributes, events: Sequence[Event]) -> Content | None:
    content = Content(Dialect.GEN_AI_CONTENT)
    for source in (attributes, *(details for _, details in events)):
        if isinstance(source.get("gen_ai.prompt"), str | list):
            content.messages += _messages_in(source["gen_ai.prompt"], "user")
        if isinstance(source.get("gen_ai.completion"), str | list):
            said = _messages_in(source["gen_ai.completion"], "assistant")
            content.choices += [(message, message.pop("finish_reason", None)) for message in said]
    return content if content.messages or content.choices else None


_READERS: tuple[Callable[[Attributes, Sequence[Event]], Content | None], ...] = (
    _gen_ai, _openinference, _openllmetry, _gen_ai_events, _gen_ai_content,
)  # fmt: skip


def _of_message(message: Mapping[str, Any], role: str) -> list[Message]:
    """A message with `parts`, or in the way of a chat completion, or a row of OpenLLMetry; at least one comes out."""
    said = message.get("role")
    blocks = message.get("parts", message.get("content"))
    more = {key: message.get(key) for key in ("name", "tool_call_id", "refusal")}
    found = chat_messages(said if isinstance(said, str) and said else role, _blocks(blocks), **more)
    calls = [_call(one) for one in objects(json_value(message.get("tool_calls")))]
    if calls:
        found[-1].setdefault("tool_calls", []).extend(calls)
    return found


def _of_openinference(message: Any, role: str = "user") -> list[Message]:
    message = object_of(message)
    contents = [object_of(row.get("message_content")) for row in objects(message.get("contents"))]
    blocks = [
        {"type": "image", "image_url": url} if isinstance(url := at(block, "image", "image", "url"), str) else block
        for block in contents
    ]
    calls = [row.get("tool_call") for row in objects(message.get("tool_calls"))]
    return _of_message({**message, "content": blocks or message.get("content"), "tool_calls": calls}, role)


def _call(said: Mapping[str, Any]) -> dict[str, Any]:
    function = object_of(said.get("function")) or said
    return tool_call(function.get("name"), function.get("arguments"), said.get("id"))


def _messages_in(value: Any, role: str) -> list[Message]:
    said = json_value(value)
    said = said.get("messages", [said]) if isinstance(said, Mapping) else said
    if not isinstance(said, list) or not all(isinstance(one, Mapping) for one in said):
        return chat_messages(role, value)
    found: list[Message] = []
    for one in said:
        messages = _of_message(object_of(one.get("message")) or one, role)
        if isinstance(one.get("finish_reason"), str):
            messages[-1]["finish_reason"] = one["finish_reason"]
        found += messages
    return found


def _call_itself(
    attributes: Attributes, side: str, key: str, rule: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any] | None:
    """The request or the response as the client library had it, if the span has it as JSON with a list `key`."""
    if attributes.get(f"{side}.mime_type") != "application/json":
        return None
    said = object_of(json_value(attributes.get(f"{side}.value")))
    rows = said.get(key)
    whole = isinstance(rows, list) and rows and all(isinstance(one, Mapping) and rule(one) for one in rows)
    return said if whole else None


def _blocks(content: Any) -> Any:
    """Text that is itself a list of content blocks, as OpenLLMetry and Strands write them, as that list."""
    if isinstance(content, str) and content.startswith("[{"):
        blocks = json_value(content)
        if isinstance(blocks, list) and all(isinstance(one, Mapping) and _is_block(one) for one in blocks):
            return blocks
    return content


def _is_block(one: Mapping[str, Any]) -> bool:
    return one.get("type") in _BLOCK_TYPES or bool({"toolUse", "toolResult"} & one.keys()) or one.keys() == {"text"}


_BLOCK_TYPES = ("text", "image_url", "image", "input_audio", "tool_use", "tool_result", "thinking", "document", "file")
