"""The one mapping between a call and OpenTelemetry's names for it: what a span is given, and what is read from spans.

Written are the GenAI semantic conventions 1.41.1, the last version that stands in the main repository
(https://github.com/open-telemetry/semantic-conventions/tree/v1.41.1/docs/gen-ai). Read are those, the names that they
have renamed since 1.27, the first names of their own repository (semantic-conventions-genai), and what two widespread
instrumentations emit beside or instead of them: OpenLLMetry and OpenInference. A name stands in this file once; content
is for `semconv_content` (out) and `semconv_dialects` (in).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Attributes = Mapping[str, Any]
"""Attributes of a span, event or resource: text, numbers, booleans, lists and objects of them."""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
"""The version that is written; spans that come in may have any."""

INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"

SOURCE = "otlp"
"""`Call.attributes["source"]` of a call that came in as a span."""

_INT_LIMIT = 1 << 63
"""Attributes are int64."""


class Operation(StrEnum):
    """What a span stands for; the values are those of `gen_ai.operation.name`."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"
    INVOKE_AGENT = "invoke_agent"
    """A whole task: the `end2end` row of its trace, if the span is the root."""


OPERATIONS: Mapping[str, Operation] = {
    "chat": Operation.CHAT,
    "generate_content": Operation.CHAT,
    "text_completion": Operation.TEXT_COMPLETION,
    "completion": Operation.TEXT_COMPLETION,  # OpenLLMetry
    "embeddings": Operation.EMBEDDINGS,
    "embedding": Operation.EMBEDDINGS,  # OpenLLMetry, OpenInference
    "llm": Operation.CHAT,  # OpenInference
    "invoke_agent": Operation.INVOKE_AGENT,
    "invoke_workflow": Operation.INVOKE_AGENT,
    "agent": Operation.INVOKE_AGENT,  # OpenInference, OpenLLMetry
    "chain": Operation.INVOKE_AGENT,  # OpenInference: what is no agent is dropped for having a parent
    "workflow": Operation.INVOKE_AGENT,  # OpenLLMetry
}
"""How an operation is called, in lower case. What is missing here (`execute_tool`, `create_agent`, `retrieval`, …) is
no model call: a tool's result is part of the next call's input."""


def as_text(value: Any) -> str | None:
    """The value if it is text that says something."""
    return value if isinstance(value, str) and value else None


def as_int(value: Any) -> int | None:
    """A whole number; as text too, which JSON attributes are apt to be."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _INT_LIMIT else None
    return value if isinstance(value, int) and abs(value) < _INT_LIMIT else None


def as_number(value: Any) -> float | None:
    """A number that is finite and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_flag(value: Any) -> bool | None:
    """A boolean; `true` and `false` as text too."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def as_texts(value: Any) -> tuple[str, ...] | None:
    """A list of texts; one alone is a list of one."""
    values = value if isinstance(value, list | tuple) else (value,)
    texts = tuple(one for one in values if isinstance(one, str) and one)
    return texts or None


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that spans say. `names[0]` is written, if `written`; the first name that has a value is read."""

    names: tuple[str, ...]
    convert: Callable[[Any], Any] = as_text
    written: bool = True

    @property
    def name(self) -> str:
        """The name that is written."""
        return self.names[0]

    def read(self, attributes: Attributes) -> Any:
        """The value of the first name that has a usable one, None if there is none."""
        for name in self.names:
            value = self.convert(attributes.get(name))
            if value is not None:
                return value
        return None


def _field(*names: str, convert: Callable[[Any], Any] = as_text, written: bool = True) -> Field:
    return Field(names, convert, written)


