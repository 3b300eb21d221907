"""Bugs that users of other proxies reported about HTTP itself: what reaches the upstream.

docs/peer_scenarios.md names the report behind each test.
"""

import asyncio
import gzip
import json
import posixpath
from typing import Any
from urllib.parse import unquote

import pytest

from noria.contracts.call import CallStatus

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": []}'


@pytest.mark.parametrize(
    "path",
    [
        f"{CHAT}?api-version=2024-10-21",
        f"{CHAT}/",
        "/v1/messages?beta=true",
        "/v1/models/org%2Fname",
        "/v1/models/org/name",
        "/v1/files?purpose=a+b&purpose=c%2Fd&empty=&bare",
        "/v1/files/caf%C3%A9%20%3B%3f?q=%e4%bd%a0&s=a%20b",
        "/v1/threads/t_1/runs/",
        "/v1//models",
    ],
)
async def test_path_and_query_arrive_as_they_were_sent(wires: Any, start_proxy: Any, path: str) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    for prefix in ("", "/apps/a/nodes/n"):
        status, _headers, body = await wires.send(proxy, wires.request("POST", prefix + path, BODY))
        assert (status, body) == (200, b"{}")
    assert [asked.line for asked in upstream.asked] == [f"POST {path} HTTP/1.1"] * 2
    assert [asked.body for asked in upstream.asked] == [BODY] * 2


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin",
        "/v1/%2e%2e/admin",
        "/v1/..%2Fadmin",
        "/v1/models/../../admin",
        "/v1/models/%2E%2E%2f%2e%2e%2fadmin",
        "/v1/x/..%5C..%5Cadmin",
        "/apps/a/v1/../../../admin",
    ],
)
async def test_no_path_leads_out_of_v1(wires: Any, start_proxy: Any, path: str) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    await wires.send(proxy, wires.request("GET", path))
    for asked in upstream.asked:
        reached = unquote(unquote(asked.line.split()[1])).replace("\\", "/")
        assert posixpath.normpath(reached).startswith("/v1"), asked.line


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"])
async def test_every_method_passes(wires: Any, start_proxy: Any, method: str) -> None:
    answer = wires.response(b"12345", "200 OK", "Allow: GET, HEAD")
    upstream = await wires.upstream(answer.removesuffix(b"12345") if method == "HEAD" else answer)
    proxy = await start_proxy({"main": upstream.url})
    for path in ("/v1/files/f_1", "/v1/models"):
        status, headers, body = await wires.send(proxy, wires.request(method, path))
        assert (status, body) == (200, b"" if method == "HEAD" else b"12345")
        assert {("allow", "GET, HEAD"), ("content-length", "5")} <= set(headers)
    assert [asked.line.split()[0] for asked in upstream.asked] == [method] * 2


@pytest.mark.parametrize(("method", "length"), [("GET", None), ("DELETE", None), ("POST", b""), ("POST", None)])
async def test_an_empty_body_stays_empty(wires: Any, start_proxy: Any, method: str, length: bytes | None) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    assert (await wires.send(proxy, wires.request(method, "/v1/responses/r_1/cancel", length)))[0] == 200
    [asked] = upstream.asked
    assert asked.values("content-type") == []
    assert asked.values("transfer-encoding") == []
    assert asked.values("content-length") in ([], ["0"])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/completions", "/v1/rerank"])
async def test_headers_of_a_request_arrive_in_number_and_value(wires: Any, start_proxy: Any, path: str) -> None:
    sent = [
        ("anthropic-beta", "context-1m"),
        ("anthropic-beta", "tools-2"),
        ("anthropic-version", "2023-06-01"),
        ("OpenAI-Organization", "org-1"),
        ("x-api-key", "the-agents-own"),
        ("User-Agent", "agent/1.0 (x; y)"),
        ("X-Stainless-Retry-Count", "0"),
        ("Idempotency-Key", "k1"),
        ("X-Mine", 'a, b;q="c"'),
        ("X-Long", "l" * 20_000),
        ("X-Empty", ""),
    ]
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    hop = ["Connection: x-hop", "X-Hop: not-for-others", "Keep-Alive: timeout=5", "Proxy-Connection: close"]
    own = ["x-noria-node: router", "x-noria-subject: ann", "baggage: noria.app=shop"]
    fields = [f"{name}: {value}" for name, value in sent]
    status, _headers, _body = await wires.send(proxy, wires.request("POST", path, BODY, *hop, *own, *fields))
    assert status == 200
    [asked] = upstream.asked
    for name, _value in sent:
        assert asked.values(name.lower()) == [value for key, value in sent if key == name]
    for name in ("x-hop", "keep-alive", "proxy-connection", "x-noria-node", "x-noria-subject", "baggage"):
        assert asked.values(name) == []
    assert [value for value in asked.values("connection") if "hop" in value] == []


