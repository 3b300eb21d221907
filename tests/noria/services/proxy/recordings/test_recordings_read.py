"""Every recorded call to a model API, made into a record and compared with another reading of its cassette."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from noria.contracts.call import CallStatus
from noria.services.proxy.exchange import Ending, Exchange, Kind
from noria.services.proxy.wire.replay import replay
from noria.services.proxy.wire.to_call import to_call
from tests.recordings.cassettes import Recorded
from tests.recordings.check import check_record
from tests.recordings.reading import said_on_wire

pytestmark = pytest.mark.recordings


def test_the_cassettes_hold_what_they_are_known_to_hold(recordings: list[Recorded], report: Any) -> None:
    packages: dict[str, Counter[str]] = {}
    others: Counter[str] = Counter()
    for recorded in recordings:
        if recorded.kind is None:
            others[f"{recorded.host} {recorded.path.rpartition('/')[2].rpartition(':')[2][:24]}"] += 1
        else:
            packages.setdefault(recorded.source.partition("-")[0].partition("_")[0], Counter()).update(shapes(recorded))
    for package, counts in packages.items():
        report(package, counts)
    report("of no API that the proxy records", others)
    assert others.total() == 405
    assert packages == {
        "crewai": {
            "chat.completions": 956,
            "chat.completions streamed": 35,
            "chat.completions with tools": 203,
            "chat.completions with parallel calls": 19,
            "chat.completions with images": 53,
            "chat.completions with an error": 14,
            "messages": 99,
            "messages streamed": 4,
            "messages with tools": 40,
            "messages with parallel calls": 2,
            "messages with images": 13,
            "responses": 38,
            "responses streamed": 1,
            "responses with tools": 5,
            "embeddings": 41,
        },
        "opentelemetry": {
            "chat.completions": 39,
            "chat.completions streamed": 13,
            "chat.completions with tools": 8,
            "chat.completions with parallel calls": 8,
            "chat.completions with an error": 2,
            "chat.completions with n > 1": 4,
            "embeddings": 15,
            "embeddings with an error": 2,
        },
    }


def shapes(recorded: Recorded) -> Iterator[str]:
    """What a call is counted as."""
    assert recorded.kind is not None
    asked = json.loads(recorded.request)
    yield recorded.kind.value
    if recorded.status >= 300:
        yield f"{recorded.kind} with an error"
    else:
        said = said_on_wire(recorded)
        if len(said.reasons) > 1:
            yield f"{recorded.kind} with n > 1"
        elif len(said.calls) > 1:
            yield f"{recorded.kind} with parallel calls"
    if recorded.streamed:
        yield f"{recorded.kind} streamed"
    if asked.get("tools"):
        yield f"{recorded.kind} with tools"
    contents = [message.get("content") for message in asked.get("messages", ())]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part.get("type") in ("image_url", "image") for part in parts):
        yield f"{recorded.kind} with images"


def test_every_recorded_call_becomes_the_record_that_its_cassette_says(recordings: list[Recorded], report: Any) -> None:
    checked: Counter[str] = Counter()
    for recorded in recordings:
        if recorded.kind is not None:
            check_record(recorded, to_call(exchange(recorded)))
            checked[f"{recorded.kind} {'streamed' if recorded.streamed else 'unstreamed'}"] += 1
    report("records compared", checked)
    assert sum(checked.values()) == 1188


def test_every_recorded_answer_can_be_replayed_in_both_shapes(recordings: list[Recorded], report: Any) -> None:
    replayed: Counter[str] = Counter()
    for recorded in recordings:
        if recorded.kind in (None, Kind.EMBEDDING) or recorded.status >= 300:
            continue
        call = to_call(exchange(recorded))
        wants = {"return_token_ids": True, "logprobs": True}
        plain = replay(recorded.kind, call.output, wants)
        assert plain.body == call.output.encode()
        streamed = replay(
            recorded.kind, call.output, {"stream": True, "stream_options": {"include_usage": True}, **wants}
        )
        body = b"".join(streamed.events or ())
        again = to_call(exchange(recorded, response=body, content_type=streamed.content_type, content_encoding=""))
        assert again.status is CallStatus.OK, recorded.source
        expected = json.loads(call.output)
        for choice in expected.get("choices", ()):  # one upstream leaves it out
            choice.setdefault("finish_reason", None)
        assert json.loads(again.output) == expected, recorded.source
        assert again.usage == call.usage
        replayed[recorded.kind.value] += 1
    report("answers replayed", replayed)


def exchange(recorded: Recorded, **changes: Any) -> Exchange:
    now = datetime.now(UTC)
    assert recorded.kind is not None
    fixed: dict[str, Any] = {
        "response": recorded.body,
        "content_type": recorded.content_type,
        "content_encoding": recorded.content_encoding,
    }
    return Exchange(
        uid="u",
        kind=recorded.kind,
        ending=Ending.WHOLE,
        tenant="t",
        app="a",
        process_node="n",
        trace_id="1" * 32,
        request_time=now,
        response_time=now,
        duration_ms=1.0,
        request=recorded.request,
        http_status=recorded.status,
        **{**fixed, **changes},
    )
