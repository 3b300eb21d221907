import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from noria.contracts.call import Arm, CallStatus

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def chunk(content: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "a", "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


async def test_an_answer_passes_byte_for_byte_and_is_recorded(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    odd = b'{ "choices":[{"index":0,"message":{"content":"\\u00fc"},"finish_reason":"stop"}],\n "usage":{"n":1.50} }'

    async def reply(_request: web.Request, _body: Any) -> web.Response:
        return web.Response(body=odd, content_type="application/json", headers={"x-request-id": "r1"})

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    sent = b'{"model" : "m",  "messages": [], "n_odd": 1.50}'
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer the-agents-own",
        "x-noria-node": "router",
        "x-noria-subject": "ann",
        "x-noria-consent": "false",
        "x-noria-agent-version": "v7",
        "baggage": "noria.app=dispatch,other=1",
    }
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", data=sent, headers=headers) as answer:
        assert await answer.read() == odd
        assert answer.headers["x-request-id"] == "r1"
        trace_id, uid = answer.headers["x-noria-trace-id"], answer.headers["x-noria-call-uid"]
    assert upstream.bodies == [sent]
    assert upstream.headers[0]["Authorization"] == "Bearer the-agents-own"
    assert upstream.headers[0]["baggage"] == "other=1"
    assert not [name for name in upstream.headers[0] if name.lower().startswith("x-noria")]
    [call] = await proxy.calls()
    assert (call.uid, call.trace_id, call.target) == (uid, trace_id, "dispatch.router")
    assert (call.input, call.output) == (sent.decode(), odd.decode())
    assert (call.status, call.arm, call.model_name, call.finish_reasons) == (CallStatus.OK, Arm.LIVE, "m", ("stop",))
    assert (call.usage, call.agent_version, call.consent) == ({"n": 1.5}, "v7", False)
    assert call.subject not in (None, "ann")
    assert call.response_time >= call.request_time
    assert call.duration_ms > 0


@pytest.mark.parametrize("path", ["/apps/shop/nodes/ask", "/tenants/acme/apps/shop/nodes/ask"])
async def test_the_base_url_alone_can_say_whose_call_it_is(start_upstream: Any, start_proxy: Any, path: str) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with proxy.session.post(f"{proxy.url}{path}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
    [call] = await proxy.calls()
    assert call.target == "shop.ask"
    assert call.tenant == ("acme" if "tenants" in path else "default")


async def test_a_stream_passes_byte_for_byte_also_when_its_content_is_cut(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    whole = b": ping\n\n" + chunk("grü") + chunk("ße 你好", "stop") + b"data: [DONE]\n\n"
    middle = whole.index("ü".encode()) + 1  # inside a character
    pieces = [whole[:5], whole[5:middle], whole[middle : middle + 40], whole[middle + 40 :]]
    upstream = await start_upstream(replies.streaming(*pieces))
    proxy = await start_proxy({"main": upstream.url})
    sent = json.dumps(BODY).encode()
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", data=sent) as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.read() == whole
    assert upstream.bodies == [sent]
    [call] = await proxy.calls()
    assert json.loads(call.output)["choices"][0]["message"]["content"] == "grüße 你好"
    assert (call.status, call.finish_reasons) == (CallStatus.OK, ("stop",))


async def test_each_chunk_passes_at_once_and_the_record_is_made_before_the_last(
    start_upstream: Any, start_proxy: Any
) -> None:
    go_on = asyncio.Event()

    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("first"))
        await go_on.wait()
        await response.write(chunk("last", "stop") + b"data: [DONE]\n\n")
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
        assert await asyncio.wait_for(answer.content.readany(), 2) == chunk("first")
        go_on.set()
        rest = b""
        while b"[DONE]" not in rest:
            rest += await answer.content.readany()
        spooled = list(proxy.config.spool_dir.glob("*.spool"))
        assert answer.headers["x-noria-call-uid"].encode() in spooled[0].read_bytes()


async def test_an_error_of_the_upstream_passes_and_is_recorded(start_upstream: Any, start_proxy: Any) -> None:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        error = {"error": {"message": "slow down", "type": "rate_limit_exceeded"}}
        return web.json_response(error, status=429, headers={"Retry-After": "7"})

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        assert (await answer.json())["error"]["message"] == "slow down"
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "rate_limit_exceeded")
    assert "slow down" in call.output


@pytest.mark.parametrize(
    "body", [b"<html>oops</html>", b"[]", b'{"choices": [5]}', b'{"choices": []}', b"[" * 100_000, b"\xff"]
)
async def test_nonsense_with_status_200_passes_and_is_not_learnt_from(
    start_upstream: Any, start_proxy: Any, body: bytes
) -> None:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": {"url": upstream.url, "token_ids": True}})
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
        assert await answer.read() == body
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "no_choices")
    json.loads(call.output)