OPERATION = _field("gen_ai.operation.name", "llm.request.type", "openinference.span.kind", "traceloop.span.kind")
PROVIDER = _field("gen_ai.provider.name", "gen_ai.system", "llm.provider", "llm.system")
MODEL = _field("gen_ai.request.model", "llm.request.model_name", "llm.model_name", "embedding.model_name")
RESPONSE_MODEL = _field("gen_ai.response.model", "llm.response.model_name", "llm.model_name")
RESPONSE_ID = _field("gen_ai.response.id")
FINISH_REASONS = _field(
    "gen_ai.response.finish_reasons", "gen_ai.response.finish_reason", "gen_ai.response.stop_reason",
    "llm.response.finish_reason", "llm.response.stop_reason", "llm.finish_reason", convert=as_texts,
)  # fmt: skip
FIRST_CHUNK_SECONDS = _field("gen_ai.response.time_to_first_chunk", convert=as_number)
ERROR_TYPE = _field("error.type")
HTTP_STATUS = _field("http.response.status_code", convert=as_int)
SERVER_ADDRESS = _field("server.address")
SERVER_PORT = _field("server.port", convert=as_int)
AGENT_NAME = _field("gen_ai.agent.name", "agent.name")
AGENT_VERSION = _field("noria.agent_version", "gen_ai.agent.version", "service.version")

UID = _field("noria.uid")
TENANT = _field("noria.tenant")
APP = _field("noria.app")
NODE = _field("noria.node", *AGENT_NAME.names)
POLICY_VERSION = _field("noria.policy_version")
ARM = _field("noria.arm")
STATUS = _field("noria.status")
CONSENT = _field("noria.consent", convert=as_flag)
SUBJECT_HASH = _field("noria.subject.hash")
"""The end user as the store knows them; a span of another's says them in clear, and they are hashed here."""
SUBJECT = _field("noria.subject", "enduser.id", "user.id", written=False)

CONTENT_BYTES = _field("noria.content_bytes", convert=as_int)
"""How large content was that a span goes without."""
ROLLOUT = "noria.rollout."
"""Begins the names for what a rollout's call belongs to: one for each key of `Call.attributes["rollout"]`."""

STREAM = _field("gen_ai.request.stream", "gen_ai.is_streaming", "llm.is_streaming", convert=as_flag)

PARAMETERS: Mapping[str, Field] = {
    "temperature": _field("gen_ai.request.temperature", convert=as_number),
    "top_p": _field("gen_ai.request.top_p", convert=as_number),
    "top_k": _field("gen_ai.request.top_k", "llm.top_k", convert=as_int),  # was a double before 0.1.0
    "max_tokens": _field("gen_ai.request.max_tokens", "gen_ai.request.max_completion_tokens", convert=as_int),
    "frequency_penalty": _field("gen_ai.request.frequency_penalty", "llm.frequency_penalty", convert=as_number),
    "presence_penalty": _field("gen_ai.request.presence_penalty", "llm.presence_penalty", convert=as_number),
    "stop": _field("gen_ai.request.stop_sequences", "llm.chat.stop_sequences", convert=as_texts),
    "seed": _field("gen_ai.request.seed", "gen_ai.openai.request.seed", convert=as_int),
    "n": _field("gen_ai.request.choice.count", "gen_ai.request.n", convert=as_int),
    "stream": STREAM,
    "reasoning_effort": _field(
        "gen_ai.request.reasoning.level", "gen_ai.request.reasoning_effort", "llm.request.reasoning_effort",
        written=False,
    ),
}  # fmt: skip
"""Parameters of a request, by their keys in the body of a chat completion."""

_SAID_AS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "stop": ("stop", "stop_sequences"),
}
"""Where the APIs that are recorded have other keys for a parameter."""

USAGE: Mapping[str, Field] = {
    "input": _field(
        "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens", "llm.token_count.prompt",
        convert=as_int,
    ),
    "output": _field(
        "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens",
        "llm.token_count.completion", convert=as_int,
    ),
    "cache_read": _field(
        "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens",
        "llm.token_count.prompt_details.cache_read", convert=as_int,
    ),
    "cache_write": _field(
        "gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_write.input_tokens",
        "gen_ai.usage.cache_creation_input_tokens", "llm.token_count.prompt_details.cache_write", convert=as_int,
    ),
    "reasoning": _field(
        "gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens", "llm.usage.reasoning_tokens",
        "llm.token_count.completion_details.reasoning", convert=as_int,
    ),
    "total": _field(
        "gen_ai.usage.total_tokens", "llm.usage.total_tokens", "llm.token_count.total", convert=as_int, written=False,
    ),
}  # fmt: skip
"""Token counts. `input` has all input tokens, the cached ones included; `output` has the reasoning."""

