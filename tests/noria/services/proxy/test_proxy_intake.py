import gzip
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from noria.contracts.call import Arm, CallStatus
from noria.contracts.call_json import call_from_json
from noria.contracts.rollout import Directive
from noria.services.proxy.app import SPOOL
from noria.services.proxy.identity import sampled

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def proxy(start_upstream: Any, start_proxy: Any) -> Any:
    upstream = await start_upstream()
    return await start_proxy({"main": upstream.url}, sampling_rate=0.5)


async def post(proxy: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with proxy.session.post(f"{proxy.url}{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def trace_that_is(kept: bool, after: int = 0) -> str:
    return next(t for t in (f"{n:032x}" for n in range(after + 1, after + 100)) if sampled(t, 0.5) is kept)


def next_trace(trace_id: str) -> str:
    return trace_that_is(True, int(trace_id, 16))


async def test_feedback_becomes_a_score_also_of_a_trace_that_is_not_sampled(proxy: Any) -> None:
    for trace_id in (trace_that_is(True), trace_that_is(False)):
        body = {
            "trace_id": trace_id,
            "name": "right_function",
            "value": 1.0,
            "source": "business",
            "scorer": "dispatch-desk",
            "explanation": {"expected": "find_hotel"},
        }
        assert (await post(proxy, "/v1/feedback", body))[0] == 200
        await proxy.app[SPOOL].flushed()
        [score] = proxy.store.scores_of_trace(trace_id)
        assert (score.name, score.value, score.source, score.scorer) == (
            "right_function",
            1.0,
            "business",
            "dispatch-desk",
        )
        assert json.loads(score.explanation) == {"expected": "find_hotel"}


async def test_feedback_about_one_call(proxy: Any) -> None:
    uid = str(uuid.uuid4())
    status, _answer = await post(
        proxy, "/apps/a/nodes/n/v1/feedback", {"call_uid": uid, "name": "liked", "value": 0, "explanation": "meh"}
    )
    assert status == 200
    await proxy.app[SPOOL].flushed()
    [score] = proxy.store.scores_after(0, 10)
    assert (score.target_kind, score.target_id, score.source, score.explanation) == ("call", uid, "user", "meh")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "x", "value": 1}, "trace_id or call_uid"),
        ({"trace_id": TRACE, "call_uid": str(uuid.uuid4()), "name": "x", "value": 1}, "trace_id or call_uid"),
        ({"trace_id": "short", "name": "x", "value": 1}, "'short' is not a W3C trace id"),
        ({"trace_id": "0" * 32, "name": "x", "value": 1}, "trace id"),
        ({"call_uid": "short", "name": "x", "value": 1}, "call_uid"),
        ({"trace_id": TRACE, "name": "", "value": 1}, "name"),
        ({"trace_id": TRACE, "name": "x" * 129, "value": 1}, "128"),
        ({"trace_id": TRACE, "name": "a\0b", "value": 1}, "NUL"),
        ({"trace_id": TRACE, "name": "a\ud800b", "value": 1}, r"not 'a\ud800b'"),
        ({"trace_id": TRACE, "name": "x", "value": float("nan")}, "JSON"),
        ({"trace_id": TRACE, "name": "x", "value": "1"}, "not '1'"),
        ({"trace_id": TRACE, "name": "x", "value": 10**400}, "value"),
        ({"trace_id": TRACE, "name": "x", "value": 1, "explanation": "a\0b"}, "NUL"),
        ({"trace_id": TRACE, "name": "x", "value": 1, "explanation": "a\ud800b"}, "surrogate"),
        ({"trace_id": TRACE, "name": "x", "value": 1, "source": "me"}, "not 'me'"),
        ({"trace_id": TRACE, "name": "x", "value": 1, "vlaue": 1}, "vlaue"),
        ([], "body"),
    ],
)
async def test_feedback_that_cannot_be_kept_says_why(proxy: Any, body: Any, named: str) -> None:
    status, answer = await post(proxy, "/v1/feedback", body)
    assert status == 400
    assert named in answer["error"]["message"]


async def test_an_episode_is_the_end2end_row_of_its_trace(proxy: Any) -> None:
    body = {
        "trace_id": trace_that_is(True),
        "app": "dispatch",
        "request": '{"query": "a hotel"}',
        "response": '{"reply": "found"}',
        "agent_version": "v2",
        "subject": "ann",
        "consent": False,
    }
    status, answer = await post(proxy, "/v1/episodes", body, {"x-noria-app": "other", "x-noria-tenant": "acme"})
    assert (status, answer["recorded"]) == (200, True)
    [call] = await proxy.calls()
    assert (call.target, call.tenant, call.trace_id) == ("dispatch.end2end", "acme", body["trace_id"])
    assert (call.input, call.output, call.model_name) == (body["request"], body["response"], "")
    assert (call.status, call.agent_version, call.consent) == (CallStatus.OK, "v2", False)
    assert call.subject not in (None, "ann")


async def test_an_episode_that_is_sent_again_is_recorded_once(proxy: Any) -> None:
    body = {"trace_id": trace_that_is(True), "request": "a", "response": "b"}
    uids = []
    for _ in range(3):
        async with proxy.session.post(f"{proxy.url}/v1/episodes", json=body) as answer:
            uids.append(answer.headers["x-noria-call-uid"])
    [call] = await proxy.calls()
    assert uids == [call.uid] * 3
    # Another answer of the same trace is another record, and so is an equal one under another key.
    for changed, headers in (
        (body | {"response": "c"}, {}),
        (body | {"tenant": "acme"}, {}),
        (body | {"trace_id": next_trace(body["trace_id"])}, {}),
        (body, {"Idempotency-Key": "one"}),
        (body, {"Idempotency-Key": "one"}),
        (body, {"Idempotency-Key": "two"}),
    ):
        assert (await post(proxy, "/v1/episodes", changed, headers))[0] == 200
    assert len(await proxy.calls()) == 6
    status, answer = await post(proxy, "/v1/episodes", body, {"Idempotency-Key": "k" * 256})
    assert (status, "255" in answer["error"]["message"]) == (400, True)


