"""Spans in: real exporters and real instrumentation against the handler, and everything that is no request of OTLP."""

import asyncio
import gzip
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from noria.config import Config
from noria.contracts.access import Scope
from noria.contracts.call import END2END, Call, CallStatus
from noria.services.proxy.access import Access
from noria.services.proxy.identity import sampled
from noria.services.proxy.limits import Limits
from noria.services.proxy.otlp import OtlpIntake
from noria.services.proxy.otlp_calls import uid_of
from noria.services.proxy.otlp_request import spans_of
from noria.stores.api_keys import ApiKeys
from noria.stores.online import OnlineStore
from tests.noria.services.proxy.otlp_cases import CHAT, JSON, PROTOBUF, as_json, body_of, made_spans, spans_in


class Kept:
    """Takes records as the spool does, up to a number of them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.room = 1 << 30

    def append(self, record: Call) -> bool:
        if len(self.calls) >= self.room:
            return False
        self.calls.append(record)
        return True

    async def write(self, record: Call) -> bool:
        return self.append(record)


@dataclass
class Receiver:
    """A running handler, what it kept, and a client session."""

    url: str
    intake: OtlpIntake
    kept: Kept
    session: aiohttp.ClientSession
    keys: ApiKeys
    access: Access

    async def post(
        self, body: bytes, content_type: str = PROTOBUF, path: str = "/v1/traces", **headers: str
    ) -> tuple[int, Any, bytes]:
        named = {"Content-Type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.session.post(f"{self.url}{path}", data=body, headers=named) as answer:
            return answer.status, answer.headers, await answer.read()

    async def key(self, *scopes: Scope, tenant: str = "acme") -> str:
        text, _key = self.keys.create(tenant, frozenset(scopes), "test")
        await self.access.refresh()
        return text


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Receiver]]]:
    stack: list[Callable[[], Any]] = []

    async def begin(**proxy: Any) -> Receiver:
        upstreams = {"policy": {"url": "http://127.0.0.1:1"}}
        config = Config.model_validate({"proxy": {"upstreams": upstreams, **proxy}, "root": tmp_path})
        store = OnlineStore(config.store_url)
        store.upgrade()
        access = Access(config, store)
        await access.refresh()
        kept = Kept()
        intake = OtlpIntake(config.proxy, access, Limits(config.proxy), kept)
        app = web.Application()
        for prefix in ("", "/apps/{app}", "/apps/{app}/nodes/{node}"):
            app.router.add_post(f"{prefix}/v1/traces", intake.traces)
        runner = web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = aiohttp.ClientSession()
        stack.extend((store.close, runner.cleanup, session.close))
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return Receiver(url, intake, kept, session, ApiKeys(store), access)

    yield begin
    for end in reversed(stack):
        found = end()
        if asyncio.iscoroutine(found):
            await found


@pytest.fixture
async def receiver(start: Any) -> Receiver:
    return await start()  # type: ignore[no-any-return]


# Real exporters


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_spans_of_an_sdk_become_calls(receiver: Receiver, compression: Compression) -> None:
    spans = made_spans(CHAT, {**CHAT, "gen_ai.agent.name": "Hotel Finder"})
    exporter = OTLPSpanExporter(f"{receiver.url}/v1/traces", compression=compression, timeout=5)
    assert await asyncio.to_thread(exporter.export, spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    first, second = receiver.kept.calls
    assert spans[0].context is not None
    assert first.trace_id == f"{spans[0].context.trace_id:032x}"
    assert first.attributes["span_id"] == f"{spans[0].context.span_id:016x}"
    assert first.attributes["parent_span_id"] == f"{spans[-1].context.span_id:016x}"  # type: ignore[union-attr]
    assert (first.tenant, first.app, first.process_node) == ("default", "travel-agent", "default")
    assert second.process_node == "Hotel_Finder"
    assert json.loads(first.input)["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(first.output)["choices"][0]["message"] == {"role": "assistant", "content": "ho"}
    assert (first.status, first.model_name, first.finish_reasons) == (CallStatus.OK, "m", ("stop",))
    assert (spans[0].start_time or 0) // 1000 == int(first.request_time.timestamp() * 1_000_000)
    assert first.attributes["source"] == "otlp"
    assert receiver.intake.received == 2


async def test_json_says_the_same_as_protobuf(receiver: Receiver) -> None:
    body = body_of(CHAT, {**CHAT, "gen_ai.usage.input_tokens": 7, "gen_ai.request.temperature": 0.5})
    assert (await receiver.post(body))[0] == 200
    status, headers, answer = await receiver.post(as_json(body), JSON)
    assert (status, headers["Content-Type"].partition(";")[0], json.loads(answer)) == (200, JSON, {})
    assert receiver.kept.calls[:2] == receiver.kept.calls[2:]


async def test_a_request_sent_again_changes_nothing(receiver: Receiver) -> None:
    body = body_of(CHAT)
    for _ in range(2):
        await receiver.post(gzip.compress(body), Content_Encoding="gzip")
    one, two = receiver.kept.calls
    assert one == two
    assert one.uid == uid_of("default", one.trace_id, one.attributes["span_id"])
    assert uuid.UUID(one.uid).version == 5
    assert one.uid != uid_of("other", one.trace_id, one.attributes["span_id"])


async def test_a_failed_call_of_an_sdk_is_one(receiver: Receiver) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("test")
    with pytest.raises(TimeoutError), tracer.start_as_current_span("chat", attributes=CHAT):
        raise TimeoutError
    body = encode_spans(memory.get_finished_spans()).SerializeToString()
    for sent, kind in ((body, PROTOBUF), (as_json(body), JSON)):
        await receiver.post(sent, kind)
    assert [(call.status, call.error_type) for call in receiver.kept.calls] == [
        (CallStatus.UPSTREAM_ERROR, "TimeoutError")
    ] * 2


async def test_content_that_the_sdk_had_no_room_for_is_not_trusted(receiver: Receiver) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(span_limits=SpanLimits(max_span_attributes=len(CHAT)))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    provider.get_tracer("test").start_span("chat", attributes={"first": 1, **CHAT}).end()
    body = encode_spans(memory.get_finished_spans()).SerializeToString()
    for sent, kind in ((body, PROTOBUF), (as_json(body), JSON)):
        status, _, _ = await receiver.post(sent, kind)
        assert status == 200
    assert [call.consent for call in receiver.kept.calls] == [False, False]


AGENT = """
import sys
import openai
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
OpenAIInstrumentor().instrument()
client = openai.OpenAI(base_url=sys.argv[1], api_key="x", max_retries=0)
with trace.get_tracer("agent").start_as_current_span("task"):
    messages = [{"role": "user", "content": "find a hotel"}]
    client.chat.completions.create(model="m", messages=messages, temperature=0.5)
    for _ in client.chat.completions.create(model="m", messages=messages, stream=True):
        pass
