"""Names of the conventions, out and in: what is written can be read, and what others write too."""

import inspect
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    server_attributes,
)
from opentelemetry.semconv.schemas import Schemas

from noria.contracts.call import END2END, Arm, CallStatus
from noria.services.proxy import semconv
from noria.services.proxy.otlp_calls import call_of
from noria.services.proxy.otlp_request import Source
from noria.services.proxy.otlp_sender import Sender
from noria.services.proxy.semconv_dialects import content_of
from noria.services.proxy.spans import attributes_of, span_of
from tests.noria.services.proxy.semconv_cases import (
    DOCUMENTATION,
    NAMED,
    RESOURCE,
    call,
    read,
    sent_and_read,
    span,
)

# What is written


def registered(*modules: ModuleType) -> set[str]:
    return {value for module in modules for _, value in inspect.getmembers(module) if isinstance(value, str)}


def written_fields() -> Iterator[semconv.Field]:
    yield from (field for field in vars(semconv).values() if isinstance(field, semconv.Field) and field.written)
    yield from (field for field in semconv.PARAMETERS.values() if field.written)
    yield from (field for field in semconv.USAGE.values() if field.written)


def test_every_name_that_is_written_stands_in_the_registry_of_the_conventions() -> None:
    known = registered(gen_ai_attributes, error_attributes, http_attributes, server_attributes)
    content = {semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES, semconv.SYSTEM_INSTRUCTIONS, semconv.TOOL_DEFINITIONS}
    names = {field.name for field in written_fields()} | content
    assert {name for name in names if not name.startswith("noria.")} <= known
    assert len(names) > 30


def test_every_name_stands_in_the_documentation() -> None:
    fields = [field for field in vars(semconv).values() if isinstance(field, semconv.Field)]
    names = {name for field in (*fields, *semconv.PARAMETERS.values(), *semconv.USAGE.values()) for name in field.names}
    page = DOCUMENTATION.read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert semconv.SCHEMA_URL in page


def test_the_version_is_one_that_the_library_knows() -> None:
    assert semconv.SCHEMA_URL in {schema.value for schema in Schemas}
    assert urlparse(semconv.SCHEMA_URL).path == "/schemas/1.41.1"


def test_a_call_is_written_whole() -> None:
    asked = {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "max_completion_tokens": 20,
        "stop": "END",
        "n": 2,
        "stream": True,
        "seed": 7,
        "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
    }
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    ]}  # fmt: skip
    answered = {
        "id": "c1",
        "model": "m-2",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    made = call(
        input=json.dumps(asked),
        output=json.dumps(answered),
        usage=usage,
        finish_reasons=("tool_calls",),
        policy_version="r00003",
        arm=Arm.ROLLOUT,
        agent_version="1.2",
        subject="f" * 32,
        attributes={
            "endpoint": "chat.completions",
            "stream": True,
            "http_status": 200,
            "first_byte_ms": 250.0,
            "server_address": "api.example.com",
            "server_port": 443,
            "rollout": {"round": "travel.router.r00003", "member": 2},
        },
    )
    said = attributes_of(made, semconv.Operation.CHAT, capture_content=True)
    parts = {name: json.loads(said.pop(name)) for name in list(said) if name in (
        semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES, semconv.TOOL_DEFINITIONS
    )}  # fmt: skip
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m-2",
        "gen_ai.response.id": "c1",
        "gen_ai.response.finish_reasons": ["tool_calls"],
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "http.response.status_code": 200,
        "server.address": "api.example.com",
        "server.port": 443,
        "noria.uid": made.uid,
        "noria.tenant": "acme",
        "noria.app": "travel",
        "noria.node": "router",
        "noria.policy_version": "r00003",
        "noria.arm": "rollout",
        "noria.status": "ok",
        "noria.consent": True,
        "noria.subject.hash": "f" * 32,
        "noria.agent_version": "1.2",
        "noria.rollout.round": "travel.router.r00003",
        "noria.rollout.member": 2,
    }
    assert parts == {
        semconv.INPUT_MESSAGES: [
            {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
            {"role": "user", "parts": [{"type": "text", "content": "hi"}]},
        ],
        semconv.OUTPUT_MESSAGES: [
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "a", "name": "find", "arguments": {"x": 1}}],
                "finish_reason": "tool_calls",
            }
        ],
        semconv.TOOL_DEFINITIONS: [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
    }