async def test_an_upstream_that_is_down_is_a_502_that_names_it(start_proxy: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    proxy = await start_proxy({"main": f"http://127.0.0.1:{port}"})
    status, answer = await proxy.chat()
    assert status == 502
    assert "[proxy.upstreams.main] url" in answer["error"]["message"]
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "upstream_unreachable")


async def test_an_upstream_that_is_silent_is_a_504(start_upstream: Any, start_proxy: Any) -> None:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError("nobody waits this long")

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url}, timeout_seconds=0.2)
    status, answer = await proxy.chat()
    assert (status, answer["error"]["code"]) == (504, "upstream_timeout")
    assert (await proxy.calls())[0].error_type == "upstream_timeout"


async def test_an_upstream_that_dies_in_mid_stream_is_not_made_to_look_whole(
    start_upstream: Any, start_proxy: Any
) -> None:
    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("half"))
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
        came = b""
        broken = False
        while not broken:
            try:
                came += await answer.content.readany()
            except aiohttp.ClientPayloadError:
                broken = True
            assert not answer.content.at_eof(), "it looks whole"
    half, error, rest = came.decode().split("\n\n")
    assert (half, rest) == (chunk("half").decode().strip(), "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "connection_lost"
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "connection_lost")
    assert json.loads(call.output)["choices"][0]["message"]["content"] == "half"


async def test_a_stream_that_ends_without_a_reason_is_incomplete(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    upstream = await start_upstream(replies.streaming(chunk("half")))
    proxy = await start_proxy({"main": upstream.url})
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
        assert await answer.read() == chunk("half")
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "incomplete_stream")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_closes_the_upstream_and_is_recorded(
    start_upstream: Any, start_proxy: Any, streamed: bool
) -> None:
    arrived, upstream_saw_it = asyncio.Event(), asyncio.Event()

    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if streamed:
                await response.prepare(request)
                await response.write(chunk("some"))
            arrived.set()
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            upstream_saw_it.set()
            raise
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})

    async def leave() -> None:
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
            await answer.content.readany()
            await asyncio.sleep(30)

    client = asyncio.create_task(leave())
    await asyncio.wait_for(arrived.wait(), 5)
    await asyncio.sleep(0.1)
    client.cancel()
    await asyncio.wait_for(upstream_saw_it.wait(), 5)
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.CLIENT_DISCONNECT, "client_left")
    if streamed:
        assert json.loads(call.output)["choices"][0]["message"]["content"] == "some"
    else:
        assert call.output == "null"


async def test_a_kept_connection_that_the_upstream_has_closed_is_no_error(start_proxy: Any, replies: Any) -> None:
    answer = json.dumps(replies.completion()).encode()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer))
        writer.write(answer)
        await reader.read(65536)  # the rest of this request, or the next one, which gets no answer
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    async with server:
        proxy = await start_proxy({"main": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
        assert [(await proxy.chat(str(number)))[0] for number in range(4)] == [200] * 4
        await proxy.session.close()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"{not json", 400, "invalid_request"),
        (b"[1]", 400, "invalid_request"),
        (b"\xff\xfe", 400, "invalid_request"),
        (b"[" * 100_000, 400, "invalid_request"),
        (b'{"x": "' + b"y" * 200_000 + b'"}', 413, "body_too_large"),
    ],
)
async def test_a_bad_body_is_refused_and_recorded(
    start_upstream: Any, start_proxy: Any, sent: bytes, status: int, code: str
) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, max_body_bytes=150_000)
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", data=sent) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == code
    assert upstream.bodies == []
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.REFUSED, code)
    json.loads(call.input)


async def test_a_bad_name_is_refused_and_recorded(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    status, answer = await proxy.chat(headers={"x-noria-node": "my node"})
    assert status == 400
    assert "x-noria-node" in answer["error"]["message"]
    assert (await proxy.calls())[0].status == CallStatus.REFUSED


async def test_the_models_are_the_upstreams(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    async with proxy.session.get(f"{proxy.url}/apps/a/nodes/n/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "m"


async def test_traces_are_sampled_whole(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": {"url": upstream.url, "token_ids": True}}, sampling_rate=0.5)
    asked = 0
    for number in range(1, 31):
        headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        for _ in range(2):
            status, _answer = await proxy.chat(headers=headers)
            asked += status == 200
    assert asked == 60
    calls = await proxy.calls()
    by_trace: dict[str, int] = {}
    for call in calls:
        by_trace[call.trace_id] = by_trace.get(call.trace_id, 0) + 1
    assert 4 < len(by_trace) < 26
    assert set(by_trace.values()) == {2}
    # A trace that is not recorded is passed on untouched: the upstream is not asked for tokens.
    assert sum("return_token_ids" in body for body in upstream.asked) == len(calls)
