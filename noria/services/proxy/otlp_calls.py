"""From spans of other instrumentations to calls."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from noria.contracts.call import END2END, Arm, Call, CallStatus
from noria.contracts.errors import InvalidRecord
from noria.services.proxy import semconv
from noria.services.proxy.exchange import Kind
from noria.services.proxy.identity import is_trace_id
from noria.services.proxy.otlp_request import Span, media_type, spans_of
from noria.services.proxy.otlp_sender import Sender, app_of, node_of, subject_of, tenant_of
from noria.services.proxy.refusal import TooLarge
from noria.services.proxy.semconv import Operation
from noria.services.proxy.semconv_dialects import Content, content_of, embedded_texts, task_text
from noria.services.proxy.wire.decode import DecodedTooLarge, decode_body
from noria.services.proxy.wire.json_text import plain, to_text

NOTHING = "null"
"""`input` and `output` where content was not captured."""

UID_SPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://opentelemetry.io/docs/specs/otlp/")
"""The namespace of uids (RFC 9562, version 5) of what came in as spans; changed, a repeated export would double."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_NS = 253_402_300_799 * 10**9
"""The year 9999, after which Python has no dates."""

_Enum = TypeVar("_Enum", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Received:
    """What a request held: calls; why spans that are model calls could not be kept; what was kept with less in it."""

    calls: tuple[Call, ...] = ()
    rejected: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def received(body: bytes, content_type: str, content_encoding: str, sender: Sender, limit: int) -> Received:
    """Read one request body.

    Raises `InvalidRecord` if it is no request of OTLP, `TooLarge` if it is over `limit` bytes when it is decoded.
    """
    media_type(content_type)
    try:
        decoded = decode_body(body, content_encoding, limit)
    except DecodedTooLarge as error:
        raise TooLarge(f"{error}; proxy.max_body_bytes sets the limit") from error
    except ValueError as error:
        raise InvalidRecord(str(error)) from error
    calls: list[Call] = []
    rejected: list[str] = []
    warnings: list[str] = []
    for span in spans_of(decoded, content_type):
        try:
            call, warning = call_of(span, sender)
        except InvalidRecord as error:
            rejected.append(str(error))
            continue
        if call is not None:
            calls.append(call)
        if warning is not None:
            warnings.append(warning)
    return Received(tuple(calls), tuple(rejected), tuple(warnings))


def uid_of(tenant: str, trace_id: str, span_id: str) -> str:
    """The uid of the call that a span stands for: the same whenever, and however often, the span is exported."""
    return str(uuid.uuid5(UID_SPACE, f"{tenant}\0{trace_id}\0{span_id}"))


def call_of(span: Span, sender: Sender) -> tuple[Call | None, str | None]:
    """The call that a span stands for, None for a span that stands for none; and a warning, if there is cause for one.

    Raises `InvalidRecord` for a span that is a model call and cannot be kept.
    """
    operation = semconv.operation_of(span.attributes)
    if operation is not None and semconv.NODE.read(span.attributes) == END2END:
        operation = Operation.INVOKE_AGENT
    elif operation is Operation.INVOKE_AGENT and span.parent_span_id:
        return None, None  # an agent within a task: its model calls have spans of their own
    if operation is None:
        return None, None
    _check(span)
    if operation is Operation.INVOKE_AGENT:
        return _task(span, sender), None
    node = node_of(span, sender)
    if node == END2END:
        raise InvalidRecord(f"span {span.span_id}: node {END2END!r} holds whole tasks, not model calls; set noria.node")
    if operation is Operation.EMBEDDINGS:
        return _embeddings(span, sender, node), None
    return _model_call(span, sender, node, operation)


def _check(span: Span) -> None:
    if not is_trace_id(span.trace_id):
        raise InvalidRecord(f"trace id {span.trace_id!r} is not 16 bytes, or all zero")
    if len(span.span_id) != 16 or not span.span_id.strip("0"):
        raise InvalidRecord(f"span id {span.span_id!r} is not 8 bytes, or all zero")
    if not 0 < span.start_ns <= _LAST_NS or span.end_ns > _LAST_NS:
        raise InvalidRecord(f"span {span.span_id}: its start ({span.start_ns} ns) or end ({span.end_ns} ns) is no time")


def _model_call(span: Span, sender: Sender, node: str, operation: Operation) -> tuple[Call, str | None]:
    said = span.attributes
    content = content_of(said, span.events)
    if content is not None and span.cut:
        content.fault = content.fault or "attributes or events were dropped by the sender for being too many"
    parameters = {**semconv.parameters_of(said), **(content.parameters if content is not None else {})}
    model = semconv.as_text(said.get("gen_ai.request.model")) or semconv.as_text(parameters.pop("model", None))
    model = model or semconv.MODEL.read(said) or semconv.RESPONSE_MODEL.read(said) or ""
    reasons = [semconv.finish_reason(reason) for reason in semconv.FINISH_REASONS.read(said) or ()]
    usage = semconv.usage_of(said)
    request = answer = NOTHING
    if content is not None:
        if content.messages:
            request = content.request or _request_text(content, model, parameters)
        if content.choices:
            answer, reasons = _answer_text(content, span, usage, reasons)
    call = _call(
        span,
        sender,
        node,
        operation,
        whole=content is not None and content.whole,
        model_name=plain(model),
        input=request,
        output=answer,
        finish_reasons=tuple(map(plain, reasons)),
        usage=usage,
        more={
            "endpoint": Kind.CHAT.value,
            "dialect": None if content is None else content.dialect.value,
            "content_fault": None if content is None else content.fault,
            "tool_definitions": False if content is not None and content.lacks_tools else None,
            **({"response_id": plain(content.response_id)} if content is not None and content.response_id else {}),
        },
    )
    fault = None if content is None or content.fault is None else f"span {span.span_id}: {content.fault}"
    return call, fault


def _request_text(content: Content, model: str, parameters: Mapping[str, Any]) -> str:
    tools = {"tools": content.tools} if content.tools else {}
    return to_text({"model": model, "messages": content.messages, **parameters, **tools})


def _answer_text(
    content: Content, span: Span, usage: Mapping[str, Any] | None, reasons: list[str]
) -> tuple[str, list[str]]:
    """The response as a chat completion, and why its choices ended."""
    choices: list[dict[str, Any]] = []
    for place, (message, said) in enumerate(content.choices):
        reason = semconv.finish_reason(said) if said else reasons[place] if place < len(reasons) else None
        choices.append({"index": place, "message": {"role": "assistant", **message}, "finish_reason": reason})
    found = [choice["finish_reason"] for choice in choices if choice["finish_reason"]] or reasons
    if content.response is not None:
        return content.response, found
    answer = {
        "id": semconv.RESPONSE_ID.read(span.attributes),
        "object": "chat.completion",
        "model": semconv.RESPONSE_MODEL.read(span.attributes),
        "choices": choices,
        "usage": usage,
    }
    return to_text({key: value for key, value in answer.items() if value is not None}), found


def _embeddings(span: Span, sender: Sender, node: str) -> Call:
    model = semconv.MODEL.read(span.attributes) or semconv.RESPONSE_MODEL.read(span.attributes) or ""
    texts = embedded_texts(span.attributes, span.events)
    return _call(
        span,
        sender,
        node,
        Operation.EMBEDDINGS,
        whole=False,  # no instrumentation has the vectors in a form that could be relied upon
        model_name=plain(model),
        input=to_text({"model": model, "input": texts}) if texts else NOTHING,
        output=NOTHING,
        usage=semconv.usage_of(span.attributes),
        more={"endpoint": Kind.EMBEDDING.value},
    )


def _task(span: Span, sender: Sender) -> Call | None:
    """The `end2end` row of a trace; None where the task's request was not captured: nothing could be done with it."""
    request, answer = task_text(span.attributes, span.events)
    if request is None:
        return None
    return _call(
        span,
        sender,
        END2END,
        Operation.INVOKE_AGENT,
        whole=answer is not None and not span.cut,
        model_name="",
        input=_storable(request),
        output=_storable(answer or ""),
        more={},
    )


def _call(
    span: Span, sender: Sender, node: str, operation: Operation, *, whole: bool, more: Mapping[str, Any], **fields: Any
) -> Call:
    said = span.attributes
    both = {**span.source.resource, **said}
    tenant = tenant_of(span, sender)
    status, error_type = _status(span)
    start = _EPOCH + timedelta(microseconds=span.start_ns // 1000)
    duration_ns = max(0, span.end_ns - span.start_ns)  # a clock that was set back is no negative duration
    consent = semconv.CONSENT.read(both)
    return Call(
        uid=_own_uid(said) or uid_of(tenant, span.trace_id, span.span_id),
        tenant=tenant,
        app=app_of(span, sender),
        process_node=node,
        trace_id=span.trace_id,
        policy_version=_plain(semconv.POLICY_VERSION.read(said)),
        arm=_one_of(Arm, semconv.ARM.read(said)) or Arm.LIVE,
        status=status,
        error_type=error_type,
        request_time=start,
        response_time=start + timedelta(microseconds=duration_ns // 1000),
        duration_ms=duration_ns / 1e6,
        agent_version=_plain(semconv.AGENT_VERSION.read(both)),
        subject=subject_of(span, tenant),
        # Without its content a call cannot be trained on, whatever was consented to.
        consent=whole and consent is not False,
        attributes=_attributes(span, operation, {**more, "content": whole}),
        **fields,
    )


def _attributes(span: Span, operation: Operation, more: Mapping[str, Any]) -> dict[str, Any]:
    said = span.attributes
    first_chunk = semconv.FIRST_CHUNK_SECONDS.read(said)
    prefix = semconv.ROLLOUT
    rollout = {name.removeprefix(prefix): value for name, value in said.items() if name.startswith(prefix)}
    found = {
        "source": semconv.SOURCE,
        "operation": operation.value,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id or None,
        "response_id": _plain(semconv.RESPONSE_ID.read(said)),
        "response_model": _plain(semconv.RESPONSE_MODEL.read(said)),
        "provider": _plain(semconv.PROVIDER.read(said)),
        "instrumentation": _plain(span.source.scope or None),
        "stream": semconv.STREAM.read(said),
        "http_status": semconv.HTTP_STATUS.read(said),
        "first_byte_ms": None if first_chunk is None else max(0.0, first_chunk * 1000),
        "rollout": rollout or None,
        **more,
    }
    return {key: value for key, value in found.items() if value is not None}


def _status(span: Span) -> tuple[CallStatus, str | None]:
    error = semconv.ERROR_TYPE.read(span.attributes)
    raised = (details.get("exception.type") for name, details in span.events if name == "exception")
    error = error or next((kind for kind in raised if isinstance(kind, str)), None)
    status = _one_of(CallStatus, semconv.STATUS.read(span.attributes))
    if status is None:
        status = CallStatus.UPSTREAM_ERROR if span.failed or semconv.ERROR_TYPE.read(span.attributes) else CallStatus.OK
    return (status, None) if status is CallStatus.OK else (status, plain(error or "error"))


def _own_uid(said: Mapping[str, Any]) -> str | None:
    """The uid of a record that another proxy, or this one, has exported."""
    try:
        return str(uuid.UUID(semconv.UID.read(said) or ""))
    except ValueError:
        return None


def _storable(text: str) -> str:
    """Text as it is, but for NUL, which PostgreSQL refuses; JSON has it escaped, a task's text is no JSON."""
    return text.replace("\0", "\ufffd")


def _plain(text: str | None) -> str | None:
    return None if text is None else plain(text)


def _one_of(kind: type[_Enum], said: Any) -> _Enum | None:
    try:
        return kind(said)
    except ValueError:
        return None
