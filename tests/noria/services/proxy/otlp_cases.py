"""Spans and requests of OTLP that several tests send."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PROTOBUF, JSON = "application/x-protobuf", "application/json"

RECORDINGS = Path(__file__).parent / "otlp_recordings"
CHAT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "m",
    "gen_ai.response.id": "c1",
    "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]',
    "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":"ho"}],"finish_reason":"stop"}]',
}


def made_spans(*said: dict[str, Any], resource: dict[str, str] | None = None) -> tuple[ReadableSpan, ...]:
    """Spans as the SDK makes them, in one trace, below a span that has nothing to do with models."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(resource or {"service.name": "travel-agent"}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("test", "1.0")
    with tracer.start_as_current_span("POST /book", attributes={"http.request.method": "POST"}):
        for attributes in said:
            tracer.start_span("chat", attributes=attributes).end()
    return memory.get_finished_spans()


def body_of(*said: dict[str, Any], **more: Any) -> bytes:
    return encode_spans(made_spans(*said, **more)).SerializeToString()


def as_json(body: bytes) -> bytes:
    """The same request in OTLP's JSON: ids in hex instead of base64."""
    tree = MessageToDict(ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True)
    for span in spans_in(tree):
        for key in ("traceId", "spanId", "parentSpanId"):
            if key in span:
                span[key] = base64.b64decode(span[key]).hex()
    return json.dumps(tree).encode()


def spans_in(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in tree["resourceSpans"]:
        for scoped in group["scopeSpans"]:
            yield from scoped["spans"]