_FINISH: Mapping[str, str] = {
    "tool_call": "tool_calls",  # the conventions' own word
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}


def operation_of(attributes: Attributes) -> Operation | None:
    """What a span with these attributes stands for; None for one that is no model call and no task.

    A span that names a GenAI system and a model but no operation is taken for a chat: early instrumentations had none.
    """
    said = OPERATION.read(attributes)
    if said is not None:
        return OPERATIONS.get(said.lower())
    return Operation.CHAT if attributes.get("gen_ai.request.model") and PROVIDER.read(attributes) else None


def usage_attributes(usage: Attributes | None, *, apart: bool) -> Iterator[tuple[str, int]]:
    """Token counts as span attributes, from the `usage` of any API that is recorded.

    `apart` says that its input tokens exclude the cached ones, as Anthropic counts; the conventions count all.
    """
    usage = usage or {}
    details = [usage.get(key) for key in ("prompt_tokens_details", "input_tokens_details")]
    made = [usage.get(key) for key in ("completion_tokens_details", "output_tokens_details")]
    cached = as_int(usage.get("cache_read_input_tokens"))
    written = as_int(usage.get("cache_creation_input_tokens"))
    counts = {
        "input": _first(usage, "prompt_tokens", "input_tokens"),
        "output": _first(usage, "completion_tokens", "output_tokens"),
        "cache_read": cached if cached is not None else _of_details(details, "cached_tokens"),
        "cache_write": written,
        "reasoning": _of_details(made, "reasoning_tokens"),
    }
    if apart and counts["input"] is not None:
        counts["input"] += (cached or 0) + (written or 0)
    for key, count in counts.items():
        if count is not None and count >= 0:
            yield USAGE[key].name, count


def usage_of(attributes: Attributes) -> dict[str, Any] | None:
    """The `usage` of a chat completion, from span attributes; None if they have no counts."""
    counts = {key: count for key, field in USAGE.items() if (count := field.read(attributes)) is not None}
    if counts.keys().isdisjoint(("input", "output")):
        return None
    prompt, completion = counts.get("input", 0), counts.get("output", 0)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": counts.get("total", prompt + completion),
    }
    if "cache_read" in counts:
        usage["prompt_tokens_details"] = {"cached_tokens": counts["cache_read"]}
    if "cache_write" in counts:
        usage["cache_creation_input_tokens"] = counts["cache_write"]
    if "reasoning" in counts:
        usage["completion_tokens_details"] = {"reasoning_tokens": counts["reasoning"]}
    return usage


def parameter_attributes(body: Attributes) -> Iterator[tuple[str, Any]]:
    """The parameters of a request body of any API that is recorded, as span attributes."""
    for key, field in PARAMETERS.items():
        if not field.written:
            continue
        for said in _SAID_AS.get(key, (key,)):
            value = field.convert(body.get(said))
            if value is not None and not (key == "n" and value == 1) and not (key == "stream" and not value):
                yield field.name, value
                break


def parameters_of(attributes: Attributes) -> dict[str, Any]:
    """The parameters of a request as a chat completion's body has them."""
    found = {key: field.read(attributes) for key, field in PARAMETERS.items()}
    return {key: list(said) if isinstance(said, tuple) else said for key, said in found.items() if said is not None}


def finish_reason(said: str) -> str:
    """Why a choice ended, in the words of a chat completion."""
    return _FINISH.get(said, said)


def _first(usage: Attributes, *keys: str) -> int | None:
    return next((count for key in keys if (count := as_int(usage.get(key))) is not None), None)


def _of_details(details: list[Any], key: str) -> int | None:
    counts = [as_int(one.get(key)) for one in details if isinstance(one, Mapping)]
    return next((count for count in counts if count is not None), None)
