"""Bodies of OTLP requests, whole and damaged: read, or refused in a sentence."""

import gzip
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from noria.contracts.call import Call
from noria.contracts.errors import InvalidRecord
from noria.services.proxy.otlp import calls_of
from noria.services.proxy.otlp_request import spans_of
from noria.services.proxy.refusal import TooLarge
from tests.noria.services.proxy.otlp_cases import CHAT, JSON, PROTOBUF, RECORDINGS, as_json, body_of

TREE = json.loads(as_json(body_of(CHAT)))


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    tree = json.loads(json.dumps(TREE))
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(tree).encode()


SPAN = ("resourceSpans", 0, "scopeSpans", 0, "spans", 0)
VALUE = (*SPAN, "attributes", 0, "value")
MALFORMED: list[tuple[str, bytes, str, str, str]] = [
    ("protobuf that is none", b"\xff\xff\xff", PROTOBUF, "", "no ExportTraceServiceRequest"),
    ("JSON that is none", b"{", JSON, "", "no JSON"),
    ("a list", b"[]", JSON, "", "an object"),
    ("spans that are no list", changed(SPAN[:-1], {}), JSON, "", "spans"),
    ("a span that is no object", changed(SPAN, 7), JSON, "", "spans"),
    ("an id that is no hex", changed((*SPAN, "traceId"), "xyz"), JSON, "", "traceId"),
    ("a time that is no number", changed((*SPAN, "startTimeUnixNano"), "noon"), JSON, "", "startTimeUnixNano"),
    ("attributes that are an object", changed((*SPAN, "attributes"), {"a": 1}), JSON, "", "attributes"),
    (
        "a text that is a number",
        changed(VALUE, {"stringValue": 7}),
        JSON,
        "",
        "stringValue",
    ),
    ("gzip that is none", body_of(CHAT), PROTOBUF, "gzip", "gzip"),
    ("gzip that is cut off", gzip.compress(body_of(CHAT))[:-9], PROTOBUF, "gzip", "gzip"),
    ("an unknown coding", body_of(CHAT), PROTOBUF, "lzma", "lzma"),
    ("another content type", body_of(CHAT), "text/plain", "", "text/plain"),
    ("no content type", body_of(CHAT), "", "", PROTOBUF),
]


@pytest.mark.parametrize(("what", "body", "kind", "coding", "said"), MALFORMED, ids=[row[0] for row in MALFORMED])
def test_what_is_malformed_is_told_in_a_sentence(what: str, body: bytes, kind: str, coding: str, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said):
        calls_of(body, kind, coding, tenant="acme", app="default")


def test_a_bomb_stops_at_the_limit() -> None:
    with pytest.raises(TooLarge):
        calls_of(gzip.compress(bytes(50_000_000)), PROTOBUF, "gzip", tenant="acme", app="default", limit=1_000_000)


def test_unknown_fields_and_values_of_other_kinds_are_no_fault() -> None:
    tree = json.loads(json.dumps(TREE))
    [group] = tree["resourceSpans"]
    span = group["scopeSpans"][0]["spans"][0]
    span.update({"novelty": 1, "flags": 257, "kind": "SPAN_KIND_CLIENT"})
    span["startTimeUnixNano"] = int(span["startTimeUnixNano"])  # 64-bit integers may be numbers too
    span["attributes"] += [
        {"key": "bytes", "value": {"bytesValue": "AAE="}},
        {"key": "nan", "value": {"doubleValue": "NaN"}},
        {"key": "none", "value": {}},
        {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "1"}, {"boolValue": True}]}}},
        {"key": "object", "value": {"kvlistValue": {"values": [{"key": "a", "value": {"doubleValue": 0.5}}]}}},
    ]
    body = json.dumps(tree).encode()
    [read, _root] = spans_of(body, JSON)
    assert {name: read.attributes[name] for name in ("bytes", "nan", "none", "list", "object")} == {
        "bytes": "AAE=", "nan": None, "none": None, "list": [1, True], "object": {"a": 0.5}
    }  # fmt: skip
    assert len(calls_of(body, JSON, "", tenant="acme", app="default")) == 1


def test_protobuf_has_the_same_values() -> None:
    request = ExportTraceServiceRequest.FromString(body_of(CHAT))
    span = request.resource_spans[0].scope_spans[0].spans[0]
    for name, kind, value in (("bytes", "bytes_value", b"\0\1"), ("nan", "double_value", float("nan"))):
        setattr(span.attributes.add(key=name).value, kind, value)
    [read, _root] = spans_of(request.SerializeToString(), PROTOBUF)
    assert (read.attributes["bytes"], read.attributes["nan"]) == ("AAE=", None)


def read_or_refused(body: bytes, kind: str, coding: str = "") -> list[Call]:
    """The calls in it, none for a body that is refused; any other exception goes on."""
    try:
        return calls_of(body, kind, coding, tenant="acme", app="default")
    except InvalidRecord:
        return []


@given(
    st.binary(max_size=200),
    st.sampled_from([PROTOBUF, JSON, "application/json; charset=utf-8", "text/plain", ""]),
    st.sampled_from(["", "gzip", "deflate", "br", "zstd", "identity", "lzma", "gzip, gzip"]),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_list_of_calls_or_an_invalid_record(body: bytes, kind: str, coding: str) -> None:
    assert isinstance(read_or_refused(body, kind, coding), list)


BODIES = [path.read_bytes() for path in sorted(RECORDINGS.iterdir())]
PROTOBUF_BODY = body_of(CHAT, CHAT)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_request_that_was_damaged_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    body, kind = data.draw(st.sampled_from([(PROTOBUF_BODY, PROTOBUF), *((body, JSON) for body in BODIES)]))
    start = data.draw(st.integers(0, len(body) - 1))
    end = data.draw(st.integers(start, min(len(body), start + 40)))
    damaged = body[:start] + data.draw(st.binary(max_size=8)) + body[end:]
    for call in read_or_refused(damaged, kind):
        json.loads(call.input)
        assert call.tenant == "acme"


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["resourceSpans", "resource", "scopeSpans", "scope", "spans", "attributes", "key", "value",
                         "stringValue", "intValue", "arrayValue", "kvlistValue", "values", "traceId", "events", "name",
                         "startTimeUnixNano", "status", "code", "version", "droppedEventsCount"]),
        inner, max_size=4,
    ),
    max_leaves=15,
)  # fmt: skip


@given(trees, st.sampled_from([(), ("resourceSpans",), SPAN, (*SPAN, "attributes"), VALUE]))
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_list_of_calls_or_an_invalid_record(tree: Any, path: tuple[Any, ...]) -> None:
    body = changed(path, tree) if path else json.dumps(tree).encode()
    read_or_refused(body, JSON)


def test_an_attribute_that_is_too_deep_is_refused() -> None:
    value: dict[str, Any] = {"stringValue": "x"}
    for _ in range(300):
        value = {"arrayValue": {"values": [value]}}
    with pytest.raises(InvalidRecord, match="deeper"):
        calls_of(changed(VALUE, value), JSON, "", tenant="acme", app="default")
