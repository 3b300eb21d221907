"""Calls and spans that the tests of the semantic conventions are made of."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from noria.contracts.call import Arm, Call, CallStatus
from noria.services.proxy.otlp_calls import call_of, received
from noria.services.proxy.otlp_request import Source, Span
from noria.services.proxy.otlp_sender import Sender
from noria.services.proxy.spans import span_of

RECORDINGS = Path(__file__).parent / "otlp_recordings"
DOCUMENTATION = Path(__file__).parents[4] / "docs" / "telemetry.md"
RESOURCE = Resource({"service.name": "noria-proxy"})
NAMED = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
TRACE = "0af7651916cd43dd8448eb211c80319c"


def call(**changes: Any) -> Call:
    made = Call(
        uid="01890a5d-ac96-774b-bcce-b302099a8057",
        tenant="acme",
        app="travel",
        process_node="router",
        trace_id=TRACE,
        model_name="m",
        policy_version=None,
        arm=Arm.LIVE,
        input=json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        output=json.dumps({"id": "c1", "choices": [{"message": {"role": "assistant", "content": "ho"}}]}),
        status=CallStatus.OK,
        request_time=datetime(2026, 5, 1, 12, 0, 0, 123456, tzinfo=UTC),
        response_time=datetime(2026, 5, 1, 12, 0, 1, tzinfo=UTC),
        duration_ms=876.544,
        attributes={"endpoint": "chat.completions"},
    )
    return replace(made, **changes)


def sent_and_read(made: Call) -> Call:
    """The call after it went out as a span and came in again."""
    span = span_of(made, RESOURCE, capture_content=True)
    body = encode_spans([span]).SerializeToString()
    found = received(body, "application/x-protobuf", "", Sender("acme", "default"), 1 << 30)
    assert found.rejected == ()
    [back] = found.calls
    return back


def span(attributes: dict[str, Any], *events: tuple[str, dict[str, Any]], **changes: Any) -> Span:
    made = Span(
        trace_id=TRACE,
        span_id="b7ad6b7169203331",
        parent_span_id="",
        start_ns=1_777_000_000_000_000_000,
        end_ns=1_777_000_001_500_000_000,
        attributes=attributes,
        events=events,
        failed=False,
        cut=False,
        source=Source({}),
    )
    return replace(made, **changes)


def read(attributes: dict[str, Any], *events: tuple[str, dict[str, Any]], **changes: Any) -> Call:
    found, _warning = call_of(span(attributes, *events, **changes), Sender("acme", "default"))
    assert found is not None
    return found


def messages_of(found: Call) -> Any:
    return json.loads(found.input)["messages"]


def answers_of(found: Call) -> list[Any]:
    return [choice["message"] for choice in json.loads(found.output)["choices"]]
