"""Bugs that users of other proxies reported about HTTP itself: what reaches the client.

docs/peer_scenarios.md names the report behind each test.
"""

import asyncio
import gzip
import json
from typing import Any

import brotli
import pytest

from noria.contracts.call import CallStatus

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": []}'
EVENTS = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models"])
async def test_headers_of_an_answer_arrive_in_number_and_value(wires: Any, start_proxy: Any, path: str) -> None:
    sent = [
        ("Retry-After", "287441"),
        ("anthropic-ratelimit-unified-status", "rejected"),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-should-retry", "false"),
        ("x-request-id", "req_1"),
        ("Set-Cookie", "a=1; Path=/; HttpOnly"),
        ("Set-Cookie", "b=2; Expires=Thu, 01 Jan 2037 00:00:00 GMT"),
        ("Server", "their-server"),
        ("Date", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ("Cache-Control", "no-cache"),
        ("X-Long", "l" * 20_000),
    ]
    upstream = await wires.upstream(
        wires.response(b"{}", "429 Too Many Requests", *(f"{name}: {value}" for name, value in sent))
    )
    proxy = await start_proxy({"main": upstream.url})
    method = "GET" if path == "/v1/models" else "POST"
    status, headers, _body = await wires.send(proxy, wires.request(method, path, None if method == "GET" else BODY))
    assert status == 429
    for name, _value in sent:
        got = [value for key, value in headers if key == name.lower()]
        assert got == [value for key, value in sent if key == name]


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Weird", "500 Oops"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/rerank"])
async def test_an_error_passes_with_its_status_and_its_body(
    wires: Any, start_proxy: Any, path: str, status: str
) -> None:
    said = b"<html>\xff</html>" if "500" in status else b'{"error":{"message":"too long: 121692 tokens","n":1.0}}'
    upstream = await wires.upstream(wires.response(said, status, "Content-Type: text/odd"))
    proxy = await start_proxy({"main": upstream.url})
    got, headers, body = await wires.send(proxy, wires.request("POST", path, BODY))
    assert (got, body) == (int(status[:3]), said)
    assert ("content-type", "text/odd") in headers
    calls = await proxy.calls()
    assert [call.status for call in calls] == [CallStatus.UPSTREAM_ERROR] * (path != "/v1/rerank")
    assert all("121692" in call.output for call in calls if "500" not in status)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_leaves_the_connection_usable(wires: Any, start_proxy: Any, status: str) -> None:
    upstream = await wires.upstream(f"HTTP/1.1 {status}\r\nETag: x\r\n\r\n".encode())
    proxy = await start_proxy({"main": upstream.url})
    reader, writer = await wires.connect(proxy)
    for _ in range(2):
        writer.write(wires.request("GET", "/v1/files/f_1").replace(b"Connection: close\r\n", b""))
        got, headers = await wires.answered(reader)
        assert (got, ("etag", "x") in headers) == (int(status[:3]), True)
        assert "transfer-encoding" not in [name for name, _value in headers]


@pytest.mark.parametrize(
    "interim",
    [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 2],
    ids=["continue", "early-hints-twice"],
)
async def test_interim_answers_are_not_taken_for_the_answer(wires: Any, start_proxy: Any, interim: bytes) -> None:
    upstream = await wires.upstream(interim + wires.response(b'{"choices": []}'))
    proxy = await start_proxy({"main": upstream.url})
    for path in (CHAT, "/v1/rerank"):
        status, _headers, body = await wires.send(proxy, wires.request("POST", path, BODY))
        assert (status, body) == (200, b'{"choices": []}')


async def test_a_redirect_is_the_clients_to_follow(wires: Any, start_proxy: Any) -> None:
    elsewhere = await wires.upstream(wires.response())
    upstream = await wires.upstream(wires.response(b"", "307 Temporary Redirect", f"Location: {elsewhere.url}/v1/x"))
    proxy = await start_proxy({"main": upstream.url})
    for path in (CHAT, "/v1/rerank"):
        status, headers, _body = await wires.send(
            proxy, wires.request("POST", path, BODY, "Authorization: Bearer mine")
        )
        assert (status, dict(headers)["location"]) == (307, f"{elsewhere.url}/v1/x")
    assert elsewhere.asked == []


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("br", brotli.compress)])
@pytest.mark.parametrize("path", [CHAT, "/v1/rerank"])
async def test_a_compressed_answer_passes_as_it_is_and_is_recorded_readable(
    wires: Any, start_proxy: Any, replies: Any, path: str, encoding: str, pack: Any
) -> None:
    text = json.dumps(replies.completion("hello " * 50))
    packed = pack(text.encode())
    upstream = await wires.upstream(wires.response(packed, "200 OK", f"Content-Encoding: {encoding}"))
    proxy = await start_proxy({"main": upstream.url})
    status, headers, body = await wires.send(
        proxy, wires.request("POST", path, BODY, f"Accept-Encoding: {encoding}, zstd")
    )
    assert (status, body) == (200, packed)
    named = dict(headers)
    assert named["content-encoding"] == encoding
    assert named.get("content-length", str(len(packed))) == str(len(packed))
    assert upstream.asked[0].values("accept-encoding") == [f"{encoding}, zstd"]
    for call in await proxy.calls():
        assert (call.status, call.output) == (CallStatus.OK, text)
        assert call.usage is not None
        assert call.usage["total_tokens"] == 4


