"""Byte for byte: what an upstream sends reaches the client, what a client sends reaches the upstream, and the record.

Every shape goes through a real upstream server on loopback and a real proxy, in several cuttings; the clients are a
plain HTTP client, which sees the bytes, and in test_proxy_sdks.py the SDKs of OpenAI and Anthropic.
"""

import asyncio
import gzip
import io
import json
import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import aiohttp
import brotli
import pytest
import zstandard
from yarl import URL

from noria.contracts.call import Call, CallStatus
from noria.services.proxy.exchange import KINDS, Kind, Wants
from noria.services.proxy.relay import TRACE_HEADER, UID_HEADER
from noria.services.proxy.wire.to_call import to_call
from tests.noria.services.proxy.wire.exchanges import cut, exchange, sse
from tests.noria.services.proxy.wire.shapes import CHAT, CHAT_STREAMS, EVENTS, JSON, SHAPES, STOP, Shape, chunk
from tests.noria.services.proxy.wire.upstream import Answer, WireUpstream, wire_upstream

PATHS = {kind: path for path, kind in KINDS.items()}


@pytest.fixture
async def upstream() -> AsyncIterator[WireUpstream]:
    async with wire_upstream() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


@pytest.fixture
async def proxy(start_proxy: Callable[..., Awaitable[Any]], upstream: WireUpstream) -> Any:
    return await start_proxy({"up": upstream.url})


def by_event(body: bytes) -> list[bytes]:
    *events, rest = body.split(b"\n\n")
    return [*[event + b"\n\n" for event in events], rest]


def at_random(body: bytes) -> list[bytes]:
    chosen = random.Random(len(body))
    return cut(body, [chosen.randrange(len(body)) for _ in range(12)])


CUTTINGS: dict[str, tuple[Callable[[bytes], list[bytes]], str]] = {
    "in one write": (lambda body: [body], "chunked"),
    "with its length": (at_random, "length"),
    "until the connection closes": (at_random, "close"),
    "one byte per write": (lambda body: [body[at : at + 1] for at in range(len(body))], "chunked"),
    "one event per write": (by_event, "chunked"),
    "cut at random": (at_random, "chunked"),
}


async def ask(
    client: aiohttp.ClientSession, url: str, shape: Shape, **headers: str
) -> tuple[aiohttp.ClientResponse, bytes, bytes]:
    """One call: the response, the body sent and the body received."""
    sent = json.dumps(shape.ask, ensure_ascii=False, indent=1).encode()  # bytes that no serializer makes by default
    headers = {"Content-Type": JSON, "Authorization": "Bearer sk-client", **headers}
    async with client.post(url + PATHS[shape.kind], data=io.BytesIO(sent), headers=headers) as response:
        return response, sent, await response.read()


def expected(shape: Shape, sent: bytes, body: bytes | None = None, **more: Any) -> Call:
    """The record of this shape, made of its whole bytes."""
    whole = shape.body if body is None else body
    return to_call(exchange(shape.kind, sent, whole, **{"content_type": shape.content_type, **more}))


def difference(call: Call, wanted: Call) -> list[str]:
    names = ("status", "error_type", "output", "input", "finish_reasons", "usage", "model_name", "tokens")
    return [
        f"{name}: {getattr(call, name)!r} is not {getattr(wanted, name)!r}"
        for name in names
        if getattr(call, name) != getattr(wanted, name)
    ]


async def records(proxy: Any) -> dict[str, Call]:
    return {call.uid: call for call in await proxy.calls()}