provider.shutdown()
"""


async def test_an_instrumented_agent_is_a_source_without_the_proxy(receiver: Receiver, start_upstream: Any) -> None:
    """The agent's program and environment are what docs/telemetry.md tells a user to have."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"city": "Köln"}'}}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [call]}}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            answer = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m-2", "usage": usage}
            return web.json_response({**answer, "choices": [{**choice, "finish_reason": "tool_calls"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"id": "c2", "object": "chat.completion.chunk", "created": 1, "model": "m-2"}
        for delta, reason in (({"role": "assistant", "content": "do"}, None), ({"content": "ne"}, None), ({}, "stop")):
            choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
            await response.write(f"data: {json.dumps({**chunk, 'choices': choices})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    upstream = await start_upstream(reply)
    key = await receiver.key(Scope.CALL)
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{key}",
        "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=travel,noria.node=planner",
    }
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, f"{upstream.url}/v1",
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await agent.communicate()
    assert agent.returncode == 0, printed.decode()
    whole, streamed = receiver.kept.calls
    assert (whole.tenant, whole.app, whole.process_node, whole.trace_id) == (
        "acme", "travel", "planner", streamed.trace_id
    )  # fmt: skip
    body = json.loads(whole.input)
    assert (body["messages"], body["temperature"]) == ([{"role": "user", "content": "find a hotel"}], 0.5)
    [call] = json.loads(whole.output)["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "a", "find", {"city": "Köln"}
    )  # fmt: skip
    assert (whole.usage or {})["total_tokens"] == 5
    assert json.loads(streamed.output)["choices"][0]["message"]["content"] == "done"
    assert whole.consent
    assert streamed.consent


# Whose they are


async def test_names_come_from_span_resource_request_service_in_this_order(receiver: Receiver) -> None:
    unnamed = body_of(CHAT, resource={"service.name": "unknown_service:python"})
    service = body_of(CHAT, resource={"service.name": "Travel Agent"})
    resource = body_of(CHAT, resource={"service.name": "x", "noria.app": "b", "noria.node": "c"})
    span = body_of({**CHAT, "noria.app": "d", "noria.node": "e"}, resource={"noria.app": "b", "noria.node": "c"})
    for body in (unnamed, service):
        await receiver.post(body)
    for body in (service, resource, span):
        await receiver.post(body, path="/apps/url/nodes/n/v1/traces")
    await receiver.post(service, x_noria_app="header")
    assert [(call.app, call.process_node) for call in receiver.kept.calls] == [
        ("default", "default"),
        ("Travel_Agent", "default"),
        ("url", "n"),
        ("b", "c"),
        ("d", "e"),
        ("header", "default"),
    ]


async def test_subject_and_consent_are_taken_from_the_span(receiver: Receiver) -> None:
    await receiver.post(body_of({**CHAT, "user.id": "jane@example.com", "noria.consent": False}))
    [call] = receiver.kept.calls
    assert call.consent is False
    assert call.subject is not None
    assert len(call.subject) == 32
    assert "jane" not in repr(call)


async def test_only_sampled_traces_are_kept_and_all_are_taken(start: Any) -> None:
    receiver = await start(sampling_rate=0.5)
    bodies = [body_of(CHAT) for _ in range(20)]
    for body in bodies:
        assert (await receiver.post(body))[0] == 200
    traces = [next(iter(spans_of(body, PROTOBUF))).trace_id for body in bodies]
    assert [call.trace_id for call in receiver.kept.calls] == [trace for trace in traces if sampled(trace, 0.5)]


# Keys, scopes, tenants


async def test_without_a_key_where_one_is_required_nothing_is_taken(receiver: Receiver) -> None:
    await receiver.key(Scope.CALL)
    status, headers, answer = await receiver.post(body_of(CHAT))
    assert (status, headers["Content-Type"]) == (401, PROTOBUF)
    assert "API key" in Status.FromString(answer).message
    status, headers, answer = await receiver.post(as_json(body_of(CHAT)), JSON, x_api_key="nk_" + "x" * 43)
    assert status == 401
    assert "unknown or revoked" in json.loads(answer)["message"]
    assert receiver.kept.calls == []


async def test_a_key_without_the_scope_is_refused(receiver: Receiver) -> None:
    key = await receiver.key(Scope.FEEDBACK)
    status, _, answer = await receiver.post(body_of(CHAT), Authorization=f"Bearer {key}")
    assert (status, receiver.kept.calls) == (403, [])
    assert "scope" in Status.FromString(answer).message


async def test_a_key_speaks_for_its_own_tenant_alone(receiver: Receiver) -> None:
    key = await receiver.key(Scope.CALL)
    bearer = f"Bearer {key}"
    status, _, _ = await receiver.post(body_of(CHAT), Authorization=bearer, x_noria_tenant="other")
    assert (status, receiver.kept.calls) == (403, [])
    body = body_of(CHAT, {**CHAT, "noria.tenant": "other"}, {**CHAT, "noria.tenant": "acme"})
    status, _, answer = await receiver.post(body, Authorization=bearer)
    assert status == 200
    report = ExportTraceServiceResponse.FromString(answer).partial_success
    assert report.rejected_spans == 1
    assert "'other'" in report.error_message
    assert [call.tenant for call in receiver.kept.calls] == ["acme", "acme"]


async def test_who_speaks_for_any_tenant_names_it_in_header_or_span(receiver: Receiver) -> None:
    await receiver.post(body_of(CHAT, {**CHAT, "noria.tenant": "b"}), x_noria_tenant="a")
    assert [call.tenant for call in receiver.kept.calls] == ["a", "b"]


# What is taken, left, and refused


async def test_other_spans_are_left_and_what_cannot_be_kept_is_reported(receiver: Receiver) -> None:
    tree = json.loads(as_json(body_of(CHAT, {"db.system": "sqlite"}, CHAT, CHAT)))
    _good, _other, timeless, traceless, _root = spans_in(tree)
    timeless["startTimeUnixNano"] = "0"
    traceless["traceId"] = "00" * 16
    status, _, answer = await receiver.post(json.dumps(tree).encode(), JSON)
    assert (status, len(receiver.kept.calls), receiver.intake.rejected) == (200, 1, 2)
    report = json.loads(answer)["partialSuccess"]
    assert report["rejectedSpans"] == "2"
    assert "start" in report["errorMessage"]
    assert "trace id" in report["errorMessage"]


async def test_a_warning_rejects_nothing(receiver: Receiver) -> None:
    status, _, answer = await receiver.post(body_of({**CHAT, "gen_ai.input.messages": '[{"role":"us'}))
    report = ExportTraceServiceResponse.FromString(answer).partial_success
    assert (status, report.rejected_spans, len(receiver.kept.calls)) == (200, 0, 1)
    assert "gen_ai.input.messages" in report.error_message


async def test_a_request_without_spans_is_a_success_without_a_word(receiver: Receiver) -> None:
    assert (await receiver.post(b""))[::2] == (200, b"")
    assert (await receiver.post(b"{}", JSON))[::2] == (200, b"{}")


async def test_a_full_spool_asks_to_send_it_again_and_loses_nothing(receiver: Receiver) -> None:
    body = body_of(CHAT, CHAT, CHAT)
    receiver.kept.room = 1
    status, headers, answer = await receiver.post(body)
    assert (status, int(headers["Retry-After"]) >= 1) == (503, True)
    assert Status.FromString(answer).code == 14
    receiver.kept.room = 100
    assert (await receiver.post(body))[0] == 200
    assert len({call.uid for call in receiver.kept.calls}) == 3


async def test_an_exporter_waits_for_the_spool(receiver: Receiver) -> None:
    receiver.kept.room = 0
    exporter = OTLPSpanExporter(f"{receiver.url}/v1/traces", timeout=8)
    sending = asyncio.create_task(asyncio.to_thread(exporter.export, made_spans(CHAT)))
    await asyncio.sleep(0.3)
    receiver.kept.room = 10
    assert await sending is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert len(receiver.kept.calls) == 1


async def test_a_body_over_the_limit_is_refused_compressed_or_not(start: Any) -> None:
    receiver = await start(max_body_bytes=10_000)
    for body, coding in ((bytes(10_001), ""), (gzip.compress(bytes(10_000_000)), "gzip")):
        status, _, answer = await receiver.post(body, Content_Encoding=coding)
        assert status == 413
        assert "proxy.max_body_bytes" in Status.FromString(answer).message


async def test_calls_over_the_limit_of_a_key_are_refused(start: Any) -> None:
    receiver = await start(calls_per_minute_per_key=1)
    key = await receiver.key(Scope.CALL)
    statuses = [(await receiver.post(body_of(CHAT), x_noria_key=key))[0] for _ in range(2)]
    assert statuses == [200, 429]


async def test_what_is_malformed_is_a_400_with_a_status_of_grpc(receiver: Receiver) -> None:
    status, headers, answer = await receiver.post(b"\xff", PROTOBUF)
    assert (status, headers["Content-Type"], Status.FromString(answer).code) == (400, PROTOBUF, 3)
    status, headers, answer = await receiver.post(b"{", JSON)
    assert (status, json.loads(answer)["code"]) == (400, 3)
    assert (await receiver.post(body_of(CHAT), "text/plain"))[0] == 400


# A whole agent, in the SDK's own batches


async def test_a_task_with_its_calls_arrives_as_one_trace(receiver: Receiver) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "travel"}))
    exporter = OTLPSpanExporter(f"{receiver.url}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("agent")
    task = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "travel",
        "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text","content":"book a hotel"}]}]',
        "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":"booked"}]}]',
    }
    with tracer.start_as_current_span("invoke_agent travel", attributes=task):
        tracer.start_span("chat", attributes=CHAT).end()
        with tracer.start_as_current_span("invoke_agent finder", attributes={**task, "gen_ai.agent.name": "finder"}):
            tracer.start_span("chat", attributes={**CHAT, "gen_ai.agent.name": "finder"}).end()
            tracer.start_span("execute_tool", attributes={"gen_ai.operation.name": "execute_tool"}).end()
    await asyncio.to_thread(provider.shutdown)
    calls = {call.process_node: call for call in receiver.kept.calls}
    assert calls.keys() == {"default", "finder", END2END}
    assert len(receiver.kept.calls) == 3
    assert len({call.trace_id for call in receiver.kept.calls}) == 1
    assert (calls[END2END].input, calls[END2END].output) == ("book a hotel", "booked")