@pytest.mark.parametrize("kind", ["text/event-stream", "audio/flac"])
async def test_a_client_of_http_1_0_gets_no_chunks(wires: Any, start_proxy: Any, kind: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    upstream = await wires.upstream(head + wires.chunked(EVENTS[:40], EVENTS[40:]))
    proxy = await start_proxy({"main": upstream.url})
    path = CHAT if "stream" in kind else "/v1/audio/speech"
    status, headers, body = await wires.send(proxy, wires.request("POST", path, BODY, version="1.0"))
    assert (status, body) == (200, EVENTS)
    assert "transfer-encoding" not in [name for name, _value in headers]


@pytest.mark.parametrize("path", [CHAT, "/v1/files/f_1/content"])
async def test_an_answer_that_breaks_off_is_not_made_to_look_whole(wires: Any, start_proxy: Any, path: str) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Any) -> None:
        await wires.read_body(reader, asked.headers)
        writer.write(wires.response(b'{"choices": [' + b" " * 100)[:-50])
        await writer.drain()
        writer.close()

    upstream = await wires.upstream(half)
    proxy = await start_proxy({"main": upstream.url})
    headers: list[tuple[str, str]] = []
    body = b""
    try:
        status, headers, body = await wires.send(proxy, wires.request("POST", path, BODY))
    except (ValueError, asyncio.IncompleteReadError):
        status = 200  # a last chunk was missing
    assert status == 502 or (status == 200 and len(body) < int(dict(headers).get("content-length", 10**6)))
    assert [call.status for call in await proxy.calls()] == [CallStatus.UPSTREAM_ERROR] * (path == CHAT)


@pytest.mark.parametrize("path", [CHAT, "/v1/rerank"])
async def test_an_answer_that_ends_with_its_connection_is_whole(wires: Any, start_proxy: Any, path: str) -> None:
    said = b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}'

    async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Any) -> None:
        await wires.read_body(reader, asked.headers)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + said)
        await writer.drain()
        writer.close()

    upstream = await wires.upstream(until_closed)
    proxy = await start_proxy({"main": upstream.url})
    assert (await wires.send(proxy, wires.request("POST", path, BODY)))[::2] == (200, said)
    assert all(call.status is CallStatus.OK for call in await proxy.calls())


async def test_bytes_that_are_no_stream_of_events_pass_as_they_come(wires: Any, start_proxy: Any) -> None:
    go_on = asyncio.Event()
    parts = [b"fLaC\x00\xff\x80" * 10, bytes(range(256))]

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Any) -> None:
        await wires.read_body(reader, asked.headers)
        writer.write(wires.response(b"".join(parts), "200 OK", "Content-Type: audio/flac").removesuffix(parts[1]))
        await go_on.wait()
        writer.write(parts[1])

    upstream = await wires.upstream(speak)
    proxy = await start_proxy({"main": upstream.url})
    reader, writer = await wires.connect(proxy)
    writer.write(wires.request("POST", "/v1/audio/speech", BODY).replace(b"Connection: close\r\n", b""))
    assert ("content-type", "audio/flac") in (await wires.answered(reader))[1]
    assert await asyncio.wait_for(reader.readuntil(parts[0]), 5)
    go_on.set()
    assert parts[1] in await asyncio.wait_for(reader.readuntil(parts[1]), 5)


async def test_a_client_that_does_not_read_stops_the_upstream(wires: Any, start_proxy: Any) -> None:
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Any) -> None:
        nonlocal written
        await wires.read_body(reader, asked.headers)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = wires.chunked(b": " + b"x" * 65_536 + b"\n\n").removesuffix(b"0\r\n\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    upstream = await wires.upstream(flood)
    proxy = await start_proxy({"main": upstream.url})
    _reader, writer = await wires.connect(proxy)
    writer.write(wires.request("POST", CHAT, BODY))
    seen = -1
    for _ in range(100):
        await asyncio.sleep(0.1)
        if written == seen:
            break
        seen = written
    writer.transport.abort()
    assert 0 < written == seen < 64_000_000