@pytest.mark.parametrize("cutting", CUTTINGS)
async def test_every_shape_passes_unchanged_and_is_recorded(
    cutting: str, proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    pieces, framing = CUTTINGS[cutting]
    asked: dict[str, tuple[str, bytes]] = {}
    for name, shape in SHAPES.items():
        upstream.answer = Answer(
            pieces(shape.body), headers=(("Content-Type", shape.content_type), ("X-Odd", "Ä  b")), framing=framing
        )
        response, sent, received = await ask(client, proxy.url, shape)
        assert received == shape.body, name
        assert upstream.asked[-1].body == sent, name
        assert response.status == 200
        assert response.headers["Content-Type"] == shape.content_type
        asked[name] = response.headers[UID_HEADER], sent
    recorded = await records(proxy)
    assert len(recorded) == len(SHAPES)
    for name, (uid, sent) in asked.items():
        shape = SHAPES[name]
        assert difference(recorded[uid], expected(shape, sent)) == [], name
        assert (recorded[uid].status is CallStatus.OK) is shape.ok, name
        assert recorded[uid].attributes["endpoint"] == shape.kind
        assert recorded[uid].attributes["stream"] is (shape.content_type == EVENTS)


def gzipped(events: Iterable[bytes]) -> list[bytes]:
    encoder = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    pieces = [encoder.compress(event) + encoder.flush(zlib.Z_SYNC_FLUSH) for event in events]
    return [*pieces, encoder.flush()]


def in_brotli(events: Iterable[bytes]) -> list[bytes]:
    encoder = brotli.Compressor()
    pieces = [encoder.process(event) + encoder.flush() for event in events]
    return [*pieces, encoder.finish()]


def in_zstd(events: Iterable[bytes]) -> list[bytes]:
    encoder = zstandard.ZstdCompressor().compressobj()
    pieces = [encoder.compress(event) + encoder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for event in events]
    return [*pieces, encoder.flush()]


ENCODERS = {"gzip": gzipped, "br": in_brotli, "zstd": in_zstd}
COMPRESSED = ("chat: raw utf-8", "chat: unstreamed", "responses: streamed", "messages: streamed", "embeddings")


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_compressed_answers_pass_compressed(
    encoding: str, proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    asked = {}
    for name in COMPRESSED:
        shape = SHAPES[name]
        whole = b"".join(ENCODERS[encoding](by_event(shape.body)))
        for pieces in (ENCODERS[encoding](by_event(shape.body)), [whole[at : at + 1] for at in range(len(whole))]):
            headers = (("Content-Type", shape.content_type), ("Content-Encoding", encoding))
            upstream.answer = Answer(pieces, headers=headers)
            response, sent, received = await ask(client, proxy.url, shape, **{"Accept-Encoding": encoding})
            assert received == whole, name
            assert response.headers["Content-Encoding"] == encoding
            assert upstream.asked[-1].header("Accept-Encoding") == encoding
            asked[response.headers[UID_HEADER]] = shape, sent
    recorded = await records(proxy)
    for uid, (shape, sent) in asked.items():
        assert difference(recorded[uid], expected(shape, sent)) == []
        assert recorded[uid].status is CallStatus.OK


async def test_a_compressed_request_passes_compressed(
    proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    shape = SHAPES["chat: unstreamed"]
    upstream.answer = Answer([shape.body], headers=(("Content-Type", JSON),))
    body = gzip.compress(json.dumps(shape.ask).encode())
    headers = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    async with client.post(proxy.url + PATHS[Kind.CHAT], data=body, headers=headers) as response:
        assert await response.read() == shape.body
    assert upstream.asked[-1].body == body
    assert upstream.asked[-1].header("Content-Encoding") == "gzip"
    (call,) = await proxy.calls()
    assert (call.input, call.model_name, call.status) == (json.dumps(shape.ask), "m", CallStatus.OK)


@pytest.mark.parametrize("encoding", ["", *ENCODERS])
async def test_each_event_arrives_before_the_next_is_sent(
    encoding: str, proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    for kind, stream in (
        (Kind.CHAT, CHAT_STREAMS["plain"]),
        (Kind.RESPONSE, SHAPES["responses: streamed"].body),
        (Kind.MESSAGE, SHAPES["messages: streamed"].body),
    ):
        pieces = [piece for piece in (ENCODERS[encoding] if encoding else list)(by_event(stream)) if piece]
        gate = asyncio.Semaphore(0)
        headers = (("Content-Type", EVENTS), *([("Content-Encoding", encoding)] if encoding else []))
        upstream.answer = Answer(pieces, headers=headers, gate=gate)
        async with asyncio.timeout(10), client.post(proxy.url + PATHS[kind], json={"stream": True}) as response:
            for piece in pieces:
                assert await response.content.readexactly(len(piece)) == piece
                gate.release()
            assert await response.content.read() == b""


async def test_megabytes_pass_both_ways(proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession) -> None:
    image = "data:image/png;base64," + "QUJD" * 1_000_000
    ask_image = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "url": image}]}]}
    deltas = [chunk({"content": f"{number:05d}" + "x" * 4_000}) for number in range(1_000)]
    whole = {**CHAT, "choices": [{"message": {"content": "y" * 4_000_000}, "finish_reason": "stop"}]}
    shapes = [
        Shape(Kind.CHAT, sse(*deltas, STOP) + b"data: [DONE]\n\n", {**ask_image, "stream": True}),
        Shape(Kind.CHAT, json.dumps(whole).encode(), ask_image, JSON),
    ]
    for shape in shapes:
        pieces = cut(shape.body, list(range(0, len(shape.body), 65_521)))
        upstream.answer = Answer(pieces, headers=(("Content-Type", shape.content_type),))
        response, sent, received = await ask(client, proxy.url, shape)
        assert received == shape.body
        assert upstream.asked[-1].body == sent
        await proxy.calls()
        (call,) = proxy.store.trace(response.headers[TRACE_HEADER])
        assert difference(call, expected(shape, sent)) == []