async def test_an_upstream_with_a_key_of_its_own_sees_none_of_the_callers(
    wires: Any, start_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_UPSTREAMS_KEY", "the-upstreams-key")
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": {"url": upstream.url, "api_key_env": "THE_UPSTREAMS_KEY"}})
    keys = ["Authorization: Bearer callers-1", "x-api-key: callers-2", "api-key: callers-3"]
    for path in (CHAT, "/v1/messages", "/v1/files"):
        _status, headers, body = await wires.send(proxy, wires.request("POST", path, BODY, *keys))
        assert "the-upstreams-key" not in f"{headers}{body!r}"
    for asked in upstream.asked:
        assert asked.values("authorization") == ["Bearer the-upstreams-key"]
        assert "callers-" not in str(asked.headers)
    assert len(upstream.asked) == 3
    assert "the-upstreams-key" not in str(await proxy.calls())


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/transcriptions"])
async def test_a_chunked_body_arrives_whole(wires: Any, start_proxy: Any, path: str) -> None:
    upstream = await wires.upstream(wires.response(b"a transcript", "200 OK", "Content-Type: text/plain"))
    proxy = await start_proxy({"main": upstream.url})
    kind = "Content-Type: multipart/form-data; boundary=x"
    parts = [b"--x\r\n\r\n\x00\xff", b"\r\n--x--\r\n"] if "audio" in path else [BODY[:9], BODY[9:]]
    sent = wires.request("POST", path, None, kind, "Transfer-Encoding: chunked") + wires.chunked(*parts)
    status, headers, body = await wires.send(proxy, sent)
    assert (status, body) == (200, b"a transcript")
    assert ("content-type", "text/plain") in headers
    assert upstream.asked[0].body == b"".join(parts)
    assert upstream.asked[0].values("content-type") == ["multipart/form-data; boundary=x"]


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
async def test_a_client_that_waits_to_be_told_to_continue_is_told(wires: Any, start_proxy: Any, path: str) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    reader, writer = await wires.connect(proxy)
    whole = wires.request("POST", path, BODY, "Expect: 100-continue")
    writer.write(whole.removesuffix(BODY))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await wires.answered(reader))[0] == 200
    assert upstream.asked[0].body == BODY
    assert upstream.asked[0].values("expect") == []


async def test_an_upload_passes_while_it_arrives(wires: Any, start_proxy: Any) -> None:
    arrived = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _asked: Any) -> None:
        await reader.readuntil(b"first")
        arrived.set()
        await reader.readuntil(b"second")
        writer.write(wires.response())

    upstream = await wires.upstream(take)
    proxy = await start_proxy({"main": upstream.url})
    reader, writer = await wires.connect(proxy)
    writer.write(wires.request("PUT", "/v1/uploads/u_1", None, "Content-Length: 11") + b"first")
    await asyncio.wait_for(arrived.wait(), 5)
    writer.write(b"second")
    assert (await wires.answered(reader))[0] == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
async def test_an_answer_may_come_before_the_request_was_read(wires: Any, start_proxy: Any, path: str) -> None:
    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _asked: Any) -> None:
        writer.write(wires.response(b"too large", "413 Content Too Large", "Connection: close"))
        await writer.drain()

    upstream = await wires.upstream(refuse)
    proxy = await start_proxy({"main": upstream.url})
    sent = BODY.replace(b"[]", b'["%b"]' % (b"x" * 8_000_000))
    status, _headers, body = await wires.send(proxy, wires.request("POST", path, sent))
    assert (status, body) == (413, b"too large")


async def test_a_picture_of_some_megabytes_passes_and_is_recorded(wires: Any, start_proxy: Any) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    url = {"url": f"data:image/png;base64,{'iVBORw0KGgo=' * 250_000}"}
    part = {"type": "image_url", "image_url": url}
    sent = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    assert (await wires.send(proxy, wires.request("POST", CHAT, sent)))[0] == 200
    assert upstream.asked[0].body == sent
    [row] = await proxy.calls()
    assert len(row.input) < 1000  # the picture stands in a file of its own
    [call] = proxy.store.trace(row.trace_id)
    assert call.input == sent.decode()


async def test_a_compressed_request_passes_as_it_is_and_is_recorded_readable(wires: Any, start_proxy: Any) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": upstream.url})
    packed = gzip.compress(BODY)
    assert (await wires.send(proxy, wires.request("POST", CHAT, packed, "Content-Encoding: gzip")))[0] == 200
    assert (upstream.asked[0].body, upstream.asked[0].values("content-encoding")) == (packed, ["gzip"])
    [call] = await proxy.calls()
    assert (call.input, call.model_name) == (BODY.decode(), "m")


@pytest.mark.parametrize("path", [CHAT, "/v1/rerank"])
async def test_a_call_that_a_fresh_connection_lost_is_not_sent_again(wires: Any, start_proxy: Any, path: str) -> None:
    """The upstream may have billed it already."""

    async def read_and_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Any) -> None:
        await wires.read_body(reader, asked.headers)
        writer.close()

    upstream = await wires.upstream(read_and_die)
    proxy = await start_proxy({"main": upstream.url})
    assert (await wires.send(proxy, wires.request("POST", path, BODY)))[0] == 502
    assert len(upstream.asked) == 1
    assert [call.status for call in await proxy.calls()] == [CallStatus.UPSTREAM_ERROR] * (path == CHAT)
