"""Spans as others write them: every dialect, what is missing in them, and recordings of real instrumentations."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from noria.contracts.call import END2END, Call, CallStatus
from noria.contracts.errors import InvalidRecord
from noria.services.proxy import semconv
from noria.services.proxy.otlp_calls import call_of, received
from noria.services.proxy.otlp_request import Source
from noria.services.proxy.otlp_sender import Sender
from tests.noria.services.proxy.semconv_cases import NAMED, RECORDINGS, answers_of, messages_of, read, span

# What others write

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"x":1}'}}
FIND = {"type": "tool_call", "id": "a", "name": "find", "arguments": {"x": 1}}

DIALECTS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "gen_ai: JSON text on the span (1.37 and later)": (
        {
            semconv.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]',
            semconv.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text","content":"ho"}]}]',
            "gen_ai.response.finish_reasons": ["stop"],
        },
        [],
    ),
    "gen_ai: structured attributes": (
        {
            semconv.INPUT_MESSAGES: [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}],
            semconv.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [{"type": "text", "content": "ho"}]}],
        },
        [],
    ),
    "gen_ai: on one event": (
        {},
        [
            (
                "gen_ai.client.inference.operation.details",
                {
                    semconv.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]',
                    semconv.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text","content":"ho"}]}]',
                },
            )
        ],
    ),
    "gen_ai.events: fields as attributes of the events (1.28 to 1.36)": (
        {},
        [
            ("gen_ai.user.message", {"content": "hi"}),
            ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": '{"content":"ho"}'}),
        ],
    ),
    "gen_ai.events: fields as one attribute (Azure)": (
        {},
        [
            ("gen_ai.user.message", {"gen_ai.event.content": '{"role":"user","content":"hi"}'}),
            ("gen_ai.choice", {"gen_ai.event.content": '{"finish_reason":"stop","message":{"content":"ho"}}'}),
        ],
    ),
    "gen_ai.events: blocks of Bedrock (Strands)": (
        {},
        [
            ("gen_ai.user.message", {"content": '[{"text":"hi"}]'}),
            ("gen_ai.choice", {"finish_reason": "end_turn", "message": '[{"text":"ho"}]'}),
        ],
    ),
    "gen_ai.content: two events (1.27)": (
        {},
        [
            ("gen_ai.content.prompt", {"gen_ai.prompt": '[{"role":"user","content":"hi"}]'}),
            ("gen_ai.content.completion", {"gen_ai.completion": '[{"role":"assistant","content":"ho"}]'}),
        ],
    ),
    "gen_ai.content: plain text on the span": ({"gen_ai.prompt": "hi", "gen_ai.completion": "ho"}, []),
    "openllmetry: numbered attributes": (
        {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "hi",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "ho",
            "gen_ai.completion.0.finish_reason": "stop",
        },
        [],
    ),
    "openinference: numbered attributes": (
        {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "hi",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.contents.0.message_content.type": "text",
            "llm.output_messages.0.message.contents.0.message_content.text": "ho",
        },
        [],
    ),
    "openinference: the call itself": (
        {
            "input.value": '{"model":"m","messages":[{"role":"user","content":"hi"}]}',
            "input.mime_type": "application/json",
            "output.value": '{"id":"c1","choices":[{"index":0,"message":{"role":"assistant","content":"ho"}}]}',
            "output.mime_type": "application/json",
        },
        [],
    ),
    "openinference: prompts of text completions": (
        {"llm.prompts.0.prompt.text": "hi", "llm.choices.0.completion.text": "ho"},
        [],
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_content_of_every_dialect_is_read(dialect: str) -> None:
    attributes, events = DIALECTS[dialect]
    found = read({**NAMED, **attributes}, *events)
    assert (messages_of(found), answers_of(found)) == ([USER], [ANSWER])
    assert (found.attributes["content"], found.consent) == (True, True)
    assert found.attributes["dialect"] == dialect.partition(":")[0]


def test_numbered_messages_come_in_the_order_of_their_numbers() -> None:
    rows = {f"gen_ai.prompt.{place}.content": str(place) for place in range(12)}
    found = read({**NAMED, **dict(sorted(rows.items())), "gen_ai.completion.0.content": "ho"})
    assert [message["content"] for message in messages_of(found)] == [str(place) for place in range(12)]


TOOL_DIALECTS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "gen_ai": (
        {
            semconv.INPUT_MESSAGES: json.dumps([
                {"role": "user", "parts": [{"type": "text", "content": "hi"}]},
                {"role": "assistant", "parts": [FIND]},
                {"role": "user", "parts": [{"type": "tool_call_response", "id": "a", "response": "found"}]},
            ]),
            semconv.OUTPUT_MESSAGES: json.dumps([
                {"role": "assistant", "parts": [FIND]}
            ]),
        },
        [],
    ),
    "gen_ai.events": (
        {},
        [
            ("gen_ai.user.message", {"content": "hi"}),
            ("gen_ai.assistant.message", {"tool_calls": json.dumps([CALL])}),
            ("gen_ai.tool.message", {"id": "a", "content": "found"}),
            ("gen_ai.choice", {"index": 0, "tool_calls": json.dumps([CALL]), "message": '{"role":"assistant"}'}),
        ],
    ),
    "gen_ai.events, Bedrock": (
        {},
        [
            ("gen_ai.user.message", {"content": '[{"text":"hi"}]'}),
            ("gen_ai.assistant.message", {"content": '[{"toolUse":{"toolUseId":"a","name":"find","input":{"x":1}}}]'}),
            ("gen_ai.tool.message", {"content": '[{"toolResult":{"toolUseId":"a","content":[{"text":"found"}]}}]'}),
            ("gen_ai.choice", {"message": '[{"toolUse":{"toolUseId":"a","name":"find","input":{"x":1}}}]'}),
        ],
    ),
    "openllmetry": (
        {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "hi",
            "gen_ai.prompt.1.role": "assistant",
            "gen_ai.prompt.1.tool_calls.0.id": "a",
            "gen_ai.prompt.1.tool_calls.0.name": "find",
            "gen_ai.prompt.1.tool_calls.0.arguments": '{"x":1}',
            "gen_ai.prompt.2.role": "tool",
            "gen_ai.prompt.2.tool_call_id": "a",
            "gen_ai.prompt.2.content": "found",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.tool_calls.0.id": "a",
            "gen_ai.completion.0.tool_calls.0.name": "find",
            "gen_ai.completion.0.tool_calls.0.arguments": '{"x":1}',
        },
        [],
    ),
    "openllmetry, Anthropic": (
        {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "hi",
            "gen_ai.prompt.1.role": "assistant",
            "gen_ai.prompt.1.content": '[{"type":"tool_use","id":"a","name":"find","input":{"x":1}}]',
            "gen_ai.prompt.2.role": "user",
            "gen_ai.prompt.2.content": '[{"type":"tool_result","tool_use_id":"a","content":"found"}]',
            "gen_ai.completion.0.tool_calls.0.id": "a",
            "gen_ai.completion.0.tool_calls.0.name": "find",
            "gen_ai.completion.0.tool_calls.0.arguments": '{"x":1}',
        },
        [],
    ),
    "openinference": (
        {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "hi",
            "llm.input_messages.1.message.role": "assistant",
            "llm.input_messages.1.message.tool_calls.0.tool_call.id": "a",
            "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "find",
            "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": '{"x":1}',
            "llm.input_messages.2.message.role": "tool",
            "llm.input_messages.2.message.tool_call_id": "a",
            "llm.input_messages.2.message.content": "found",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.tool_calls.0.tool_call.id": "a",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "find",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"x":1}',
        },
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_tool_calls_and_their_results_are_read_in_every_dialect(dialect: str) -> None:
    attributes, events = TOOL_DIALECTS[dialect]
    found = read({**NAMED, **attributes}, *events)
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert messages_of(found) == [USER, asked, {"role": "tool", "content": "found", "tool_call_id": "a"}]
    assert answers_of(found) == [asked]
    assert found.attributes["tool_definitions"] is False  # the prompt was longer than what is known of it


OLDER: list[tuple[str, Any, Callable[[Call], Any], Any]] = [
    ("gen_ai.system", "openai", lambda found: found.attributes["provider"], "openai"),
    ("llm.provider", "openai", lambda found: found.attributes["provider"], "openai"),
    ("gen_ai.usage.prompt_tokens", 7, lambda found: found.usage["prompt_tokens"], 7),
    ("gen_ai.usage.completion_tokens", "7", lambda found: found.usage["completion_tokens"], 7),
    ("llm.token_count.prompt", 7, lambda found: found.usage["prompt_tokens"], 7),
    ("llm.token_count.completion", 7, lambda found: found.usage["completion_tokens"], 7),
    ("gen_ai.response.finish_reason", "stop", lambda found: found.finish_reasons, ("stop",)),
    ("llm.finish_reason", "stop", lambda found: found.finish_reasons, ("stop",)),
    ("gen_ai.response.finish_reasons", ["tool_call"], lambda found: found.finish_reasons, ("tool_calls",)),
    ("gen_ai.is_streaming", True, lambda found: found.attributes["stream"], True),
    ("llm.is_streaming", "true", lambda found: found.attributes["stream"], True),
    ("gen_ai.agent.name", "Travel Agent", lambda found: found.process_node, "Travel_Agent"),
    ("agent.name", "researcher", lambda found: found.process_node, "researcher"),
    ("noria.node", "router", lambda found: found.process_node, "router"),
    ("gen_ai.agent.version", "2", lambda found: found.agent_version, "2"),
]


@pytest.mark.parametrize(("name", "value", "where", "expected"), OLDER, ids=[row[0] for row in OLDER])
def test_names_of_older_versions_are_read(name: str, value: Any, where: Callable[[Call], Any], expected: Any) -> None:
    assert where(read({**NAMED, name: value})) == expected


@pytest.mark.parametrize(
    ("attributes", "model"),
    [
        ({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}, "m"),
        ({"gen_ai.operation.name": "generate_content", "gen_ai.response.model": "m-2"}, "m-2"),
        ({"gen_ai.operation.name": "text_completion", "gen_ai.request.model": "m"}, "m"),
        ({"llm.request.type": "chat", "gen_ai.request.model": "m"}, "m"),
        ({"openinference.span.kind": "LLM", "llm.model_name": "m-2"}, "m-2"),
        ({"openinference.span.kind": "EMBEDDING", "embedding.model_name": "e"}, "e"),
        ({"gen_ai.system": "openai", "gen_ai.request.model": "m"}, "m"),
    ],
)
def test_a_span_is_seen_to_be_a_model_call(attributes: dict[str, Any], model: str) -> None:
    assert read(attributes).model_name == model


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"http.request.method": "POST"},
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "find"},
        {"gen_ai.operation.name": "create_agent", "gen_ai.request.model": "m"},
        {"gen_ai.operation.name": "retrieval"},
        {"openinference.span.kind": "TOOL"},
        {"traceloop.span.kind": "task"},
        {"llm.request.type": "rerank", "gen_ai.request.model": "m"},
    ],
)
def test_a_span_that_is_no_model_call_gives_none(attributes: dict[str, Any]) -> None:
    assert call_of(span(attributes), Sender("acme", "default")) == (None, None)


def test_an_end_before_the_start_is_no_negative_duration() -> None:
    found = read(NAMED, start_ns=1_777_000_000_000_000_000, end_ns=1_776_999_999_000_000_000)
    assert (found.duration_ms, found.response_time) == (0.0, found.request_time)


def test_a_model_call_is_no_whole_task() -> None:
    with pytest.raises(InvalidRecord, match=END2END):
        call_of(span(NAMED), Sender("acme", "default", node=END2END))


def test_of_a_resource_only_our_own_names_say_whose_a_span_is() -> None:
    assert read(NAMED, source=Source({"agent.name": "a", "gen_ai.agent.name": "b"})).process_node == "default"
    assert read(NAMED, source=Source({"noria.node": "router"})).process_node == "router"


@pytest.mark.parametrize("tenant", ["a b", "ü", "x" * 129])
def test_a_tenant_that_cannot_be_one_is_refused(tenant: str) -> None:
    with pytest.raises(InvalidRecord, match="tenant"):
        call_of(span({**NAMED, "noria.tenant": tenant}), Sender("acme", "default", any_tenant=True))


# What is not all there

PARTIAL: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]], bool]] = {
    "nothing captured": ({}, [], False),
    "the request alone": (
        {semconv.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]'},
        [],
        False,
    ),
    "a message whose image was left out": (
        {
            semconv.INPUT_MESSAGES: '[{"role":"user","parts":[]}]',
            semconv.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text","content":"ho"}]}]',
        },
        [],
        False,
    ),
    "JSON that a limit cut off": (
        {semconv.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"te', semconv.OUTPUT_MESSAGES: "[]"},
        [],
        True,
    ),
    "events without content": (
        {},
        [
            ("gen_ai.user.message", {"gen_ai.system": "openai"}),
            ("gen_ai.choice", {"index": 0, "finish_reason": "stop"}),
        ],
        False,
    ),
    "tool calls without arguments": (
        {},
        [
            ("gen_ai.user.message", {"content": "hi"}),
            ("gen_ai.choice", {"message": '{"content":"ho"}', "tool_calls": '[{"id":"a","function":{"name":"find"}}]'}),
        ],
        True,
    ),
    "hidden text": (
        {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "__REDACTED__",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": "ho",
        },
        [],
        True,
    ),
}


@pytest.mark.parametrize("what", PARTIAL)
def test_what_was_not_captured_whole_is_never_trained_on(what: str) -> None:
    attributes, events, warned = PARTIAL[what]
    found, warning = call_of(span({**NAMED, **attributes}, *events), Sender("acme", "default"))
    assert found is not None
    assert (found.attributes["content"], found.consent) == (False, False)
    assert (warning is not None) is warned


def test_dropped_attributes_make_content_doubtful() -> None:
    attributes, _ = DIALECTS["openllmetry: numbered attributes"]
    found, warning = call_of(span({**NAMED, **attributes}, cut=True), Sender("acme", "default"))
    assert found is not None
    assert (found.consent, "too many" in str(warning)) == (False, True)


# Recordings of real instrumentations: nine calls each, of one program


@pytest.fixture(params=sorted(path.name for path in RECORDINGS.iterdir()))
def recorded(request: pytest.FixtureRequest) -> list[Call]:
    body = (RECORDINGS / request.param).read_bytes()
    found = received(body, "application/json", "", Sender("acme", "default"), 1 << 20)
    assert (found.rejected, found.warnings) == ((), ())
    return list(found.calls)


def test_recorded_spans_are_read_as_the_calls_that_were_made(recorded: list[Call]) -> None:
    hello, tools, results, stream, twice = recorded[:5]
    assert messages_of(hello) == [
        {"role": "system", "content": "You help travellers."},
        {"role": "user", "content": "Say hello ☃"},
    ]
    assert answers_of(hello) == [{"role": "assistant", "content": "Hello ☃"}]
    body = json.loads(hello.input)
    assert (body["model"], body["temperature"], body["max_tokens"], body["top_p"]) == ("gpt-4o-mini", 0.5, 50, 0.9)
    assert (hello.usage or {})["prompt_tokens"] == 12
    assert (hello.model_name, hello.app, hello.finish_reasons) == ("gpt-4o-mini", "travel-agent", ("stop",))
    [message] = answers_of(tools)
    said = [
        (one["id"], one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]
    ]
    assert said == [("call_a", "find_hotel", {"city": "Paris"}), ("call_b", "find_hotel", {"city": "Köln"})]
    assert tools.finish_reasons == ("tool_calls",)
    assert [(one["tool_call_id"], one["content"]) for one in messages_of(results)[3:]] == [
        ("call_a", '{"name": "Ritz"}'),
        ("call_b", "Dom Hotel"),
    ]
    assert answers_of(stream) == [{"role": "assistant", "content": "Hello"}]
    assert [one["content"] for one in answers_of(twice)] == ["answer 0", "answer 1"]
    assert all(one.consent and one.attributes["content"] for one in recorded[:5])


def test_recorded_errors_and_embeddings_are_no_calls_to_train_on(recorded: list[Call]) -> None:
    [failed] = [one for one in recorded if one.status is not CallStatus.OK]
    assert (failed.model_name, failed.output, failed.consent) == ("missing", "null", False)
    [embedded] = [one for one in recorded if one.attributes["endpoint"] == "embeddings"]
    assert (embedded.model_name, embedded.consent, (embedded.usage or {})["prompt_tokens"]) == (
        "text-embedding-3-small", False, 3
    )  # fmt: skip


def test_an_image_is_either_read_or_the_call_is_not_trained_on(recorded: list[Call]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    looked = recorded[5]
    if looked.consent:
        assert messages_of(looked)[0]["content"][1] == image
    else:
        assert image not in (json.loads(looked.input) or {}).get("messages", [{}])[0].values()