async def test_what_is_no_model_call_passes_too(
    proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    calls = [
        ("GET", "/v1/models?limit=2&after=a%2Fb+c", b""),
        ("GET", "/v1/responses/resp_1?stream=true", b""),
        ("DELETE", "/v1/files/file-1", b""),
        ("POST", "/v1/responses/input_tokens", b'{"model": "m"}'),
        ("POST", "/v1/messages/count_tokens", b'{"model": "m"}'),
        ("POST", "/v1/files", bytes(range(256)) * 5_000),
        ("PUT", "/v1/some/thing%20new", b"\x00\xff"),
        ("PATCH", "/v1/x", b"{"),
    ]
    for method, target, body in calls:
        answer = bytes(reversed(range(256))) * 3_000
        headers = (("Content-Type", "audio/mpeg"), ("X-Odd", "b"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"))
        upstream.answer = Answer(cut(answer, [9, 99_999]), 200, headers)
        async with client.request(
            method,
            URL(proxy.url + target, encoded=True),
            data=io.BytesIO(body) if body else None,
            headers={"Content-Type": "x/y", "X-My": "1"},
        ) as response:
            assert await response.read() == answer, target
            assert response.headers["X-Odd"] == "b"
            assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        asked = upstream.asked[-1]
        assert (asked.method, asked.target, asked.body) == (method, target, body)
        assert (asked.header("Content-Type"), asked.header("X-My")) == ("x/y", "1")
    assert await proxy.calls() == []


@pytest.mark.parametrize("status", [400, 404, 429, 529])
async def test_errors_pass_with_their_headers(
    status: int, proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    body = b'{"error": {"message": "no",  "type": "some_error"}}\n'
    headers = (("Content-Type", JSON), ("Retry-After", "7"), ("X-Request-Id", "r"), ("X-Should-Retry", "false"))
    upstream.answer = Answer([body], status, headers, framing="length")
    for kind, path in PATHS.items():
        response, _, received = await ask(client, proxy.url, Shape(kind, body, {"model": "m", "stream": True}, JSON))
        assert (response.status, received) == (status, body), path
        assert {name: response.headers[name] for name, _ in headers} == dict(headers)
    assert len(upstream.asked) == len(PATHS)
    for call in await proxy.calls():
        assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "some_error")
        assert (call.output, call.attributes["http_status"]) == (body.decode(), status)


async def test_headers_of_a_call_pass_but_for_those_of_the_connection(
    proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    sent = {
        "Authorization": "Bearer sk-client",
        "OpenAI-Organization": "org",
        "anthropic-version": "2023-06-01",
        "User-Agent": "mine/1.0",
        "Accept": "x/y",
        "X-Stainless-Lang": "python",
        "x-noria-node": "n",
        "Keep-Alive": "timeout=5",
    }
    await ask(client, proxy.url, SHAPES["chat: plain"], **sent)
    (asked,) = upstream.asked
    passed = {name: asked.header(name) for name in sent}
    assert passed == {**sent, "x-noria-node": None, "Keep-Alive": None}
    assert asked.header("Host") == upstream.url.removeprefix("http://")
    assert asked.target == "/v1/chat/completions"


TOKENS = {"token_ids": [3], "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}


@pytest.mark.parametrize("cutting", ["in one write", "one byte per write", "cut at random"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_tokens_that_the_proxy_asked_for_are_taken_out(
    cutting: str,
    end: str,
    start_proxy: Callable[..., Awaitable[Any]],
    upstream: WireUpstream,
    client: aiohttp.ClientSession,
) -> None:
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    before = f": hi{end}{end}".encode()
    first, last = chunk({"content": "grü"}), chunk({"content": "ße"}, "stop")
    plain = before + sse(first, last, end=end) + b"data: [DONE]\n\n"
    full = before + sse(
        {**first, "prompt_token_ids": [1, 2], "choices": [{**first["choices"][0], **TOKENS}]},
        {**last, "choices": [{**last["choices"][0], **TOKENS}]},
        end=end,
    )
    full += b"data: [DONE]\n\n"
    pieces, framing = CUTTINGS[cutting]
    upstream.answer = Answer(pieces(full), framing=framing)
    shape = Shape(Kind.CHAT, full, {"model": "m", "messages": [], "stream": True})
    response, sent, received = await ask(client, proxy.url, shape)
    assert received == plain
    assert json.loads(upstream.asked[-1].body) == {**shape.ask, "return_token_ids": True, "logprobs": True}
    call = (await records(proxy))[response.headers[UID_HEADER]]
    wanted = expected(shape, sent, wants=Wants(token_ids=False, logprobs=False))
    assert call.tokens == wanted.tokens
    assert call.tokens is not None
    assert call.tokens.completion_token_ids == (3, 3)
    assert call.output == wanted.output
    assert call.output == expected(shape, sent, plain).output

    shape = Shape(Kind.CHAT, full, {**shape.ask, "logprobs": True, "return_token_ids": True})
    _, _, received = await ask(client, proxy.url, shape)
    assert received == full


async def test_a_client_that_leaves_closes_the_upstream_and_is_recorded(
    proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    for shape in (SHAPES["chat: plain"], SHAPES["responses: streamed"], SHAPES["messages: streamed"]):
        gate = asyncio.Semaphore(0)
        events = by_event(shape.body)
        upstream.closed.clear()
        upstream.answer = Answer(events, gate=gate)
        async with asyncio.timeout(5), client.post(proxy.url + PATHS[shape.kind], json=shape.ask) as response:
            uid = response.headers[UID_HEADER]
            assert await response.content.readexactly(len(events[0])) == events[0]
            response.close()
        await asyncio.wait_for(upstream.closed.wait(), 1)
        call = (await records(proxy))[uid]
        assert (call.status, call.error_type) == (CallStatus.CLIENT_DISCONNECT, "client_left")
        assert call.output == expected(shape, b"{}", events[0]).output


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RESPONSE, Kind.MESSAGE])
@pytest.mark.parametrize("mid_event", [False, True])
async def test_an_upstream_that_dies_ends_in_an_error_event(
    kind: Kind, mid_event: bool, proxy: Any, upstream: WireUpstream, client: aiohttp.ClientSession
) -> None:
    names = {Kind.CHAT: "chat: plain", Kind.RESPONSE: "responses: streamed", Kind.MESSAGE: "messages: streamed"}
    shape = SHAPES[names[kind]]
    first, second, *_ = by_event(shape.body)
    arrived = first + second[: len(second) // 2 if mid_event else None]
    upstream.answer = Answer([arrived], dies=True)
    async with asyncio.timeout(5), client.post(proxy.url + PATHS[kind], json=shape.ask) as response:
        uid = response.headers[UID_HEADER]
        received = b""
        try:
            async for piece in response.content.iter_any():
                received += piece
        except aiohttp.ClientPayloadError:
            pass  # the proxy may break off as well, after the error event
    assert received.startswith(arrived)
    event = received[len(arrived) :]
    assert event.startswith(b"\n\n") is mid_event
    assert b"[DONE]" not in event
    assert b"message_stop" not in event
    assert b"response.completed" not in event
    assert json.loads(event.partition(b"data: ")[2])["error"]["message"]
    call = (await records(proxy))[uid]
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "connection_lost")
    assert call.finish_reasons == ()
