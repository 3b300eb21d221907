"""The driver against a scripted agent and a scripted proxy on loopback that speak the wire formats."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from noria.contracts.call import Arm, Call, CallStatus, CallTokens
from noria.contracts.call_json import call_to_json
from noria.contracts.errors import AgentUnavailable, PolicyUnavailable, StationFailed
from noria.contracts.rollout import Directive
from noria.contracts.trajectory import Trajectory
from noria.rollout.directive import read
from noria.rollout.driver import RolloutPlan, rollout_seed, run_rollouts

KEY = "a trainer's key that is long enough for HS256"
ROUND = "dispatch.router.r00003"
VERSION = "dispatch.router.r00002"

Answer = Callable[["World", Directive, web.Request], Awaitable[web.StreamResponse]]


def _call(directive: Directive, node: str, content: str, k: int, **changes: Any) -> Call:
    now = datetime(2025, 1, 1, 0, 0, k, tzinfo=UTC)
    values: dict[str, Any] = {
        "uid": f"{directive.trace_id}-{k}",
        "id": k + 1,
        "tenant": "default",
        "app": "dispatch",
        "process_node": node,
        "trace_id": directive.trace_id,
        "model_name": "base",
        "policy_version": VERSION if node == "router" else None,
        "arm": Arm.ROLLOUT,
        "input": json.dumps({"messages": [{"role": "user", "content": f"question {k}"}]}),
        "output": json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}),
        "status": CallStatus.OK,
        "request_time": now,
        "response_time": now,
        "duration_ms": 1.0,
        "agent_version": "agent-7",
        "tokens": CallTokens((1, 2), (3,), (-0.5,)) if node == "router" else None,
        "attributes": {} if node == "router" else {"pinned": "exact"},
    }
    return Call(**{**values, **changes})


@dataclass
class World:
    """What the scripted servers have seen, and how they answer."""

    answer: Answer
    directives: list[Directive] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0
    proxy_failures: int = 0
    agent_url: str = ""
    proxy_url: str = ""

    async def rollout(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body.keys() == {"originRequest", "trainMeta"}
        directive = read(body["trainMeta"], KEY)
        self.directives.append(directive)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.answer(self, directive, request)
        finally:
            self.in_flight -= 1

    async def traces(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "not the trainer's key"}}, status=401)
        if self.proxy_failures:
            self.proxy_failures -= 1
            return web.json_response({"error": {"message": "starting"}}, status=503)
        calls = self.calls.get(request.match_info["trace_id"], [])
        return web.json_response({"calls": [call_to_json(call) for call in calls]})


@contextlib.asynccontextmanager
async def world(answer: Answer) -> AsyncIterator[World]:
    scripted = World(answer)
    agent, proxy = web.Application(), web.Application()
    agent.router.add_post("/rollout", scripted.rollout)
    proxy.router.add_get("/v1/traces/{trace_id}", scripted.traces)
    async with TestServer(agent) as agent_server, TestServer(proxy) as proxy_server:
        scripted.agent_url = str(agent_server.make_url("/"))
        scripted.proxy_url = str(proxy_server.make_url("/"))
        yield scripted


async def good(scripted: World, directive: Directive, request: web.Request) -> web.Response:
    await asyncio.sleep(0.005)
    scripted.calls[directive.trace_id] = [
        _call(directive, "router", '{"name": "get_weather"}', 0),
        _call(directive, "reply", "It rains.", 1),
    ]
    return web.json_response({"originResponse": '{"reply": "It rains."}'})


def plans(samples: int = 2, group_size: int = 3) -> list[RolloutPlan]:
    return [
        RolloutPlan(
            round=ROUND,
            sample_id=100 + sample,
            group=sample,
            member=member,
            origin_trace_id=f"{sample:032x}",
            origin_request=json.dumps({"query": f"question {sample}"}),
            reference={"right_function": {"value": 1.0, "explanation": {"expected": "get_weather"}}},
            seed=rollout_seed(7, ROUND, 100 + sample, member),
        )
        for sample in range(samples)
        for member in range(group_size)
    ]


async def drive(scripted: World, todo: list[RolloutPlan], **changes: Any) -> list[Trajectory]:
    made: list[Trajectory] = []
    changes.setdefault("on_trajectory", made.append)
    settings: dict[str, Any] = {
        "agent_url": scripted.agent_url,
        "proxy_url": scripted.proxy_url,
        "trainer_key": KEY,
        "policy_version": VERSION,
        "temperature": 0.8,
        "concurrency": 4,
        "timeout_seconds": 5.0,
    }
    await run_rollouts(todo, **{**settings, **changes})
    return made


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def test_each_plan_becomes_one_trajectory() -> None:
    todo, seen = plans(4, 4), []
    async with world(good) as scripted:
        made = await drive(scripted, todo, progress=lambda done, of: seen.append((done, of)))
    assert {(t.sample_id, t.group, t.member, t.seed) for t in made} == {
        (p.sample_id, p.group, p.member, p.seed) for p in todo
    }
    assert all(t.error is None and not t.diverged and not t.truncated for t in made)
    assert len({t.trace_id for t in made}) == 16
    first = made[0]
    assert [step.node for step in first.steps] == ["router", "reply"]
    assert first.steps[0].sampled
    assert first.steps[0].tokens == CallTokens((1, 2), (3,), (-0.5,))
    assert first.steps[1].pinned == "exact"
    assert first.origin_response == '{"reply": "It rains."}'
    assert first.agent_version == "agent-7"
    assert first.policy_version == VERSION
    assert first.duration_ms > 0
    assert seen == [(n, 16) for n in range(1, 17)]
    assert 1 < scripted.most_in_flight <= 4


async def test_the_directive_says_where_the_rollout_belongs() -> None:
    todo = plans(1, 1)
    async with world(good) as scripted:
        made = await drive(scripted, todo)
    (directive,) = scripted.directives
    assert directive == Directive(
        model=VERSION,
        invariant=todo[0].origin_trace_id,
        trace_id=made[0].trace_id,
        round=ROUND,
        sample_id=100,
        group=0,
        member=0,
        seed=todo[0].seed,
        temperature=0.8,
    )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"originResponse": "fine"}', 500, "status 500, not 200"),
        (b"<html>Bad gateway</html>", 502, "<html>Bad gateway</html>"),
        (b"not json", 200, "'not json'"),
        (b'{"answer": "fine"}', 200, '{"originResponse": string}'),
        (b'{"originResponse": {"a": 1}}', 200, '{"originResponse": string}'),
        (b"[" * 100_000, 200, "the body is not"),
        (b"\xff\xfe", 200, "the body is not"),
    ],
)
async def test_nonsense_of_the_agent_is_told(body: bytes, status: int, said: str) -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        await good(scripted, directive, request)
        return web.Response(body=body, status=status)

    async with world(answer) as scripted:
        (made,) = await drive(scripted, plans(1, 1))
    assert made.error is not None
    assert said in made.error
    assert f"POST {scripted.agent_url}rollout" in made.error
    assert len(made.error) < 500
    assert len(made.steps) == 2, "what it did is kept for reading"


async def test_a_slow_agent_is_told_and_not_asked_again() -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        if directive.member == 1:
            await asyncio.sleep(30)
        return await good(scripted, directive, request)

    async with world(answer) as scripted:
        made = await drive(scripted, plans(1, 3), timeout_seconds=0.3)
        assert len(scripted.directives) == 3
    errors = {t.member: t.error for t in made}
    assert "no answer within 0.3 s" in str(errors.pop(1))
    assert errors == {0: None, 2: None}


async def test_a_connection_that_breaks_is_not_tried_again() -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with world(answer) as scripted:
        (made,) = await drive(scripted, plans(1, 1))
        assert len(scripted.directives) == 1
    assert "the connection broke" in str(made.error)


async def test_an_agent_that_starts_late_is_waited_for() -> None:
    port = free_port()
    async with world(good) as scripted:
        late = web.Application()
        late.router.add_post("/rollout", scripted.rollout)
        server = TestServer(late, port=port)

        async def start_late() -> None:
            await asyncio.sleep(0.05)
            await server.start_server()

        starting = asyncio.ensure_future(start_late())
        (made,) = await drive(scripted, plans(1, 1), agent_url=f"http://127.0.0.1:{port}")
        await starting
        await server.close()
    assert made.error is None


async def test_an_agent_that_is_down_ends_the_run_early() -> None:
    made: list[Trajectory] = []
    async with world(good) as scripted:
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(AgentUnavailable, match=r"\[agent\] url") as caught:
            await drive(scripted, plans(20, 4), agent_url=url, on_trajectory=made.append)
    assert url in str(caught.value)
    assert 8 <= len(made) < 16
    assert all("cannot connect" in str(t.error) for t in made)


async def test_an_agent_that_only_errs_ends_the_run_early() -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        return web.Response(status=500, text="KeyError: 'query'")

    made: list[Trajectory] = []
    async with world(answer) as scripted:
        with pytest.raises(AgentUnavailable, match="KeyError"):
            await drive(scripted, plans(20, 4), on_trajectory=made.append)
    assert 8 <= len(made) < 16


async def test_one_sample_that_the_agent_cannot_take_ends_nothing() -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        if directive.sample_id == 100:
            return web.Response(status=500)
        return await good(scripted, directive, request)

    async with world(answer) as scripted:
        made = await drive(scripted, plans(2, 12))
    assert sum(t.error is not None for t in made) == 12


async def test_what_was_done_before_the_policy_died_stays() -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        if directive.sample_id < 102:
            return await good(scripted, directive, request)
        failed = {"status": CallStatus.UPSTREAM_ERROR, "error_type": "http_500", "output": "boom", "tokens": None}
        scripted.calls[directive.trace_id] = [_call(directive, "router", "", 0, **failed)]
        return web.Response(status=502, text="the model call failed")

    made: list[Trajectory] = []
    async with world(answer) as scripted:
        with pytest.raises(PolicyUnavailable, match=r"\[policy\] port") as caught:
            await drive(scripted, plans(20, 4), on_trajectory=made.append)
    assert VERSION in str(caught.value)
    assert "http_500" in str(caught.value)
    assert sum(t.error is None for t in made) == 8
    done = {(t.sample_id, t.member) for t in made if t.error is None}
    todo = [plan for plan in plans(20, 4) if (plan.sample_id, plan.member) not in done]
    async with world(good) as scripted:
        again = await drive(scripted, todo)
    assert len(again) == 72
    assert all(t.error is None for t in again)


async def test_the_wrong_key_is_told_at_once() -> None:
    async def answer(scripted: World, directive: Directive, request: web.Request) -> web.Response:
        return web.json_response({"originResponse": ""})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "not the trainer's key"}}, status=401)

    async with world(answer) as scripted:
        app = web.Application()
        app.router.add_get("/v1/traces/{trace_id}", refuse)
        async with TestServer(app) as other:
            with pytest.raises(StationFailed, match="NORIA_TRAINER_KEY"):
                await drive(scripted, plans(5, 4), proxy_url=str(other.make_url("/")))


async def test_reading_the_records_is_tried_again() -> None:
    async with world(good) as scripted:
        scripted.proxy_failures = 2
        (made,) = await drive(scripted, plans(1, 1))
    assert made.error is None


async def test_what_on_trajectory_raises_comes_through() -> None:
    def full(_: Trajectory) -> None:
        raise OSError("no space left on device")

    async with world(good) as scripted:
        with pytest.raises(OSError, match="no space left"):
            await drive(scripted, plans(4, 4), on_trajectory=full)


async def test_no_plans_need_no_agent() -> None:
    async with world(good) as scripted:
        assert await drive(scripted, [], agent_url="http://127.0.0.1:9") == []


def test_seeds_depend_on_everything_and_on_nothing_else() -> None:
    seeds = {
        rollout_seed(run, key, sample, member)
        for run in (0, 1)
        for key in (ROUND, VERSION)
        for sample in (1, 11)
        for member in range(8)
    }
    assert len(seeds) == 64
    assert all(0 <= seed < 2**48 for seed in seeds)
    assert rollout_seed(0, ROUND, 1, 2) == 266_991_900_320_146, "seeds of a recorded round never change"
