"""Recorded calls as OpenTelemetry spans, sent by OTLP over HTTP; what cannot be sent is dropped and counted.

It runs where records are written to the store, off the way of the calls. Headers (for a key of the backend), timeout,
compression and certificates are those of the standard environment: `OTEL_EXPORTER_OTLP_HEADERS` and its sisters.
"""

import contextlib
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from noria import __version__
from noria.config_services import TelemetryConfig
from noria.contracts.call import END2END, Call, CallStatus
from noria.services.proxy import semconv
from noria.services.proxy.exchange import Kind
from noria.services.proxy.semconv import Operation
from noria.services.proxy.semconv_content import content_attributes
from noria.services.proxy.wire.json_text import parse

MAX_WAITING = 2048
MAX_WAITING_BYTES = 64_000_000
"""Of inputs and outputs of the calls that wait."""
MAX_CONTENT_BYTES = 1_000_000
"""Content of one span; a larger one goes without, and says how large it was. Collectors take some 20 MB a request."""

_BATCH = 512
_BATCH_BYTES = 4_000_000
_GATHER_SECONDS = 0.25
_FIRST_PAUSE = 0.5
_LAST_PAUSE = 30.0
_CLOSE_SECONDS = 5.0
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCOPE = InstrumentationScope("noria.services.proxy", __version__, semconv.SCHEMA_URL)

_OPERATIONS: Mapping[str, Operation] = {
    Kind.CHAT: Operation.CHAT,
    Kind.RESPONSE: Operation.CHAT,
    Kind.MESSAGE: Operation.CHAT,
    Kind.COMPLETION: Operation.TEXT_COMPLETION,
    Kind.EMBEDDING: Operation.EMBEDDINGS,
}

_log = logging.getLogger("noria.services.proxy")


