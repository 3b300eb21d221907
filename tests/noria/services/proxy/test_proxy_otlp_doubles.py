"""The same call, seen twice: by the proxy that passed it on, and by the agent that reports its spans."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from noria.contracts.call import Call
from noria.services.proxy.otlp_doubles import without_doubles

PROTOBUF, JSON = "application/x-protobuf", "application/json"


@pytest.fixture
def of_proxy(make_call: Callable[..., Call]) -> Call:
    return make_call(tenant="acme", trace_id="1" * 32, output='{"id":"c1","choices":[]}')


@pytest.fixture
def of_span(of_proxy: Call) -> Call:
    start = of_proxy.request_time - timedelta(milliseconds=5)
    end = of_proxy.response_time + timedelta(milliseconds=5)
    attributes = {"source": "otlp", "response_id": "c1", "span_id": "b7ad6b7169203331"}
    return replace(of_proxy, uid=str(uuid.uuid4()), request_time=start, response_time=end, attributes=attributes)


@dataclass
class Stored:
    """What a store would give for a trace, and which traces it was asked for."""

    calls: tuple[Call, ...] = ()
    asked: list[tuple[str, str]] = field(default_factory=list)

    def trace(self, trace_id: str, tenant: str) -> list[Call]:
        self.asked.append((trace_id, tenant))
        return [call for call in self.calls if (call.trace_id, call.tenant) == (trace_id, tenant)]


def test_a_span_of_a_call_that_the_proxy_recorded_is_left_out(of_proxy: Call, of_span: Call) -> None:
    assert without_doubles([of_span], Stored((of_proxy,)).trace) == []
    assert without_doubles([of_proxy, of_span], Stored().trace) == [of_proxy]


def test_calls_of_the_proxy_ask_the_store_nothing(of_proxy: Call, make_call: Callable[..., Call]) -> None:
    stored = Stored((of_proxy,))
    without_id = make_call(attributes={"source": "otlp"})
    assert without_doubles([of_proxy, of_proxy, without_id], stored.trace) == [of_proxy, of_proxy, without_id]
    assert stored.asked == []


def test_a_trace_is_asked_for_once(of_span: Call) -> None:
    stored = Stored()
    others = [
        replace(of_span, uid=str(uuid.uuid4()), attributes={"source": "otlp", "response_id": f"d{n}"}) for n in range(5)
    ]
    assert without_doubles([of_span, *others], stored.trace) == [of_span, *others]
    assert stored.asked == [(of_span.trace_id, "acme")]


def test_another_trace_tenant_or_response_is_another_call(of_proxy: Call, of_span: Call) -> None:
    for changes in ({"trace_id": "2" * 32}, {"tenant": "other"}, {"output": '{"id":"c2"}'}, {"output": "null"}):
        other = replace(of_proxy, **changes)
        assert without_doubles([other, of_span], Stored().trace) == [other, of_span]


def test_of_two_instrumentations_of_one_call_the_inner_is_kept(of_span: Call) -> None:
    inner = replace(
        of_span,
        uid=str(uuid.uuid4()),
        request_time=of_span.request_time + timedelta(milliseconds=1),
        response_time=of_span.response_time - timedelta(milliseconds=1),
    )
    assert without_doubles([inner, of_span], Stored().trace) == [inner]


def test_an_upstream_that_gives_every_call_one_id_loses_none(of_span: Call) -> None:
    later = [
        replace(
            of_span,
            uid=str(uuid.uuid4()),
            request_time=of_span.request_time + timedelta(seconds=n),
            response_time=of_span.response_time + timedelta(seconds=n),
        )
        for n in range(3)
    ]
    assert without_doubles(later, Stored().trace) == later


def test_the_same_span_once_more_is_left_to_the_store(of_span: Call) -> None:
    assert without_doubles([of_span], Stored((of_span,)).trace) == [of_span]