def test_a_message_of_anthropic_is_written_with_its_own_names_and_all_of_its_input_tokens() -> None:
    asked = {
        "model": "claude",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "found"}]},
        ],
        "tools": [{"name": "find", "input_schema": {"type": "object"}}],
    }
    answered = {
        "id": "msg_1",
        "model": "claude",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "done"}],
        "stop_reason": "end_turn",
    }
    made = call(
        input=json.dumps(asked),
        output=json.dumps(answered),
        finish_reasons=("end_turn",),
        usage={"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 3},
        attributes={"endpoint": "messages"},
    )
    said = attributes_of(made, semconv.Operation.CHAT, capture_content=True)
    assert said["gen_ai.provider.name"] == "anthropic"
    assert said["gen_ai.usage.input_tokens"] == 18
    assert said["gen_ai.usage.cache_read.input_tokens"] == 10
    assert said["gen_ai.usage.cache_creation.input_tokens"] == 3
    assert json.loads(said[semconv.SYSTEM_INSTRUCTIONS]) == [{"type": "text", "content": "Be brief."}]
    assert json.loads(said[semconv.INPUT_MESSAGES]) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "t", "name": "find", "arguments": {"x": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t", "response": "found"}]},
    ]
    assert json.loads(said[semconv.OUTPUT_MESSAGES]) == [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "done"}],
            "finish_reason": "end_turn",
        }
    ]
    assert json.loads(said[semconv.TOOL_DEFINITIONS]) == [
        {"type": "function", "name": "find", "parameters": {"type": "object"}}
    ]


def test_a_response_of_openai_is_written() -> None:
    asked = {
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "f", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "f", "output": "found"},
        ],
    }
    answered = {
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
            {"type": "function_call", "call_id": "g", "name": "find", "arguments": '{"x":1}'},
        ],
    }
    usage = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
    made = call(input=json.dumps(asked), output=json.dumps(answered), usage=usage, attributes={"endpoint": "responses"})
    said = attributes_of(made, semconv.Operation.CHAT, capture_content=True)
    assert said["gen_ai.request.max_tokens"] == 9
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.cache_read.input_tokens"]) == (5, 1)
    assert [message["role"] for message in json.loads(said[semconv.INPUT_MESSAGES])] == ["user", "assistant", "tool"]
    [answer] = json.loads(said[semconv.OUTPUT_MESSAGES])
    assert answer["parts"] == [
        {"type": "reasoning", "content": "hm"},
        {"type": "text", "content": "done"},
        {"type": "tool_call", "id": "g", "name": "find", "arguments": {"x": 1}},
    ]


def test_one_choice_and_no_stream_are_not_worth_a_word() -> None:
    made = call(input=json.dumps({"model": "m", "messages": [], "n": 1, "stream": False}))
    said = attributes_of(made, semconv.Operation.CHAT, capture_content=False)
    assert not {"gen_ai.request.choice.count", "gen_ai.request.stream"} & said.keys()


def test_content_is_written_only_where_it_is_captured() -> None:
    said = attributes_of(call(), semconv.Operation.CHAT, capture_content=False)
    assert not [name for name in said if "messages" in name or "instructions" in name or "definitions" in name]
    assert "hi" not in str(said)