class SpanExporter:
    """Sends spans from a thread of its own, so that a collector that is away or slow holds up nobody."""

    def __init__(self, exporter: OTLPSpanExporter, resource: Resource, *, capture_content: bool) -> None:
        self._exporter = exporter
        self._resource = resource
        self._capture_content = capture_content
        self._waiting: deque[Call] = deque()
        self._bytes = 0
        self._closing = False
        self._failing = False
        self._changed = threading.Condition()
        self.exported = 0
        """Spans that the collector has taken."""
        self.dropped = 0
        """Spans that were not sent: too many waited, or the collector did not take them."""
        self._thread = threading.Thread(target=self._run, name="noria-spans", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: TelemetryConfig) -> "SpanExporter | None":
        """The exporter that noria.toml describes, None where `telemetry.otlp_endpoint` is not set."""
        if config.otlp_endpoint is None:
            return None
        named = {SERVICE_NAME: config.service_name, SERVICE_VERSION: __version__}
        resource = Resource.create(named, semconv.SCHEMA_URL)
        return cls(OTLPSpanExporter(config.otlp_endpoint), resource, capture_content=config.capture_content)

    def export(self, calls: Sequence[Call]) -> None:
        """Send them soon; never raises, never waits for the network. What came in as a span is not sent out again."""
        with self._changed:
            for call in calls:
                if call.attributes.get("source") == semconv.SOURCE:
                    continue  # else a collector that sends us its spans would get them back for ever
                size = _size(call)
                if self._closing or len(self._waiting) >= MAX_WAITING or self._bytes + size > MAX_WAITING_BYTES:
                    self.dropped += 1
                    continue
                self._waiting.append(call)
                self._bytes += size
            self._changed.notify_all()

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Send what waits, for at most `timeout` seconds; the rest is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._drop_waiting()
        with contextlib.suppress(Exception):  # ends the wait for another try too
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._thread.join(_FIRST_PAUSE)

    def _run(self) -> None:
        pause = 0.0
        while batch := self._next(pause):
            spans = list(self._spans(batch))
            try:
                sent = not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception as error:  # whatever the library raises, the next batch is tried
                _log.warning("spans could not be sent: %s", error)
                sent = False
            self._count(len(spans), sent)
            pause = 0.0 if sent else min(max(_FIRST_PAUSE, pause * 2), _LAST_PAUSE)

    def _next(self, pause: float) -> list[Call]:
        """The next batch, after `pause` seconds; an empty one when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, pause)
            if pause and self._closing:  # the collector is away: nobody waits for it at the end
                self._drop_waiting()
            self._changed.wait_for(lambda: self._closing or self._waiting)
            self._changed.wait_for(lambda: self._closing or len(self._waiting) >= _BATCH, _GATHER_SECONDS)
            batch: list[Call] = []
            size = 0
            while self._waiting and len(batch) < _BATCH and size < _BATCH_BYTES:
                batch.append(self._waiting.popleft())
                size += _size(batch[-1])
            self._bytes -= size
            return batch

    def _drop_waiting(self) -> None:
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._bytes = 0

    def _spans(self, calls: Sequence[Call]) -> Iterator[ReadableSpan]:
        for call in calls:
            try:
                yield span_of(call, self._resource, capture_content=self._capture_content)
            except Exception:  # a record of any shape may be in the spool, and none may stop the others
                _log.exception("call %s cannot be made a span", call.uid)
                with self._changed:
                    self.dropped += 1

    def _count(self, spans: int, sent: bool) -> None:
        if sent == self._failing:
            self._failing = not sent
            if sent:
                _log.info("spans are taken again; %d were dropped so far", self.dropped)
            else:
                _log.warning("spans are not taken and get dropped (noria_spans_dropped_total); the calls go on")
        with self._changed:
            if sent:
                self.exported += spans
            else:
                self.dropped += spans


def span_of(call: Call, resource: Resource, *, capture_content: bool) -> ReadableSpan:
    """The span of one recorded call: CLIENT, in the call's own trace, below the caller's span where that is known.

    Its id is made of the call's uid, so that a record that is replayed from the spool is the same span once more.
    `call.attributes["parent_span_id"]` (16 hex digits) names the caller's span; `client_traceparent`, which a call of a
    rollout has, becomes a link.
    """
    task = call.process_node == END2END
    operation = Operation.INVOKE_AGENT if task else _OPERATIONS.get(_kind(call), Operation.CHAT)
    start = (call.request_time - _EPOCH) // _MICROSECOND * 1000
    parent = call.attributes.get("parent_span_id")
    failed = call.status is not CallStatus.OK
    return ReadableSpan(
        name=f"{operation.value} {call.app if task else call.model_name}".strip(),
        context=_context(call.trace_id, hashlib.sha256(call.uid.encode()).hexdigest()[:16]),
        parent=_context(call.trace_id, parent) if isinstance(parent, str) else None,
        resource=resource,
        attributes=attributes_of(call, operation, capture_content=capture_content),
        links=_links(call.attributes.get("client_traceparent")),
        kind=SpanKind.INTERNAL if task else SpanKind.CLIENT,
        status=Status(StatusCode.ERROR, call.error_type) if failed else Status(StatusCode.UNSET),
        start_time=start,
        end_time=start + round(max(0.0, call.duration_ms) * 1e6),
        instrumentation_scope=_SCOPE,
    )


def attributes_of(call: Call, operation: Operation, *, capture_content: bool) -> dict[str, Any]:
    """Everything of a call that `semconv` has a name for."""
    request, response = _object(call.input), _object(call.output)
    kind = _kind(call)
    first_byte = semconv.as_number(call.attributes.get("first_byte_ms"))
    said: dict[semconv.Field, Any] = {
        semconv.OPERATION: operation.value,
        # By the format of the API, which is what the conventions have this name for: who answers is `server.address`.
        semconv.PROVIDER: "anthropic" if kind == Kind.MESSAGE else "openai",
        semconv.MODEL: call.model_name,
        semconv.RESPONSE_MODEL: semconv.as_text(response.get("model")),
        semconv.RESPONSE_ID: semconv.as_text(response.get("id")),
        semconv.FINISH_REASONS: list(call.finish_reasons),
        semconv.FIRST_CHUNK_SECONDS: first_byte / 1000 if first_byte is not None and _streamed(call) else None,
        semconv.ERROR_TYPE: None if call.status is CallStatus.OK else call.error_type or call.status.value,
        semconv.HTTP_STATUS: call.attributes.get("http_status"),
        semconv.SERVER_ADDRESS: call.attributes.get("server_address"),
        semconv.SERVER_PORT: call.attributes.get("server_port"),
        semconv.UID: call.uid,
        semconv.TENANT: call.tenant,
        semconv.APP: call.app,
        semconv.NODE: call.process_node,
        semconv.POLICY_VERSION: call.policy_version,
        semconv.ARM: call.arm.value,
        semconv.STATUS: call.status.value,
        semconv.CONSENT: call.consent,
        semconv.SUBJECT_HASH: call.subject,
        semconv.AGENT_VERSION: call.agent_version,
    }
    if operation is Operation.INVOKE_AGENT:
        said[semconv.PROVIDER] = said[semconv.MODEL] = None
        said[semconv.AGENT_NAME] = call.app
    attributes = {field.name: value for field, value in said.items() if value not in (None, "", [])}
    attributes.update(semconv.parameter_attributes(request))
    attributes.update(semconv.usage_attributes(call.usage, apart=kind == Kind.MESSAGE))
    if _streamed(call):
        attributes[semconv.STREAM.name] = True
    for key, value in _object_of(call.attributes.get("rollout")).items():
        if isinstance(value, str | int | float):
            attributes[f"{semconv.ROLLOUT}{key}"] = value
    if capture_content:
        attributes.update(_content(call, request, response))
    return attributes


def _content(call: Call, request: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    if _size(call) > MAX_CONTENT_BYTES:
        return {semconv.CONTENT_BYTES.name: _size(call)}
    return dict(content_attributes(call, request, response))


def _kind(call: Call) -> str:
    return str(call.attributes.get("endpoint", Kind.CHAT.value))


def _streamed(call: Call) -> bool:
    return call.attributes.get("stream") is True


def _size(call: Call) -> int:
    return len(call.input) + len(call.output)


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _links(traceparent: Any) -> list[Link]:
    """The client's own span, where what it sent names one."""
    carrier = {"traceparent": str(traceparent)}
    context = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    return [Link(context)] if context.is_valid else []


def _object(text: str) -> Mapping[str, Any]:
    try:
        return _object_of(parse(text.encode(errors="replace")))
    except ValueError:
        return {}


def _object_of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
