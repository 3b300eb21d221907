"""Bugs that users of other LLM proxies reported about what passes in a stream and what is recorded of it.

docs/peer_scenarios.md names the report behind each test.
"""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from noria.contracts.call import CallStatus

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "stream": True, "messages": []}
DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: %b\n\n" % json.dumps(head).encode()


STOP = chunk({}, "stop")


def tool(index: int | None = 0, arguments: str = "", **more: Any) -> dict[str, Any]:
    """A tool-call delta; `id` and `name` where this fragment has them."""
    function = {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
    return {"tool_calls": [({} if index is None else {"index": index}) | more | {"function": function}]}


async def post(proxy: Any, **more: Any) -> bytes:
    async with proxy.session.post(f"{proxy.url}{CHAT}", json=BODY | more) as answer:
        assert answer.status == 200
        return bytes(await answer.read())


async def passed(start_upstream: Any, start_proxy: Any, replies: Any, *pieces: bytes) -> Any:
    """The one record of a stream of these pieces, which must have passed byte for byte."""
    upstream = await start_upstream(replies.streaming(*pieces))
    proxy = await start_proxy({"main": upstream.url})
    assert await post(proxy) == b"".join(pieces)
    [call] = await proxy.calls()
    return call


USAGE = {
    "prompt_tokens": 8,
    "completion_tokens": 3,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


@pytest.mark.parametrize(
    "pieces",
    [
        [chunk({"content": "a"}), STOP, chunk(usage=USAGE), DONE],
        [chunk({"content": "a"}), chunk({}, "stop", usage=USAGE), DONE],
        [chunk({"content": "a"}), STOP, chunk({}, usage=USAGE), chunk(), DONE],
        [chunk({"content": "a"}, usage=None), chunk({}, "stop", usage=None), chunk(usage=USAGE), DONE],
        [chunk({"content": "a"}, usage={**USAGE, "completion_tokens": 1}), chunk({}, "stop", usage=USAGE), DONE],
    ],
    ids=["of-its-own", "with-the-last-choice", "not-the-last", "null-before", "growing"],
)
async def test_usage_is_recorded_wherever_it_stands(
    start_upstream: Any, start_proxy: Any, replies: Any, pieces: list[bytes]
) -> None:
    call = await passed(start_upstream, start_proxy, replies, *pieces)
    assert (call.status, call.usage) == (CallStatus.OK, USAGE)
    assert json.loads(call.output)["usage"] == USAGE


async def test_deltas_of_parallel_tool_calls_pass_one_by_one_and_are_recorded_apart(
    start_upstream: Any, start_proxy: Any
) -> None:
    pieces = [
        chunk({"role": "assistant", "content": None, **tool(0, id="t0", type="function", name="find")}),
        chunk(tool(1, '{"n', id="t1", type="function", name="buy")),
        chunk(tool(0, '{"q":')),
        chunk(tool(1, '":2}', id="")),
        chunk(tool(0, "1}", id="null")),
        chunk(tool(2, "{}", id="t2", type="function", name="stop")),
        chunk({}, "tool_calls"),
        chunk(usage=USAGE),
    ]
    go_on = asyncio.Event()

    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await go_on.wait()
            go_on.clear()
        await response.write(DONE)
        return response

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    async with proxy.session.post(
        f"{proxy.url}{CHAT}", json=BODY | {"stream_options": {"include_usage": True}}
    ) as answer:
        for piece in pieces:
            assert await asyncio.wait_for(answer.content.readexactly(len(piece)), 5) == piece
            go_on.set()
        assert await answer.content.read() == DONE
    [call] = await proxy.calls()
    tools = json.loads(call.output)["choices"][0]["message"]["tool_calls"]
    assert [(t["id"], t["function"]["name"], t["function"]["arguments"]) for t in tools] == [
        ("t0", "find", '{"q":1}'),
        ("t1", "buy", '{"n":2}'),
        ("t2", "stop", "{}"),
    ]


@pytest.mark.parametrize("index", [0, None], ids=["all-with-index-0", "without-index"])
async def test_tool_calls_that_only_their_ids_tell_apart_are_recorded_apart(
    start_upstream: Any, start_proxy: Any, replies: Any, index: int | None
) -> None:
    call = await passed(
        start_upstream,
        start_proxy,
        replies,
        chunk(tool(index, '{"q":1}', id="t0", type="function", name="find")),
        chunk(tool(index, '{"q":2}', id="t1", type="function", name="find")),
        chunk({}, "tool_calls"),
        DONE,
    )
    tools = json.loads(call.output)["choices"][0]["message"]["tool_calls"]
    assert [(t["id"], t["function"]["arguments"]) for t in tools] == [("t0", '{"q":1}'), ("t1", '{"q":2}')]


async def test_choices_of_a_stream_are_recorded_apart(start_upstream: Any, start_proxy: Any, replies: Any) -> None:
    def event(index: int, text: str, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
        return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()

    pieces = [event(1, "vi"), event(0, "r"), event(1, "olet", "stop"), event(0, "ed", "length"), DONE]
    call = await passed(start_upstream, start_proxy, replies, *pieces)
    choices = json.loads(call.output)["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "red", "length"),
        (1, "violet", "stop"),
    ]


async def test_chunks_that_no_client_expects_pass_and_harm_no_record(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    filtered = {"index": 0, "finish_reason": None, "content_filter_results": {"hate": {"filtered": False}}}
    call = await passed(
        start_upstream,
        start_proxy,
        replies,
        b": connected\n\n",
        b'data: {"choices":[],"created":0,"id":"","model":"","prompt_filter_results":[{"prompt_index":0}]}\n\n',
        b"event: ping\ndata: {}\n\n",
        chunk({"role": "assistant", "reasoning_content": "let me "}),
        chunk({"reasoning_content": "see", "reasoning": "so"}),
        b": keep-alive\r\n\r\n",
        b"data: %b\n\n" % json.dumps({"id": "", "choices": [filtered]}).encode(),
        chunk({"content": "yes"}, provider_specific={"x": [1]}),
        STOP,
        DONE,
    )
    assert (call.status, call.finish_reasons) == (CallStatus.OK, ("stop",))
    message = json.loads(call.output)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "let me see")
    assert message["reasoning"] == "so"


async def test_characters_cut_anywhere_arrive_whole(start_upstream: Any, start_proxy: Any, replies: Any) -> None:
    raw = json.dumps({"id": "c", "choices": [{"index": 0, "delta": {"content": "北京 🌍 é"}}]}, ensure_ascii=False)
    sent = b"data: %b\n\n" % raw.encode() + STOP + DONE
    call = await passed(start_upstream, start_proxy, replies, *(bytes([byte]) for byte in sent))
    assert json.loads(call.output)["choices"][0]["message"]["content"] == "北京 🌍 é"


@pytest.mark.parametrize("text", ["a\x00b", "a\\u0000b", "\ud800 alone", "🌍"])
async def test_text_that_databases_dislike_is_recorded(
    start_upstream: Any, start_proxy: Any, replies: Any, text: str
) -> None:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        return web.Response(body=json.dumps(replies.completion(text)).encode(), content_type="application/json")

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    assert (await proxy.chat(text))[1]["choices"][0]["message"]["content"] == text
    assert (await proxy.chat("after"))[0] == 200
    first, second = await proxy.calls()
    assert json.loads(first.input)["messages"][0]["content"] == text
    assert json.loads(first.output)["choices"][0]["message"]["content"] == text
    assert json.loads(second.input)["messages"][0]["content"] == "after"


ODD = (
    b'{"tools": [{"parameters": {"type": "object", "required": ["p"], "additionalProperties": false}}],'
    b' "model":"m", "seed": 16559892803651312312311122, "big": 9007199254740993, "f": 0.1000, "e": 1E+2,'
    b' "messages": [ {"role": "user", "content": "\\u00fc \\/"} ], "x_unknown": {"b": 1, "a": null}}'
)


def literally(data: bytes) -> Any:
    """JSON with the order of its keys, and numbers as they are written."""
    return json.loads(data, object_pairs_hook=list, parse_int=str, parse_float=str)


@pytest.mark.parametrize("token_ids", [False, True])
async def test_a_request_keeps_its_order_and_its_numbers(
    start_upstream: Any, start_proxy: Any, token_ids: bool
) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": token_ids}})
    async with proxy.session.post(f"{proxy.url}{CHAT}", data=ODD) as answer:
        assert answer.status == 200
    [sent] = upstream.bodies
    if token_ids:
        asked = [("return_token_ids", True), ("logprobs", True)]
        assert [pair for pair in literally(sent) if pair not in asked] == literally(ODD)
        assert all(pair in literally(sent) for pair in asked)
    else:
        assert sent == ODD
    [call] = await proxy.calls()
    assert call.input == ODD.decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_tokens_are_taken_out_of_keeps_its_numbers(
    start_upstream: Any, start_proxy: Any, replies: Any, stream: bool
) -> None:
    left = b'{"usage": {"cost": 0.0000100, "n": 16559892803651312312311122}, "id":"\\u00fc",'
    inner = b'"delta": {"content": "a"}' if stream else b'"message": {"content": "a"}'
    choice = b'"choices": [{"index": 0, %b, "finish_reason": "stop"' % inner
    tokens = b', "token_ids": [5], "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}'
    plain, full = (left + choice + more + b"}]}" for more in (b"", tokens))

    async def reply(request: web.Request, body: Any) -> web.StreamResponse:
        if stream:
            return await replies.streaming(b"data: %b\n\n" % full, DONE)(request, body)
        return web.Response(body=full, content_type="application/json")

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    seen = await post(proxy, stream=stream)
    seen = seen.removeprefix(b"data: ").removesuffix(b"\n\n" + DONE) if stream else seen
    assert literally(seen) == literally(plain)


async def test_a_stream_with_fewer_tokens_than_were_sampled_gives_no_tokens(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    """A server whose tool parser swallows chunks leaves out their ids and their logprobs alike; usage tells."""

    def event(ids: list[int], **more: Any) -> bytes:
        logprobs = {"content": [{"token": "x", "logprob": -0.5} for _ in ids]}
        choice = {"index": 0, "delta": {"content": "x"}, "token_ids": ids, "logprobs": logprobs, "finish_reason": None}
        return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice], **more}).encode()

    for usage, kept in ((3, (4, 5, 6)), (5, None)):
        counted = {"prompt_tokens": 2, "completion_tokens": usage, "total_tokens": 2 + usage}
        pieces = [event([4], prompt_token_ids=[1, 2]), event([5, 6]), STOP, chunk(usage=counted), DONE]
        upstream = await start_upstream(replies.streaming(*pieces))
        proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
        await post(proxy)
        call = (await proxy.calls())[-1]
        assert call.status is CallStatus.OK
        assert (call.tokens and call.tokens.completion_token_ids) == kept
