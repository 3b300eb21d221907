"""Spans out, to a real receiver of OTLP on loopback that takes, refuses, stalls or is not there."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from pydantic import ValidationError

from noria.config_services import TelemetryConfig
from noria.contracts.call import END2END, Arm, Call, CallStatus
from noria.services.proxy import spans
from noria.services.proxy.spans import SpanExporter, span_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
RESOURCE = Resource({})


@dataclass
class Collector:
    """A receiver of traces: what came, and what it answers."""

    url: str = ""
    status: int = 200
    wait: float = 0.0
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for group in request.resource_spans
            for scoped in group.scope_spans
            for span in scoped.spans
        ]

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append(request.headers.copy())
        await asyncio.sleep(self.wait)
        if self.status == 200:
            self.requests.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(
            status=self.status,
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield found
    await runner.cleanup()


@pytest.fixture
async def start_exporter() -> AsyncIterator[Callable[..., SpanExporter]]:
    started: list[SpanExporter] = []

    def start(url: str, **more: Any) -> SpanExporter:
        exporter = SpanExporter.of(TelemetryConfig(otlp_endpoint=url, **more))
        assert exporter is not None
        started.append(exporter)
        return exporter

    yield start
    for exporter in started:
        await asyncio.to_thread(exporter.close, 0.1)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)


async def close(exporter: SpanExporter, *timeout: float) -> None:
    await asyncio.to_thread(exporter.close, *timeout)


def attributes(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


async def test_a_recorded_call_arrives_as_a_client_span_in_its_own_trace(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    start = datetime(2026, 5, 1, 12, 0, 0, 123456, tzinfo=UTC)
    made = make_call(
        trace_id=TRACE,
        input=json.dumps({"model": "m", "messages": [{"role": "user", "content": "a secret"}], "temperature": 0.5}),
        output=json.dumps({"id": "c1", "model": "m-2"}),
        usage={"prompt_tokens": 3, "completion_tokens": 2},
        finish_reasons=("stop",),
        request_time=start,
        response_time=start + timedelta(hours=1),  # a clock that jumped: the duration is monotonic
        duration_ms=250.5,
        attributes={"endpoint": "chat.completions", "parent_span_id": PARENT},
    )
    exporter = start_exporter(collector.url, service_name="my-proxy")
    exporter.export([made])
    await until(lambda: exporter.exported == 1)
    [span] = collector.spans
    assert (span.name, span.kind, span.trace_id.hex()) == ("chat m", Span.SPAN_KIND_CLIENT, TRACE)
    assert span.parent_span_id.hex() == PARENT
    assert span.start_time_unix_nano == int(start.timestamp()) * 10**9 + 123_456_000
    assert span.end_time_unix_nano - span.start_time_unix_nano == 250_500_000
    assert span.status.code == 0  # unset, as the conventions want it where nothing failed
    said = attributes(span)
    assert (said["gen_ai.request.model"], said["gen_ai.response.model"], said["gen_ai.response.id"]) == (
        "m",
        "m-2",
        "c1",
    )
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 2)
    assert (said["gen_ai.response.finish_reasons"], said["noria.uid"]) == (["stop"], made.uid)
    [group] = collector.requests[0].resource_spans
    resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
    assert resource["service.name"] == "my-proxy"
    assert group.scope_spans[0].schema_url == "https://opentelemetry.io/schemas/1.41.1"
    assert b"a secret" not in collector.requests[0].SerializeToString()


async def test_content_leaves_only_where_the_configuration_says_so(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    asked = json.dumps({"messages": [{"role": "user", "content": "a secret"}]})
    answered = json.dumps({"choices": [{"message": {"content": "another"}, "finish_reason": "stop"}]})
    large = json.dumps({"messages": [{"role": "user", "content": "x" * spans.MAX_CONTENT_BYTES}]})
    exporter = start_exporter(collector.url, capture_content=True)
    exporter.export([make_call(input=asked, output=answered), make_call(input=large)])
    await until(lambda: exporter.exported == 2)
    said, too_large = map(attributes, collector.spans)
    assert json.loads(said["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "a secret"}]}
    ]
    assert json.loads(said["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "another"}]
    assert "gen_ai.input.messages" not in too_large
    assert too_large["noria.content_bytes"] > spans.MAX_CONTENT_BYTES


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (CallStatus.UPSTREAM_ERROR, "upstream_timeout"),
        (CallStatus.CLIENT_DISCONNECT, "client_left"),
        (CallStatus.REFUSED, None),
    ],
)
def test_a_call_that_failed_is_an_error_with_its_type(
    make_call: Callable[..., Call], status: CallStatus, error_type: str | None
) -> None:
    span = span_of(make_call(status=status, error_type=error_type), RESOURCE, capture_content=False)
    assert span.status.status_code.name == "ERROR"
    assert (span.attributes or {})["error.type"] == error_type or status.value


def test_what_stands_for_a_span_is_the_same_at_every_replay(make_call: Callable[..., Call]) -> None:
    made = make_call()
    one, two, other = (span_of(call, RESOURCE, capture_content=False) for call in (made, made, make_call()))
    assert one.context == two.context
    assert one.context != other.context


def test_a_whole_task_is_an_agent_that_was_invoked(make_call: Callable[..., Call]) -> None:
    span = span_of(make_call(process_node=END2END, model_name="", app="travel"), RESOURCE, capture_content=False)
    assert (span.name, span.kind.name) == ("invoke_agent travel", "INTERNAL")
    said = span.attributes or {}
    assert (said["gen_ai.operation.name"], said["gen_ai.agent.name"]) == ("invoke_agent", "travel")
    assert "gen_ai.provider.name" not in said


@pytest.mark.parametrize(
    ("traceparent", "linked"), [(f"00-{'1' * 32}-{PARENT}-01", True), ("nonsense", False), (None, False)]
)
def test_the_client_s_own_trace_is_linked_to_a_call_of_a_rollout(
    make_call: Callable[..., Call], traceparent: str | None, linked: bool
) -> None:
    given = {} if traceparent is None else {"client_traceparent": traceparent}
    made = make_call(trace_id=TRACE, arm=Arm.ROLLOUT, attributes=given)
    span = span_of(made, RESOURCE, capture_content=False)
    assert [f"{link.context.trace_id:032x}" for link in span.links] == (["1" * 32] if linked else [])
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE


async def test_many_calls_arrive_once_each_in_few_requests(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    made = [make_call(trace_id=f"{number:032x}") for number in range(1, 1501)]
    exporter = start_exporter(collector.url)
    for place in range(0, len(made), 100):
        exporter.export(made[place : place + 100])
    await close(exporter)
    assert (exporter.exported, exporter.dropped) == (1500, 0)
    assert [span.trace_id.hex() for span in collector.spans] == [call.trace_id for call in made]
    assert len(collector.requests) <= 5


async def test_headers_and_compression_are_those_of_the_standard_environment(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-tenant=t")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    exporter = start_exporter(collector.url)
    exporter.export([make_call()])
    await close(exporter)
    [headers] = collector.headers
    assert (headers["authorization"], headers["x-tenant"]) == ("Bearer abc", "t")
    assert headers["Content-Encoding"] == "gzip"
    [group] = collector.requests[0].resource_spans
    assert "deployment.environment.name" in {pair.key for pair in group.resource.attributes}
    assert exporter.exported == 1


@pytest.mark.parametrize("status", [400, 503])
async def test_a_collector_that_refuses_costs_counted_drops(
    collector: Collector,
    start_exporter: Any,
    make_call: Callable[..., Call],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # how long a 503 is tried again
    collector.status = status
    exporter = start_exporter(collector.url)
    exporter.export([make_call(), make_call()])
    await until(lambda: exporter.dropped == 2)
    collector.status = 200
    exporter.export([make_call()])
    await until(lambda: exporter.exported == 1)
    assert exporter.dropped == 2


async def test_a_collector_that_is_away_holds_up_nobody(
    start_exporter: Any, make_call: Callable[..., Call], closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = start_exporter(f"http://127.0.0.1:{closed_port}/v1/traces")
    made = [make_call() for _ in range(100)]
    began = time.monotonic()
    for _ in range(spans.MAX_WAITING // 100 + 10):
        exporter.export(made)
    assert time.monotonic() - began < 1.0
    given = (spans.MAX_WAITING // 100 + 10) * 100
    await close(exporter, 0.2)
    assert (exporter.exported, exporter.dropped) == (0, given)
    ours = [record for record in caplog.records if record.name == "noria.services.proxy"]
    assert len(ours) <= 1


async def test_a_collector_that_does_not_answer_is_waited_for_by_nobody(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    collector.wait = 5.0
    exporter = start_exporter(collector.url)
    exporter.export([make_call()])
    await until(lambda: bool(collector.headers))
    began = time.monotonic()
    exporter.export([make_call() for _ in range(10)])
    await close(exporter, 0.3)
    assert time.monotonic() - began < 3.0
    assert exporter.exported == 0


async def test_a_collector_that_comes_back_is_served_again(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "noria.services.proxy")
    collector.status = 400
    exporter = start_exporter(collector.url)
    exporter.export([make_call()])
    await until(lambda: exporter.dropped == 1)
    collector.status = 200
    exporter.export([make_call()])
    await until(lambda: exporter.exported == 1)
    ours = [record.getMessage() for record in caplog.records if record.name == "noria.services.proxy"]
    assert len(ours) == 2
    assert "not taken" in ours[0]
    assert "taken again" in ours[1]


async def test_large_bodies_that_wait_are_bounded_in_bytes(
    start_exporter: Any, make_call: Callable[..., Call], closed_port: int
) -> None:
    exporter = start_exporter(f"http://127.0.0.1:{closed_port}/v1/traces", capture_content=True)
    large = make_call(input="x" * 10_000_000)
    exporter.export([large] * 20)
    assert exporter.dropped >= 20 - spans.MAX_WAITING_BYTES // 10_000_000 - 1
    await close(exporter, 0.2)
    assert exporter.dropped == 20


async def test_what_was_sent_makes_room(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    exporter = start_exporter(collector.url)
    large = make_call(input="x" * 30_000_000)
    for sent in range(1, 4):
        exporter.export([large])
        await until(lambda sent=sent: exporter.exported == sent)  # type: ignore[misc]
    assert exporter.dropped == 0


async def test_a_record_that_cannot_be_a_span_costs_only_itself(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    exporter = start_exporter(collector.url)
    exporter.export([make_call(trace_id="no trace id"), make_call(), make_call(uid=object())])
    await close(exporter)
    assert (exporter.exported, exporter.dropped, len(collector.spans)) == (1, 2, 1)


async def test_what_came_in_as_a_span_does_not_go_out_again(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    exporter = start_exporter(collector.url)
    exporter.export([make_call(attributes={"source": "otlp"}), make_call()])
    await close(exporter)
    assert (exporter.exported, exporter.dropped, len(collector.spans)) == (1, 0, 1)


async def test_after_the_end_nothing_is_taken(
    collector: Collector, start_exporter: Any, make_call: Callable[..., Call]
) -> None:
    exporter = start_exporter(collector.url)
    await close(exporter)
    exporter.export([make_call()])
    assert (exporter.exported, exporter.dropped) == (0, 1)


def test_without_an_endpoint_there_is_no_exporter() -> None:
    assert SpanExporter.of(TelemetryConfig()) is None


def test_an_endpoint_without_a_path_gets_the_standard_one() -> None:
    assert TelemetryConfig(otlp_endpoint="http://collector:4318").otlp_endpoint == "http://collector:4318/v1/traces"
    named = "https://collector/otlp/v1/traces"
    assert TelemetryConfig(otlp_endpoint=named).otlp_endpoint == named


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_told_at_the_start(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="http"):
        TelemetryConfig(otlp_endpoint=endpoint)
