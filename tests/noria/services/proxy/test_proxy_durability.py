"""What a client has received is in the store exactly once, whatever is killed: `bench.durability` at small scale."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.calls import completion
from bench.durability import Plan, Trial
from bench.durability_check import compare
from bench.durability_clients import content_of, request_of
from noria.contracts.call import Call, CallStatus

pytestmark = pytest.mark.timeout(120)


def test_a_proxy_killed_under_load_loses_no_call_and_stores_none_twice(tmp_path: Path) -> None:
    plan = Plan(calls=1500, kills=2, connections=16, warm_up_calls=200)
    report = Trial(plan, tmp_path, progress=False).run()
    assert report.violations == []
    assert report.kills == 2
    assert report.broken > 0, "the kills met no call in flight"
    assert report.delivered >= 1700
    assert report.streams > 300
    assert report.verdict.stored == report.delivered + report.verdict.undelivered


def test_a_proxy_killed_while_postgresql_is_stopped_answers_on_and_loses_no_call(tmp_path: Path) -> None:
    plan = Plan(calls=1200, kills=1, outage_seconds=2.0, store="postgresql", connections=16, warm_up_calls=200, seed=0)
    [kill] = plan.kill_points()
    assert kill > plan.calls / 2, "the proxy is to be killed, and to start again, while the database is stopped"
    report = Trial(plan, tmp_path, progress=False).run()
    assert report.violations == []
    assert report.kills == 1
    assert report.delivered_in_outage > 100
    assert report.verdict.stored == report.delivered + report.verdict.undelivered


@pytest.fixture
def stored(make_call: Callable[..., Call]) -> Callable[[int], Call]:
    """The row of the call of a number, as it should be."""

    def make(number: int, **changes: object) -> Call:
        row = {"input": request_of(number).decode(), "output": completion("m", content_of(number)).decode()}
        return make_call(**{"uid": f"u{number}", **row, **changes})

    return make


def test_the_comparison_accepts_what_is_whole_and_what_did_not_reach_its_client(stored: Callable[..., Call]) -> None:
    verdict = compare({"u1": 1, "u3": 3}, sent=4, calls=[stored(1), stored(2), stored(3)])
    assert verdict.violations() == []
    assert (verdict.stored, verdict.undelivered) == (3, 1)


@pytest.mark.parametrize(
    ("rows", "offence"),
    [
        ([(1, {})], "1 delivered calls are not in the store, first u2"),
        ([(1, {}), (2, {}), (2, {})], "1 calls are in the store twice, first u2"),
        ([(1, {}), (2, {}), (2, {"uid": "other"})], "1 calls are in the store twice, first other"),
        ([(1, {}), (2, {"output": "{}"})], "1 calls are in the store otherwise than they were, first u2"),
        ([(1, {}), (2, {"status": CallStatus.CLIENT_DISCONNECT})], "otherwise than they were, first u2"),
        ([(1, {}), (2, {"input": json.dumps({"messages": []})})], "otherwise than they were, first u2"),
        ([(1, {}), (2, {}), (9, {})], "otherwise than they were, first u9"),
    ],
    ids=["missing", "twice", "twice_by_content", "answer", "status", "request", "never_sent"],
)
def test_the_comparison_names_what_is_wrong(
    stored: Callable[..., Call], rows: list[tuple[int, dict[str, object]]], offence: str
) -> None:
    verdict = compare({"u1": 1, "u2": 2}, sent=4, calls=[stored(number, **changes) for number, changes in rows])
    assert any(offence in violation for violation in verdict.violations())
