"""Bugs that users of other LLM proxies reported about how calls end: errors, resets, clients that leave.

docs/peer_scenarios.md names the report behind each test.
"""

import asyncio
import json
import struct
from collections import Counter
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from noria.contracts.call import CallStatus

SSE = {"Content-Type": "text/event-stream"}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
BODY: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 9, "messages": [], "input": "hi"}


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: %b\n\n" % json.dumps(head).encode()


def named(kind: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **data}).encode())


DONE = b"data: [DONE]\n\n"
STOP = chunk({}, "stop")
BEGUN = {
    "/v1/chat/completions": chunk({"role": "assistant", "content": "half of it"}),
    "/v1/messages": named("message_start", message={"role": "assistant", "content": [], "usage": {"input_tokens": 5}})
    + named("content_block_start", index=0, content_block={"type": "text", "text": ""})
    + named("content_block_delta", index=0, delta={"type": "text_delta", "text": "half of it"}),
    "/v1/responses": named("response.created", response={"id": "r", "object": "response", "status": "in_progress"})
    + named("response.output_item.added", output_index=0, item={"id": "i", "type": "message", "content": []})
    + named("response.output_text.delta", item_id="i", output_index=0, content_index=0, delta="half of it"),
}
"""The beginning of a stream of each API."""


async def post(proxy: Any, path: str = PATHS[0], **more: Any) -> bytes:
    async with proxy.session.post(f"{proxy.url}{path}", json=BODY | more) as answer:
        assert answer.status == 200
        return bytes(await answer.read())


async def passed(start_upstream: Any, start_proxy: Any, replies: Any, *pieces: bytes, path: str = PATHS[0]) -> Any:
    """The one record of a stream of these pieces, which must have passed byte for byte."""
    upstream = await start_upstream(replies.streaming(*pieces))
    proxy = await start_proxy({"main": upstream.url})
    assert await post(proxy, path) == b"".join(pieces)
    [call] = await proxy.calls()
    return call


def reset(request: web.Request) -> None:
    """Break the connection off as a process that is killed does."""
    assert request.transport is not None
    request.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()


@pytest.mark.parametrize("path", PATHS)
async def test_an_upstream_that_is_reset_in_mid_stream_becomes_an_error_and_no_end(
    start_upstream: Any, start_proxy: Any, path: str
) -> None:
    asked = 0

    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(BEGUN[path])
        await asyncio.sleep(0.05)
        reset(request)
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": {"url": upstream.url, "retries": 3}})
    seen = b""
    async with proxy.session.post(f"{proxy.url}{path}", json=BODY) as answer:
        try:
            async for piece in answer.content.iter_any():
                seen += piece
        except aiohttp.ClientError:
            pass  # that the answer ends without its last chunk says the same once more
    assert seen.startswith(BEGUN[path])
    said = seen.removeprefix(BEGUN[path])
    assert b"error" in said
    event = json.loads(said.partition(b"data: ")[2].strip())
    assert event["error"]["message"]
    assert said.startswith(b"data: " if path == PATHS[0] else b"event: error\n")
    assert not any(end in seen for end in (b"[DONE]", b"message_stop", b"response.completed", b'"stop"'))
    assert asked == 1  # bytes had gone out, so it is not tried again
    [call] = await proxy.calls()
    assert call.status is CallStatus.UPSTREAM_ERROR
    assert "half of it" in call.output


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (PATHS[0], b'data: {"error": {"message": "Overloaded", "type": "overloaded_error", "code": 529}}\n\n'),
        (PATHS[1], named("error", error={"type": "overloaded_error", "message": "Overloaded"})),
        (PATHS[2], named("error", code="server_error", message="Overloaded", param=None, sequence_number=4)),
        (
            PATHS[2],
            named("response.failed", response={"status": "failed", "error": {"code": "x", "message": "Overloaded"}}),
        ),
    ],
    ids=["chat", "messages", "responses-error", "responses-failed"],
)
async def test_an_error_inside_a_stream_passes_and_is_no_success(
    start_upstream: Any, start_proxy: Any, replies: Any, path: str, error: bytes
) -> None:
    call = await passed(start_upstream, start_proxy, replies, BEGUN[path], error, path=path)
    assert call.status is CallStatus.UPSTREAM_ERROR
    assert "half of it" in call.output


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("when", ["before the first byte", "in mid-stream", "unstreamed"])
async def test_a_client_that_leaves_frees_the_upstream_and_leaves_one_record(
    start_upstream: Any, start_proxy: Any, path: str, when: str
) -> None:
    arrived, freed = asyncio.Event(), asyncio.Event()

    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        try:
            if when == "in mid-stream":
                await response.prepare(request)
                await response.write(BEGUN[path])
            arrived.set()
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            freed.set()
            raise
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})

    async def call_and_stay() -> None:
        body = BODY | {"stream": when != "unstreamed"}
        async with proxy.session.post(f"{proxy.url}{path}", json=body) as answer:
            await answer.content.readany()
            await asyncio.sleep(30)

    client = asyncio.create_task(call_and_stay())
    await asyncio.wait_for(arrived.wait(), 5)
    await asyncio.sleep(0.1)
    client.cancel()
    await asyncio.wait_for(freed.wait(), 1)
    [call] = await proxy.calls()
    assert call.status is CallStatus.CLIENT_DISCONNECT
    assert ("half of it" in call.output) is (when == "in mid-stream")


