"""Trace requests of OTLP/HTTP, protobuf or JSON, as plain spans (https://opentelemetry.io/docs/specs/otlp/#otlphttp)."""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from noria.contracts.errors import InvalidRecord

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_MAX_DEPTH = 32
"""Lists and objects within each other in one attribute."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a group of spans has in common: its resource and the instrumentation that made it."""

    resource: Mapping[str, Any]
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Ids are hex in lower case, as long as they came; times are nanoseconds since 1970, 0 where unset.

    Values of attributes are what JSON has: bytes become base64 text, a number that is not finite becomes None.
    `cut` is whether the sender dropped attributes or events of it for being too many.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]]
    failed: bool
    cut: bool
    source: Source


def media_type(content_type: str) -> str:
    """`PROTOBUF` or `JSON`, from a Content-Type. Raises `InvalidRecord` for anything else."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in (PROTOBUF, "application/protobuf"):
        return PROTOBUF
    if kind == JSON:
        return JSON
    raise InvalidRecord(
        f"Content-Type {content_type[:80]!r} is neither {PROTOBUF} nor {JSON}, the encodings of OTLP/HTTP"
    )


def spans_of(body: bytes, content_type: str) -> Iterator[Span]:
    """The spans of one decoded request body. Raises `InvalidRecord` if it is no ExportTraceServiceRequest."""
    return _of_json(body) if media_type(content_type) == JSON else _of_protobuf(body)


def _of_protobuf(body: bytes) -> Iterator[Span]:
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise InvalidRecord(f"the body is no ExportTraceServiceRequest in protobuf: {error}") from error
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for scoped in group.scope_spans:
            source = Source(resource, f"{scoped.scope.name} {scoped.scope.version}".strip())
            for span in scoped.spans:
                yield Span(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_span_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    events=[(event.name, _attributes(event.attributes)) for event in span.events],
                    failed=span.status.code == _STATUS_ERROR,
                    cut=bool(span.dropped_attributes_count or span.dropped_events_count),
                    source=source,
                )


_STATUS_ERROR = 2


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value, 0) for pair in pairs}


def _value(value: AnyValue, depth: int) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        _check(depth)
        return [_value(one, depth + 1) for one in value.array_value.values]
    if kind == "kvlist_value":
        _check(depth)
        return {pair.key: _value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "double_value":
        return _finite(value.double_value)
    return None if kind is None or kind == "string_value_strindex" else getattr(value, kind)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _check(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InvalidRecord(f"an attribute is nested deeper than {_MAX_DEPTH} levels")


# JSON, as https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding has it: ids in hex, enums as numbers, 64-bit
# integers as text or numbers, unknown keys ignored.


def _of_json(body: bytes) -> Iterator[Span]:
    try:
        request = orjson.loads(body)
    except ValueError as error:
        raise InvalidRecord(f"the body is no JSON: {error}") from error
    for group in _list(_object(request, "the body"), "resourceSpans"):
        resource = _json_attributes(_object(group.get("resource"), "resource"))
        for scoped in _list(group, "scopeSpans"):
            scope = _object(scoped.get("scope"), "scope")
            source = Source(resource, f"{_text(scope, 'name')} {_text(scope, 'version')}".strip())
            for span in _list(scoped, "spans"):
                yield Span(
                    trace_id=_hex(span, "traceId"),
                    span_id=_hex(span, "spanId"),
                    parent_span_id=_hex(span, "parentSpanId"),
                    start_ns=_whole(span, "startTimeUnixNano"),
                    end_ns=_whole(span, "endTimeUnixNano"),
                    attributes=_json_attributes(span),
                    events=[(_text(event, "name"), _json_attributes(event)) for event in _list(span, "events")],
                    failed=_object(span.get("status"), "status").get("code") in (_STATUS_ERROR, "STATUS_CODE_ERROR"),
                    cut=bool(_whole(span, "droppedAttributesCount") or _whole(span, "droppedEventsCount")),
                    source=source,
                )


def _json_attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {_text(pair, "key"): _json_value(pair.get("value"), 0) for pair in _list(holder, "attributes")}


def _json_value(value: Any, depth: int) -> Any:
    _check(depth)
    for kind, said in _object(value, "an attribute's value").items():
        if kind == "arrayValue":
            return [_json_value(one, depth + 1) for one in _list(_object(said, kind), "values")]
        if kind == "kvlistValue":
            pairs = _list(_object(said, kind), "values")
            return {_text(pair, "key"): _json_value(pair.get("value"), depth + 1) for pair in pairs}
        read = _SCALARS.get(kind)
        if read is not None:
            return read({kind: said}, kind)
    return None


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(what, value, "an object")
    return value


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(key, value, "a list")
    if not all(isinstance(one, dict) for one in value):
        raise _wrong(key, value, "a list of objects")
    return value


def _text(holder: Mapping[str, Any], key: str) -> str:
    value = holder.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(key, value, "text")
    return value or ""


def _hex(holder: Mapping[str, Any], key: str) -> str:
    value = _text(holder, key)
    try:
        return bytes.fromhex(value).hex()
    except ValueError:
        raise _wrong(key, value, "hex digits") from None


def _whole(holder: Mapping[str, Any], key: str) -> int:
    value = holder.get(key)
    if value is None:
        return 0
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(key, value, "a whole number, or its decimal digits as text")


def _number(holder: Mapping[str, Any], key: str) -> float | None:
    value = holder[key]
    if value in ("NaN", "Infinity", "-Infinity"):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(float(value))
    raise _wrong(key, value, "a number")


def _flag(holder: Mapping[str, Any], key: str) -> bool:
    value = holder[key]
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


_SCALARS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "stringValue": _text,
    "intValue": _whole,
    "doubleValue": _number,
    "boolValue": _flag,
    "bytesValue": _text,
}


def _wrong(what: str, value: Any, rule: str) -> InvalidRecord:
    shown = type(value).__name__ if isinstance(value, list | dict) else repr(value)
    return InvalidRecord(f"{what} is {shown[:80]}, and in OTLP's JSON it is {rule}")
