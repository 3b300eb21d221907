"""Limits on calls, on the head of a request and on its body; and what is no HTTP at all."""

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noria.config_services import ProxyConfig
from noria.contracts.access import Scope
from noria.services.proxy.access import ANYONE, Caller
from noria.services.proxy.limits import WINDOW_SECONDS, Limits
from noria.services.proxy.refusal import TooMany
from noria.services.proxy.runner import ProxyRunner, only

ONE = Caller("key_1", "acme", frozenset(Scope))
TWO = Caller("key_2", "acme", frozenset(Scope))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock | None = None, **proxy: Any) -> Limits:
    return Limits(ProxyConfig(**proxy), clock or Clock())


def test_calls_in_flight_of_all_callers_together() -> None:
    counted = limits(max_concurrent_calls=2)
    with counted.admit(ANYONE), counted.admit(ONE):
        assert counted.in_flight == 2
        for caller in (ANYONE, ONE, TWO):
            with (
                pytest.raises(TooMany, match=r"2 calls.*proxy.max_concurrent_calls is 2") as caught,
                counted.admit(caller),
            ):
                pass
            assert caught.value.retry_after >= 1
    with counted.admit(TWO):
        assert counted.in_flight == 1


def test_calls_in_flight_of_one_key() -> None:
    counted = limits(max_concurrent_calls_per_key=1)
    with counted.admit(ONE), counted.admit(TWO), counted.admit(ANYONE), counted.admit(ANYONE):  # noqa: SIM117
        with pytest.raises(TooMany, match="key_1 has 1 calls in flight"), counted.admit(ONE):
            pass
    with counted.admit(ONE):
        pass


def test_a_call_that_fails_or_is_cancelled_is_counted_out() -> None:
    counted = limits(max_concurrent_calls=1, max_concurrent_calls_per_key=1)
    for error in (ValueError, asyncio.CancelledError, ConnectionError):
        with pytest.raises(error), counted.admit(ONE):
            raise error
    assert counted.in_flight == 0
    with counted.admit(ONE):
        pass


def test_calls_of_one_key_in_a_minute() -> None:
    clock = Clock()
    counted = limits(clock, calls_per_minute_per_key=3)
    for _ in range(3):
        with counted.admit(ONE):
            clock.now += 1
    with pytest.raises(TooMany, match=r"key_1 has made 3 calls.*is 3") as caught, counted.admit(ONE):
        pass
    assert caught.value.retry_after == pytest.approx(57)
    with counted.admit(TWO), counted.admit(ANYONE):
        pass
    clock.now += caught.value.retry_after
    with counted.admit(ONE):
        pass
    with pytest.raises(TooMany), counted.admit(ONE):
        pass


def test_a_refused_call_counts_for_nothing() -> None:
    clock = Clock()
    counted = limits(clock, calls_per_minute_per_key=2, max_concurrent_calls_per_key=1)
    with counted.admit(ONE):
        for _ in range(5):
            with pytest.raises(TooMany, match="in flight"), counted.admit(ONE):
                pass
    with counted.admit(ONE):
        pass
    with pytest.raises(TooMany, match="last minute"), counted.admit(ONE):
        pass
    assert counted.in_flight == 0


@given(st.lists(st.floats(0, 40), max_size=60), st.integers(1, 5))
def test_never_more_calls_in_any_minute_and_told_the_very_time_to_wait(pauses: list[float], limit: int) -> None:
    clock = Clock()
    counted = limits(clock, calls_per_minute_per_key=limit)
    taken: deque[float] = deque()
    for pause in pauses:
        clock.now += pause
        wait = 0.0
        try:
            with counted.admit(ONE):
                taken.append(clock.now)
        except TooMany as error:
            wait = error.retry_after
        in_a_minute = sum(clock.now - at < WINDOW_SECONDS for at in taken)
        assert in_a_minute <= limit
        if wait:
            assert in_a_minute == limit
            assert wait == WINDOW_SECONDS - (clock.now - taken[-limit])


def test_keys_that_went_quiet_are_forgotten() -> None:
    clock = Clock()
    counted = limits(clock, calls_per_minute_per_key=1)
    for n in range(5000):
        with counted.admit(Caller(f"key_{n}", "acme", frozenset())):
            clock.now += 1
    assert len(counted._recent) < 1200