async def test_spans_reach_the_store_through_the_proxy_and_are_told_once(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    body = body_of(CHAT, CHAT)
    for _ in range(2):
        headers = {"Content-Type": PROTOBUF, "Content-Encoding": "gzip"}
        url = f"{proxy.url}/apps/travel/v1/traces"
        async with proxy.session.post(url, data=gzip.compress(body), headers=headers) as answer:
            assert answer.status == 200
    stored = await proxy.calls()
    assert [call.app for call in stored] == ["travel", "travel"]
    assert json.loads(stored[0].input)["messages"] == [{"role": "user", "content": "hi"}]


async def test_an_agent_that_uses_both_is_counted_once(start_upstream: Any, start_proxy: Any) -> None:
    """Its calls go through the proxy, and its instrumentation tells of them too."""
    upstream = await start_upstream()  # answers with the id c1, as the span has it
    proxy = await start_proxy({"main": upstream.url})
    body = body_of(CHAT, {**CHAT, "gen_ai.response.id": "c2"})
    trace_id = next(iter(spans_of(body, PROTOBUF))).trace_id
    await proxy.chat("hi", headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    async with proxy.session.post(f"{proxy.url}/v1/traces", data=body, headers={"Content-Type": PROTOBUF}) as answer:
        assert answer.status == 200
    by_proxy, by_span = await proxy.calls()
    assert json.loads(by_proxy.output)["id"] == "c1"
    assert by_span.attributes["response_id"] == "c2"