# Out and in again

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda text: not text.startswith("[{"))
ids = st.text("abc123_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tool_calls = st.builds(
    lambda call_id, name, arguments: {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))},
    },
    ids,
    ids,
    st.dictionaries(ids, values, max_size=3),
)
images = st.builds(
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    st.sampled_from(["https://example.com/a.png", "data:image/png;base64,iVBORw0KGgo="]),
)
audio = st.just({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}})
text_parts = st.builds(lambda text: {"type": "text", "text": text}, texts)
contents = texts | st.lists(text_parts | images | audio, min_size=2, max_size=3)
asked_messages = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "user"]), contents),
    st.builds(
        lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}, st.lists(tool_calls, min_size=1)
    ),
    st.builds(lambda i, text: {"role": "tool", "tool_call_id": i, "content": text}, ids, texts),
)
answers = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, texts),
    st.builds(
        lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}, st.lists(tool_calls, min_size=1)
    ),
    st.builds(lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why}, texts, texts),
)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "max_tokens": st.integers(1, 10_000),
        "seed": st.integers(0, 2**31),
        "stop": st.lists(texts, min_size=1, max_size=2),
        "frequency_penalty": st.floats(-2, 2),
    },
)


@given(
    st.lists(asked_messages, min_size=1, max_size=4),
    st.lists(answers, min_size=1, max_size=2),
    parameters,
    st.sampled_from([Arm.LIVE, Arm.CANARY, Arm.ROLLOUT]),
    st.integers(0, 10_000_000_000),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_chat_goes_out_and_comes_in_as_the_same_call(
    messages: list[Any], said: list[Any], params: dict[str, Any], arm: Arm, duration_ns: int, consent: bool
) -> None:
    choices = [{"index": place, "message": message, "finish_reason": "stop"} for place, message in enumerate(said)]
    tools = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    made = call(
        input=json.dumps({"model": "m", "messages": messages, **params, "tools": tools}),
        output=json.dumps({"id": "c1", "model": "m-2", "choices": choices, "usage": usage}),
        usage=usage,
        finish_reasons=("stop",) * len(said),
        arm=arm,
        policy_version="r00001",
        agent_version="1.2",
        subject="f" * 32,
        consent=consent,
        duration_ms=duration_ns / 1e6,
    )
    back = sent_and_read(made)
    assert json.loads(back.input) == json.loads(made.input)
    answer = json.loads(back.output)
    assert (answer["id"], answer["model"], answer["choices"]) == ("c1", "m-2", choices)
    same = ("uid", "tenant", "app", "process_node", "trace_id", "model_name", "policy_version", "arm", "status",
            "request_time", "finish_reasons", "usage", "agent_version", "subject", "consent", "error_type")  # fmt: skip
    assert {name: getattr(back, name) for name in same} == {name: getattr(made, name) for name in same}
    assert back.duration_ms == pytest.approx(made.duration_ms, abs=1e-6)
    assert back.attributes["content"] is True


def test_a_failed_call_comes_in_as_one() -> None:
    back = sent_and_read(call(status=CallStatus.CLIENT_DISCONNECT, error_type="client_left", output="null"))
    assert (back.status, back.error_type) == (CallStatus.CLIENT_DISCONNECT, "client_left")
    assert (back.output, back.attributes["content"], back.consent) == ("null", False, False)


def test_a_whole_task_comes_in_as_one() -> None:
    back = sent_and_read(call(process_node=END2END, model_name="", input="book a hotel", output="done", attributes={}))
    assert (back.process_node, back.input, back.output) == (END2END, "book a hotel", "done")


def text_message(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.operation.name": "invoke_agent",
            semconv.INPUT_MESSAGES: text_message("user", "go"),
            semconv.OUTPUT_MESSAGES: text_message("assistant", "gone"),
        },
        {"gen_ai.operation.name": "invoke_workflow", "input.value": "go", "output.value": "gone"},
        {"openinference.span.kind": "AGENT", "input.value": "go", "output.value": "gone"},
        {"openinference.span.kind": "CHAIN", "input.value": "go", "output.value": "gone"},
        {"traceloop.span.kind": "workflow", "traceloop.entity.input": "go", "traceloop.entity.output": "gone"},
    ],
)
def test_the_root_span_of_an_agent_is_the_whole_task_and_those_below_are_nothing(attributes: dict[str, Any]) -> None:
    found = read(attributes)
    assert (found.process_node, found.input, found.output, found.consent) == (END2END, "go", "gone", True)
    below = span(attributes, parent_span_id="00f067aa0ba902b7")
    assert call_of(below, Sender("acme", "default")) == (None, None)
    named = read({**attributes, "noria.node": END2END}, parent_span_id="00f067aa0ba902b7")
    assert named.process_node == END2END