# Through a proxy


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_call_over_a_limit_is_told_when_to_try_again(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    release = asyncio.Event()

    async def wait(_request: web.Request, _body: Any) -> web.StreamResponse:
        await release.wait()
        return web.json_response({})

    upstream.reply = wait
    proxy = await start_proxy({"main": upstream.url}, max_concurrent_calls=2)
    first = [asyncio.create_task(proxy.chat()) for _ in range(2)]
    while len(upstream.bodies) < 2:  # noqa: ASYNC110 - the upstream tells nobody
        await asyncio.sleep(0.01)
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers.get("x-should-retry") != "false"  # OpenAI's clients wait and try again
        assert "max_concurrent_calls" in (await answer.json())["error"]["message"]
    release.set()
    assert [status for status, _ in await asyncio.gather(*first)] == [200, 200]
    assert (await proxy.chat())[0] == 200


# The head of a request, and what is no HTTP


class Server:
    """A proxy's runner over an application that says what it read; `ask` sends bytes and reads what comes back."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, *pieces: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02 if len(pieces) > 1 else 0)
            async with asyncio.timeout(5):
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    byte = await reader.read(1)
                    if not byte:
                        return head
                    head += byte
                length = re.search(rb"Content-Length: (\d+)", head)
                return head + await reader.readexactly(int(length[1]) if length else 0)
        finally:
            writer.close()


def status_and_error(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


async def _read(request: web.Request) -> web.Response:
    return web.json_response({"bytes": len(await request.read())})


async def _fail(_request: web.Request) -> web.Response:
    raise RuntimeError("a defect")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    app = web.Application(client_max_size=1000)
    only(app.router, "/v1/own", post=_read)
    only(app.router, "/fails", get=_fail)
    only(app.router, "/health", get=_read)
    app.router.add_route("*", "/v1/{path:.*}", _read)
    runner = ProxyRunner(app, ProxyConfig(max_header_bytes=16_384), drain_seconds=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Server(runner.addresses[0][1])
    await runner.cleanup()


SECRET = "nk_" + "s" * 43
POST = b"POST /v1/own HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "status", "said"),
    [
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"], 400, "no valid HTTP"),
        ([POST + b"Authorization: Bearer " + SECRET.encode() + b"\x01\r\n\r\n"], 400, "Invalid header value char"),
        ([POST + b"Authorization Bearer " + SECRET.encode() + b"\r\n\r\n"], 400, "Invalid header token"),
        ([b"GET http://[" + SECRET.encode() + b" HTTP/1.1\r\nHost: a\r\n\r\n"], 400, "no valid HTTP"),
        ([b"GET /v1/own HTTP/1.1\r\n\r\n"], 400, "Host"),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, "no valid HTTP"),
        ([POST + b"Content-Length: -5\r\n\r\n"], 400, "Content-Length"),
        ([POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], 400, "no valid HTTP"),
        ([CHUNKED + b"zz\r\n"], 400, "chunk size"),
        ([CHUNKED + b"5\r\nhello\r\n", b"zz\r\n"], 400, "no valid HTTP"),
        ([CHUNKED, b"5\r\nhello, and more than was said\r\n"], 400, "no valid HTTP"),
        ([POST + b"x: " + b"a" * 20_000 + b"\r\n\r\n"], 431, "16384"),
        ([POST + b"".join(b"x%d: %s\r\n" % (n, b"a" * 4000) for n in range(6)) + b"\r\n"], 431, "the headers have 24"),
        ([POST + b"".join(b"x%d: 1\r\n" % n for n in range(200)) + b"\r\n"], 431, "128"),
        ([b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"], 414, "8190"),
        ([POST + b"Expect: wonders\r\nContent-Length: 0\r\n\r\n"], 417, "wonders"),
        ([POST + b"Content-Length: 5000\r\n\r\n" + b"a" * 5000], 413, "1000"),
        ([b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n"], 404, "'/nowhere'"),
        ([b"GET /nowhere/" + SECRET.encode() + b" HTTP/1.1\r\nHost: a\r\n\r\n"], 404, "nk_…"),
        ([b"DELETE /v1/own HTTP/1.1\r\nHost: a\r\n\r\n"], 405, "DELETE is not allowed at '/v1/own'; it takes POST"),
        ([b"GET /fails HTTP/1.1\r\nHost: a\r\n\r\n"], 500, "log"),
    ],
)
async def test_what_the_server_answers_itself_is_an_openai_error_that_repeats_no_key(
    server: Server, pieces: list[bytes], status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answer = await server.ask(*pieces)
    found, error = status_and_error(answer)
    assert (found, said in error["message"]) == (status, True), error
    assert {"message", "type", "param", "code"} == set(error)
    assert SECRET not in answer.decode()
    assert SECRET not in caplog.text


async def test_a_method_that_is_not_there_says_which_are(server: Server) -> None:
    assert b"Allow: POST" in await server.ask(b"GET /v1/own HTTP/1.1\r\nHost: a\r\n\r\n")


async def test_get_answers_head_too(server: Server) -> None:
    async with aiohttp.ClientSession() as session, session.head(f"http://127.0.0.1:{server.port}/health") as answer:
        assert answer.status == 200


async def test_a_connection_goes_on_after_a_wrong_path(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for path, status in ((b"/nowhere", b"404"), (b"/v1/any", b"200"), (b"/nowhere", b"404")):
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.split()[1] == status
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length
        await reader.readexactly(int(length[1]))
    writer.close()


async def test_a_body_reaches_its_handler_as_it_was_compressed(server: Server) -> None:
    answer = await server.ask(POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde")
    assert answer.endswith(b'{"bytes": 5}')


_LINES = b"""\
GET /v1/own HTTP/1.1
POST /v1/own HTTP/1.1
POST /v1/any?x=%ff%00 HTTP/1.1
PUT /nowhere HTTP/1.0
POST * HTTP/1.1
OPTIONS * HTTP/1.1
CONNECT a:1 HTTP/1.1
GET // HTTP/1.1
GET http://b/v1/own HTTP/1.1
GET /v1/own HTTP/9.9
get / HTTP/1.1""".split(b"\n")
_HEADERS = """\
Host: b
Content-Length: 5
Content-Length: 99
Content-Length: +5
Content-Length: 2000
Transfer-Encoding: chunked
Transfer-Encoding: gzip, chunked
Transfer-Encoding: identity
Expect: 100-continue
Connection: upgrade
Upgrade: websocket
Connection: close
Content-Encoding: br
Accept: text/html
: x
x
x : y
x: \0
x: \u00ff
 folded""".encode("latin-1").split(b"\n")
_BODIES = [
    b"",
    b"hello",
    b"5\r\nhello\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"zz\r\n",
    b"fffffffffffffffff\r\n",
    b"0\r\nt: v\r\n\r\n",
]


def _request(line: bytes, headers: list[bytes], body: bytes) -> bytes:
    return b"\r\n".join([line, b"Host: a", *headers, b"", body])


_ONE = st.builds(
    _request, st.sampled_from(_LINES), st.lists(st.sampled_from(_HEADERS), max_size=3), st.sampled_from(_BODIES)
)
_SENT = st.lists(st.one_of(_ONE, _ONE, _ONE, st.binary(max_size=12)), min_size=1, max_size=3).map(b"".join)
_NOTHING_TO_WAIT_FOR = b"\r\n0\r\n\r\n" + b"\r\n" * 1200 + b"\x00\x00\r\n\r\n"
"""Ends any head and any body that was begun, and then is no HTTP."""


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[asyncio.AbstractEventLoop, Server]]:
    """A server that lives through all examples of the test below."""
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1000)
    only(app.router, "/v1/own", post=_read)
    app.router.add_route("*", "/v1/{path:.*}", _read)
    runner = ProxyRunner(app, ProxyConfig(), drain_seconds=1, lingering_seconds=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    yield loop, Server(runner.addresses[0][1])
    loop.run_until_complete(runner.cleanup())
    loop.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=_SENT, cut=st.integers(0, 200))
def test_garbage_is_never_a_500_and_never_waits(
    fuzzed: tuple[asyncio.AbstractEventLoop, Server], sent: bytes, cut: int
) -> None:
    """Whatever is sent, in pieces cut anywhere, is answered or cut off, and never with a 500."""
    loop, server = fuzzed
    pieces = [piece for piece in (sent[:cut], sent[cut:], _NOTHING_TO_WAIT_FOR) if piece]

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.001)
            async with asyncio.timeout(5):
                return await reader.read()
        except ConnectionError:  # the server closed on garbage before all of it was sent
            return b"HTTP/1.1 400"
        finally:
            writer.close()

    answer = loop.run_until_complete(ask())
    statuses = re.findall(rb"HTTP/1\.[01] (\d{3})", answer)
    assert statuses
    for status in statuses:
        assert int(status) in (100, 200, 400, 404, 405, 411, 413, 414, 417, 431), answer
    assert b"Traceback" not in answer