async def test_an_episode_may_come_compressed_and_not_as_a_bomb(proxy: Any) -> None:
    body = json.dumps({"trace_id": trace_that_is(True), "request": "a"}).encode()
    bomb = json.dumps({"trace_id": trace_that_is(True), "request": "a" * 40_000_000}).encode()
    for sent, status in ((body, 200), (bomb, 413), (b"no gzip", 400)):
        data = sent if sent == b"no gzip" else gzip.compress(sent)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with proxy.session.post(f"{proxy.url}/v1/episodes", data=data, headers=headers) as answer:
            assert answer.status == status
    assert [call.input for call in await proxy.calls()] == ["a"]


@pytest.mark.parametrize("path", ["/v1/feedback", "/v1/episodes", "/noria/v1/keys"])
async def test_a_body_that_cannot_be_read_is_said_to_be_so(start_upstream: Any, start_proxy: Any, path: str) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, max_body_bytes=1000)
    key = {"Authorization": f"Bearer {proxy.config.trainer_key()}"}
    sent: list[tuple[Any, int, str]] = [
        (b'{"request": ', 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b"[" * 999, 400, "not JSON"),
        (b'"' + b"a" * 1000 + b'"', 413, "over 1000 bytes; proxy.max_body_bytes"),
        (in_pieces(b'"' + b"a" * 1000 + b'"'), 413, "over 1000 bytes"),
    ]
    for data, status, named in sent:
        async with proxy.session.post(proxy.url + path, data=data, headers=key) as answer:
            assert answer.status == status
            assert named in (await answer.json())["error"]["message"]


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not said before."""
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


async def test_an_episode_of_a_trace_that_is_not_sampled_is_taken_and_not_recorded(proxy: Any) -> None:
    headers = {"traceparent": f"00-{trace_that_is(False)}-{'1' * 16}-01"}
    status, answer = await post(proxy, "/v1/episodes", {"request": "a", "response": "b"}, headers)
    assert (status, answer["recorded"]) == (200, False)
    assert await proxy.calls() == []


async def test_an_episode_inside_a_rollout_belongs_to_it(proxy: Any) -> None:
    directive = Directive("a.n.r00001", "a" * 32, "b" * 32, "a.n.r00001", 1, 0, 0, 0)
    status, _answer = await post(
        proxy, "/v1/episodes", {"request": "a", "response": "b"}, proxy.directed(directive, "n")
    )
    assert status == 200
    [call] = await proxy.calls()
    assert (call.arm, call.trace_id, call.process_node) == (Arm.ROLLOUT, "b" * 32, "end2end")


@pytest.mark.parametrize(
    "body",
    [
        {"request": "a"},
        {"trace_id": TRACE, "response": "b"},
        {"trace_id": TRACE, "request": "a", "app": "a.b"},
        {"trace_id": TRACE, "request": "a", "tenant": "a/b"},
        {"trace_id": TRACE, "request": "a", "consent": "yes"},
        {"trace_id": TRACE, "request": "a\0"},
        {"trace_id": TRACE, "request": "a", "subject": "\ud800"},
    ],
)
async def test_an_episode_that_cannot_be_kept_is_a_400(proxy: Any, body: Any) -> None:
    assert (await post(proxy, "/v1/episodes", body))[0] == 400


async def test_a_trace_is_read_back_at_once_by_the_holder_of_the_key(proxy: Any) -> None:
    trace_id = trace_that_is(True)
    for content in ("one", "two"):
        await proxy.chat(content, headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"})
    url = f"{proxy.url}/v1/traces/{trace_id}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \u00fc"}):
        async with proxy.session.get(url, headers=headers) as answer:
            assert answer.status == 401
    key = {"Authorization": f"Bearer {proxy.config.trainer_key()}"}
    async with proxy.session.get(url, headers=key) as answer:
        calls = [call_from_json(call) for call in (await answer.json())["calls"]]
    assert calls == proxy.store.trace(trace_id)
    assert len(calls) == 2
    async with proxy.session.get(f"{proxy.url}/v1/traces/{TRACE}", headers=key) as answer:
        assert (await answer.json()) == {"calls": []}
    async with proxy.session.get(f"{proxy.url}/v1/traces/nonsense", headers=key) as answer:
        assert answer.status == 400


async def test_health_and_metrics(proxy: Any) -> None:
    async with proxy.session.get(f"{proxy.url}/healthz") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    await proxy.chat(headers={"x-noria-node": "router"})
    text = await proxy.metrics()
    for line in (
        'noria_calls_total{node="router",status="ok"} 1.0',
        "noria_added_latency_seconds_count 1.0",
        "noria_time_to_first_byte_seconds_count 1.0",
        "noria_unrecorded_total 0.0",
    ):
        assert line in text
    assert "noria_spool_bytes" in text
    assert "noria_spool_records" in text


async def test_what_the_spool_cannot_take_is_said_to_the_reporter_but_not_to_the_agent(
    start_upstream: Any, start_proxy: Any
) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, spool_max_bytes=1)
    assert (await proxy.chat())[0] == 200
    assert (await post(proxy, "/v1/feedback", {"trace_id": TRACE, "name": "x", "value": 1}))[0] == 503
    assert "noria_unrecorded_total 2.0" in await proxy.metrics()