def test_a_task_whose_request_was_not_captured_is_none() -> None:
    assert call_of(span({"gen_ai.operation.name": "invoke_agent"}), Sender("acme", "default")) == (None, None)


def test_a_task_of_any_text_can_be_stored() -> None:
    found = read({"openinference.span.kind": "AGENT", "input.value": "a\0b", "output.value": "c"})
    assert found.input == "a\ufffdb"


# Whatever is said

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
json_texts = st.builds(
    json.dumps,
    st.recursive(
        st.none() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["role", "parts", "content", "type", "text", "tool_calls", "function", "name", "message",
                             "arguments", "id", "messages", "choices", "toolUse", "finish_reason", "image_url"]),
            inner, max_size=4,
        ),
        max_leaves=12,
    ),
)  # fmt: skip
names = st.sampled_from(
    [semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES, semconv.SYSTEM_INSTRUCTIONS, semconv.TOOL_DEFINITIONS,
     "gen_ai.prompt", "gen_ai.completion", "gen_ai.prompt.0.content", "gen_ai.prompt.0", "gen_ai.prompt.1.tool_calls",
     "gen_ai.completion.0.tool_calls.0", "gen_ai.completion.0.tool_calls.0.arguments", "gen_ai.prompt.x.y.z",
     "llm.input_messages.0.message.content", "llm.input_messages.0.message", "llm.input_messages.0.message.contents",
     "llm.output_messages.0.message.tool_calls.0.tool_call", "input.value", "output.value", "input.mime_type",
     "llm.tools.0.tool.json_schema", "llm.invocation_parameters", "content", "message", "tool_calls",
     "gen_ai.event.content", "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens", "noria.arm", "noria.uid",
     "noria.node", "noria.consent", "user.id", "gen_ai.agent.name", "exception.type", "service.name"]
)  # fmt: skip
attribute_maps = st.dictionaries(names, json_texts | anything | st.just("application/json"), max_size=6)
event_names = st.sampled_from(
    ["gen_ai.user.message", "gen_ai.assistant.message", "gen_ai.tool.message", "gen_ai.choice", "exception", "x"]
)


@given(attribute_maps, st.lists(st.tuples(event_names, attribute_maps), max_size=3), attribute_maps)
@settings(max_examples=200, deadline=None)
def test_whatever_a_span_says_it_becomes_a_call_that_every_store_takes(
    attributes: dict[str, Any], events: list[Any], resource: dict[str, Any]
) -> None:
    made = span({**attributes, **NAMED}, *events, source=Source(resource), span_id="b7ad6b7169203331")
    content_of(made.attributes, made.events)
    found, _ = call_of(made, Sender("acme", "default"))
    assert found is not None
    json.loads(found.input)
    json.loads(found.output)
    for text in (found.input, found.output, found.app, found.process_node, found.model_name, *found.finish_reasons):
        text.encode()
        assert "\0" not in text


@given(json_texts, json_texts, st.sampled_from(["chat.completions", "completions", "responses", "messages", "other"]))
@settings(max_examples=200, deadline=None)
def test_whatever_a_record_holds_it_becomes_a_span(asked: str, answered: str, endpoint: str) -> None:
    made = call(input=asked, output=answered, attributes={"endpoint": endpoint})
    written = span_of(made, RESOURCE, capture_content=True)
    assert written.attributes is not None
    assert written.attributes["noria.uid"] == made.uid
    assert all(isinstance(value, (str, bool, int, float, tuple)) for value in written.attributes.values())
