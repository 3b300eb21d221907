"""Retries and fallbacks against real servers on loopback: what is asked again, when, and what the caller is told."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from noria.contracts.call import Arm, CallStatus
from noria.services.proxy.retries import (
    Answered,
    Backoff,
    Connector,
    Sending,
    Unanswered,
    answered,
    told_wait,
)
from noria.services.proxy.routing import Route
from noria.services.proxy.upstreams import Upstream

QUICK = Backoff(first_seconds=0.01, longest_seconds=0.02, longest_told_seconds=0.2)

Step = int | tuple[int, dict[str, str]] | str


@dataclass
class Scripted:
    """A server that goes through a script of statuses, the last for ever; `"close"` closes without an answer."""

    script: list[Step]
    url: str = ""
    times: list[float] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.times.append(time.monotonic())
        self.first.set()
        step = self.script[min(len(self.times), len(self.script)) - 1]
        if isinstance(step, str):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status, headers = step if isinstance(step, tuple) else (step, {})
        return web.Response(status=status, headers=headers, text=f"answer {len(self.times)}")

    @property
    def asked(self) -> int:
        return len(self.times)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Scripted]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(*script: Step) -> Scripted:
            scripted = Scripted(list(script))
            app = web.Application()
            app.router.add_post("/v1/x", scripted.answer)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return scripted

        yield start


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=Connector()) as session:
        yield session


@pytest.fixture
def send(session: aiohttp.ClientSession) -> Any:
    async def send(route: Route, _sending: Sending) -> aiohttp.ClientResponse:
        return await session.post(f"{route.upstream.url}/v1/x", data=b"{}")

    return send


def leg(server: Scripted | str, name: str = "first", retries: int = 0) -> Upstream:
    url = server if isinstance(server, str) else server.url
    return Upstream(name, url, token_ids=False, key=None, is_policy=name == "first", retries=retries)


def route(*upstreams: Upstream, arm: Arm = Arm.LIVE) -> Route:
    return Route(upstreams[0], arm, model="v1" if arm is Arm.CANARY else None, fallbacks=upstreams[1:])


async def told(found: Answered[aiohttp.ClientResponse]) -> tuple[int, str]:
    return found.answer.status, await found.answer.text()


@pytest.mark.parametrize("status", [200, 400, 401, 404, 422, 500, 503])
async def test_without_retries_a_call_is_sent_once(serve: Any, send: Any, status: int) -> None:
    server = await serve(status)
    found = await answered(route(leg(server)), send, QUICK)
    assert await told(found) == (status, "answer 1")
    assert (server.asked, found.attempts, found.attributes(route(leg(server)))) == (1, 1, {})


@pytest.mark.parametrize("failure", [408, 429, 500, 502, 503, 504, 529])
async def test_a_passing_failure_is_asked_again(serve: Any, send: Any, failure: int) -> None:
    server = await serve(failure, failure, 200)
    first = route(leg(server, retries=2))
    found = await answered(first, send, QUICK)
    assert await told(found) == (200, "answer 3")
    assert found.attributes(first) == {"attempts": 3}


async def test_a_server_that_closes_without_an_answer_is_asked_again(serve: Any, send: Any) -> None:
    server = await serve("close", 200)
    found = await answered(route(leg(server, retries=1)), send, QUICK)
    assert await told(found) == (200, "answer 2")


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 501])
async def test_what_is_wrong_with_the_call_is_not_asked_again(serve: Any, send: Any, status: int) -> None:
    server, other = await serve(status), await serve(200)
    found = await answered(route(leg(server, retries=3), leg(other, "second")), send, QUICK)
    assert await told(found) == (status, "answer 1")
    assert (server.asked, other.asked) == (1, 0)


async def test_an_upstream_that_says_not_to_try_again_is_not(serve: Any, send: Any) -> None:
    server = await serve((503, {"x-should-retry": "false"}), 200)
    assert await told(await answered(route(leg(server, retries=3)), send, QUICK)) == (503, "answer 1")


async def test_after_the_last_retry_the_failure_itself_is_passed_on(serve: Any, send: Any) -> None:
    server = await serve(500)
    found = await answered(route(leg(server, retries=2)), send, QUICK)
    assert await told(found) == (500, "answer 3")
    assert server.asked == 3


async def test_fallbacks_are_asked_in_their_order_and_the_record_names_who_answered(serve: Any, send: Any) -> None:
    first, second, third = await serve(503), await serve("close"), await serve(200)
    asked = route(leg(first, retries=1), leg(second, "second", retries=1), leg(third, "third"), arm=Arm.CANARY)
    found = await answered(asked, send, QUICK)
    assert await told(found) == (200, "answer 1")
    assert (first.asked, second.asked, third.asked) == (2, 2, 1)
    assert found.attributes(asked) == {"attempts": 5, "fallback": "third", "assigned_arm": "canary"}
    assert (found.route.arm, found.route.model) == (Arm.LIVE, None)


async def test_where_all_fail_the_last_upstreams_answer_counts(serve: Any, send: Any) -> None:
    first, second = await serve(503), await serve(502)
    found = await answered(route(leg(first), leg(second, "second")), send, QUICK)
    assert await told(found) == (502, "answer 1")
    assert found.route.upstream.name == "second"


async def test_nobody_there_is_unanswered_by_the_last_of_them(send: Any, unused_port: int) -> None:
    nobody = f"http://127.0.0.1:{unused_port}"
    with pytest.raises(Unanswered, match="upstream 'second': ClientConnectorError") as unanswered:
        await answered(route(leg(nobody, retries=1), leg(nobody, "second", retries=1)), send, QUICK)
    assert unanswered.value.attempts == 4
    assert unanswered.value.route.upstream.name == "second"
    assert isinstance(unanswered.value.error, aiohttp.ClientConnectorError)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def test_retry_after_is_waited_for(serve: Any, send: Any) -> None:
    server = await serve((429, {"retry-after-ms": "150", "Retry-After": "60"}), 200)
    found = await answered(route(leg(server, retries=1)), send, QUICK)
    assert await told(found) == (200, "answer 2")
    assert server.times[1] - server.times[0] >= 0.15


async def test_one_that_asks_for_too_long_a_wait_is_left_to_the_caller_or_the_fallback(serve: Any, send: Any) -> None:
    server, other = await serve((429, {"Retry-After": "60"}), 200), await serve(200)
    assert await told(await answered(route(leg(server, retries=3)), send, QUICK)) == (429, "answer 1")
    server.times.clear()
    found = await answered(route(leg(server, retries=3), leg(other, "second")), send, QUICK)
    assert (found.route.upstream.name, server.asked) == ("second", 1)


async def test_a_kept_connection_that_closed_under_the_call_costs_nothing(session: Any, send: Any) -> None:
    """The server answers one call on each connection and closes it when the next one arrives, unread."""
    connections = []

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for attempts in (1, 2, 2):
        found = await answered(route(leg(url)), send, QUICK)
        assert (await told(found), found.attempts) == ((200, "{}"), attempts)
    assert len(connections) == 3
    await session.close()
    server.close()
    await server.wait_closed()


async def test_a_new_connection_that_is_dropped_is_not_sent_twice(serve: Any, send: Any) -> None:
    server = await serve("close", 200)
    with pytest.raises(Unanswered, match="ServerDisconnectedError"):
        await answered(route(leg(server)), send, QUICK)
    assert server.asked == 1


async def test_connections_of_answers_that_are_not_passed_on_go_back(serve: Any, send: Any, session: Any) -> None:
    server = await serve(503, 503, 503, 200)
    found = await answered(route(leg(server, retries=3)), send, QUICK)
    await told(found)
    connector = session.connector
    assert sum(len(kept) for kept in connector._conns.values()) == 1, "four attempts over one connection"


async def test_cancelling_ends_the_wait(serve: Any, send: Any) -> None:
    server = await serve(503)
    slow = Backoff(first_seconds=30, longest_seconds=60)
    task = asyncio.ensure_future(answered(route(leg(server, retries=5)), send, slow))
    await server.first.wait()
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 0.5
    assert server.asked == 1


def test_a_wait_is_read_from_seconds_milliseconds_and_dates() -> None:
    assert told_wait({}) is None
    assert told_wait({"Retry-After": "7"}) == 7.0
    assert told_wait({"Retry-After": "7", "retry-after-ms": "250"}) == 0.25
    later = datetime.now(UTC) + timedelta(seconds=30)
    assert told_wait({"Retry-After": format_datetime(later, usegmt=True)}) == pytest.approx(30, abs=2)
    assert told_wait({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert told_wait({"Retry-After": "-5"}) == 0.0
    for unread in ("soon", "", "nan", "inf"):
        assert told_wait({"Retry-After": unread}) is None


# Through the proxy


async def test_the_caller_of_a_retried_call_sees_one_answer_and_the_store_one_record(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    asked = 0
    done = replies.streaming(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n', b"data: [DONE]\n\n")

    async def reply(request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 1:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        answer: web.StreamResponse = await done(request, body)
        return answer

    live = await start_upstream(reply)
    proxy = await start_proxy({"live": {"url": live.url, "retries": 1}})
    [chunk] = await proxy.stream({"model": "m", "stream": True, "messages": []})
    assert chunk["choices"][0]["delta"]["content"] == "x"
    assert live.bodies[0] == live.bodies[1]
    [call] = await proxy.calls()
    assert (call.attributes["attempts"], call.attributes["http_status"]) == (2, 200)


async def test_once_a_byte_has_gone_out_nothing_is_asked_again(start_upstream: Any, start_proxy: Any) -> None:
    async def dies(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    live, other = await start_upstream(dies), await start_upstream()
    upstreams = {"live": {"url": live.url, "retries": 3, "fallbacks": ["other"]}, "other": other.url}
    proxy = await start_proxy(upstreams)
    body = {"model": "m", "stream": True, "messages": []}
    heard = b""
    with contextlib.suppress(aiohttp.ClientError):
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
            async for piece in answer.content.iter_any():
                heard += piece
    assert b"[DONE]" not in heard
    assert (len(live.bodies), len(other.bodies)) == (1, 0)
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "connection_lost")