async def test_clients_that_leave_leave_nothing_behind(start_upstream: Any, start_proxy: Any) -> None:
    async def reply(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(chunk({"content": "x"}))
        await asyncio.sleep(30 if body.get("stay") else 0)
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    await post(proxy)

    def tasks() -> Counter[str]:
        return Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]

    async def leave() -> None:
        answer = await proxy.session.post(f"{proxy.url}{PATHS[0]}", json=BODY | {"stay": True})
        await answer.content.readany()
        answer.close()

    before = tasks()
    await asyncio.gather(*(leave() for _ in range(40)))
    for _ in range(100):
        if len(await proxy.calls()) == 41 and sum((tasks() - before).values()) <= 1:
            break
        await asyncio.sleep(0.02)
    # The server of aiohttp keeps one task for each open connection; those of the clients that left are gone.
    assert sum((tasks() - before).values()) <= 1, tasks() - before
    assert Counter(call.status for call in await proxy.calls())[CallStatus.CLIENT_DISCONNECT] == 40


async def test_each_call_has_a_record_whatever_ids_and_keys_repeat(start_upstream: Any, start_proxy: Any) -> None:
    async def reply(request: web.Request, body: Any) -> web.StreamResponse:
        if not body["stream"]:
            return web.json_response({"id": "", "choices": [{"index": 0, "message": {}, "finish_reason": "stop"}]})
        response = web.StreamResponse(headers={**SSE, "x-request-id": "always-the-same"})
        await response.prepare(request)
        await response.write(chunk({"content": "a"}, id="") + STOP + chunk(usage={"total_tokens": 3}, id="") + DONE)
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    headers = {"x-request-id": "1", "Idempotency-Key": "k", "traceparent": f"00-{'a' * 32}-{'1' * 16}-01"}
    uids = []
    for number in range(12):
        body = BODY | {"stream": number % 2 == 0, "stream_options": {"include_usage": True}, "user": "u"}
        async with proxy.session.post(f"{proxy.url}{PATHS[0]}", json=body, headers=headers) as answer:
            await answer.read()
            uids.append(answer.headers["x-noria-call-uid"])
    assert sorted(call.uid for call in await proxy.calls()) == sorted(uids)
    assert len(set(uids)) == len(upstream.bodies) == 12


async def test_a_stream_falls_back_before_its_first_byte(start_upstream: Any, start_proxy: Any, replies: Any) -> None:
    async def overloaded(_request: web.Request, _body: Any) -> web.Response:
        return web.json_response({"error": {"type": "overloaded_error", "message": "Overloaded"}}, status=529)

    busy = await start_upstream(overloaded)
    spare = await start_upstream(replies.streaming(chunk({"content": "spare"}), STOP, DONE))
    proxy = await start_proxy({"main": {"url": busy.url, "fallbacks": ["spare"]}, "spare": spare.url})
    assert b"spare" in await post(proxy)
    assert (len(busy.bodies), len(spare.bodies)) == (1, 1)
    [call] = await proxy.calls()
    assert call.status is CallStatus.OK
    assert json.loads(call.output)["choices"][0]["message"]["content"] == "spare"
