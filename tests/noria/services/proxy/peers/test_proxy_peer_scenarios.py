"""What the tests of rLLM's model gateway pin down, where it makes sense here.

docs/peer_scenarios.md lists every one of their scenarios, with a verdict and the test of ours.
"""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from aiohttp import web

from noria.contracts.call import CallStatus
from noria.contracts.call_json import call_from_json
from noria.release.registry import Registry

TRACE = "0af7651916cd43dd8448eb211c80319c"
ORIGIN = {"traceparent": f"00-{TRACE}-{'1' * 16}-01", "x-noria-app": "dispatch", "x-noria-node": "reply"}


def chat_events(*deltas: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    """A chat stream of these deltas; `more` are fields that each choice has beside its delta."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None, **more} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


async def streamed(proxy: Any, path: str = "/v1/chat/completions", **more: Any) -> bytes:
    body = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **more}
    async with proxy.session.post(f"{proxy.url}{path}", json=body) as answer:
        assert answer.status == 200
        return bytes(await answer.read())


@pytest.mark.parametrize("stream", [False, True])
async def test_agents_at_once_keep_their_own_calls_and_tokens(
    start_upstream: Any, start_proxy: Any, replies: Any, stream: bool
) -> None:
    def sampled(number: int) -> dict[str, Any]:
        logprobs = {"content": [{"token": "x", "logprob": -number / 8, "bytes": None, "top_logprobs": []}]}
        return {"token_ids": [150_000 + number], "logprobs": logprobs}

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        number = int(body["messages"][-1]["content"])
        await asyncio.sleep(number % 3 / 1000)  # so that answers overtake each other
        if body.get("stream"):
            head = {"id": "c", "choices": [], "prompt_token_ids": [number]}
            text = b"data: %b\n\n" % json.dumps(head).encode() + chat_events({"content": "x"}, **sampled(number))
            return await replies.streaming(text[:90], text[90:])(request, body)
        answer = replies.completion("x", prompt_token_ids=[number])
        answer["choices"][0] |= sampled(number)
        return web.json_response(answer)

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})

    async def agent(number: int) -> None:
        headers = {"traceparent": f"00-{number + 1:032x}-{'1' * 16}-01"}
        for turn in range(3):
            body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": str(3 * number + turn)}]}
            async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()

    await asyncio.gather(*map(agent, range(25)))
    traces: dict[int, list[Any]] = {}
    for call in await proxy.calls():
        traces.setdefault(int(call.trace_id, 16) - 1, []).append(call)
    assert sorted(traces) == list(range(25))
    for number, calls in traces.items():
        asked = [int(json.loads(call.input)["messages"][0]["content"]) for call in calls]
        assert asked == [3 * number, 3 * number + 1, 3 * number + 2]
        assert [call.tokens.prompt_token_ids for call in calls] == [(content,) for content in asked]
        assert [call.tokens.completion_token_ids for call in calls] == [(150_000 + content,) for content in asked]
        assert [call.tokens.logprobs for call in calls] == [(-content / 8,) for content in asked]


async def test_what_was_recorded_before_a_failure_stays(start_upstream: Any, start_proxy: Any, replies: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    for content in ("one", "two"):
        assert (await proxy.chat(content, headers=ORIGIN))[0] == 200

    async def fail(_request: web.Request, _body: Any) -> web.Response:
        return web.Response(status=500, text="worker died")

    upstream.reply = fail
    async with proxy.session.post(
        f"{proxy.url}/v1/chat/completions", json={"model": "m", "messages": []}, headers=ORIGIN
    ) as answer:
        assert (answer.status, await answer.text()) == (500, "worker died")
    calls = await proxy.calls()
    assert [call.status for call in calls] == [CallStatus.OK, CallStatus.OK, CallStatus.UPSTREAM_ERROR]
    assert {call.trace_id for call in calls} == {TRACE}


async def test_an_upstream_that_comes_back_is_used_at_once(start_proxy: Any, wires: Any, replies: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    proxy = await start_proxy({"main": f"http://127.0.0.1:{port}"})
    assert (await proxy.chat())[0] == 502
    await wires.upstream(wires.response(json.dumps(replies.completion()).encode()), port)
    assert (await proxy.chat())[0] == 200


async def test_an_upstream_may_stand_below_a_path(start_proxy: Any, wires: Any) -> None:
    upstream = await wires.upstream(wires.response())
    proxy = await start_proxy({"main": f"{upstream.url}/server/2"})
    await proxy.chat()
    async with proxy.session.get(f"{proxy.url}/v1/models?limit=10") as answer:
        assert answer.status == 200
    assert [asked.line.split()[1] for asked in upstream.asked] == [
        "/server/2/v1/chat/completions",
        "/server/2/v1/models?limit=10",
    ]


@pytest.mark.parametrize("node", ["harbor/hello-world:0", "harbor%2Fhello-world%3A0"])
async def test_a_label_that_is_no_name_is_refused_and_not_recorded_under_another(
    start_upstream: Any, start_proxy: Any, node: str
) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with proxy.session.post(f"{proxy.url}/apps/a/nodes/{node}/v1/chat/completions", json=body) as answer:
        assert 400 <= answer.status < 500
    async with proxy.session.post(
        f"{proxy.url}/v1/chat/completions", json=body, headers={"x-noria-node": node}
    ) as answer:
        assert answer.status == 400
        assert "x-noria-node" in (await answer.json())["error"]["message"]
    assert upstream.bodies == []
    assert {call.status for call in await proxy.calls()} == {CallStatus.REFUSED}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_upstream_sends_unasked_stays(
    start_upstream: Any, start_proxy: Any, replies: Any, stream: bool
) -> None:
    unasked = {"stop_reason": None, "kv_transfer_params": None}

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if stream:
            return await replies.streaming(chat_events({"content": "hi"}, token_ids=[7], **unasked))(request, body)
        answer = replies.completion(prompt_logprobs=None, prompt_token_ids=[1])
        answer["choices"][0] |= unasked | {"token_ids": [7]}
        return web.json_response(answer)

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    if stream:
        seen = (await streamed(proxy)).decode()
        assert seen.count('"stop_reason"') == seen.count('"kv_transfer_params"') == 1
    else:
        answer = (await proxy.chat())[1]
        assert answer.pop("prompt_logprobs") is None
        assert unasked.items() <= answer["choices"][0].items()
        seen = json.dumps(answer)
    assert "token_ids" not in seen


@pytest.mark.parametrize(
    ("prompt", "ids", "logprobs"),
    [
        (None, [4, 5], [-0.5, -0.1]),
        ([1], None, [-0.5, -0.1]),
        ([1], [4, 5], None),
        ([1], [4, 5], [-0.5, None]),
        ([1], [4, 5], [-0.5]),
        ([1], ["4", "5"], [-0.5, -0.1]),
    ],
)
async def test_tokens_that_are_missing_null_or_ragged_cost_the_tokens_and_not_the_record(
    start_upstream: Any, start_proxy: Any, replies: Any, prompt: Any, ids: Any, logprobs: Any
) -> None:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        answer = replies.completion("ab", prompt_token_ids=prompt)
        content = logprobs and [{"token": "x", "logprob": value} for value in logprobs]
        answer["choices"][0] |= {"token_ids": ids, "logprobs": {"content": content}}
        return web.json_response(answer)

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    assert (await proxy.chat())[1]["choices"][0]["message"]["content"] == "ab"
    [call] = await proxy.calls()
    assert (call.status, call.tokens) == (CallStatus.OK, None)


async def test_the_version_is_the_one_that_the_call_was_sent_to(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    first, second = "dispatch.reply.r00001", "dispatch.reply.r00002"
    go_on, arrived = asyncio.Event(), asyncio.Event()

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response(replies.completion(body["model"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        arrived.set()
        await go_on.wait()
        await response.write(chat_events({"content": body["model"]}))
        return response

    policy = await start_upstream(reply)
    proxy = await start_proxy({"policy": policy.url})
    registry = Registry(proxy.store)

    async def until(version: str) -> None:
        registry.promote("dispatch.reply", version, "c", by="test", why="test")
        for _ in range(250):
            if (await proxy.chat(headers=ORIGIN))[1]["choices"][0]["message"]["content"] == version:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{version} is not followed")

    await until(first)
    labels = {"x-noria-app": "dispatch", "x-noria-node": "reply", "traceparent": f"00-{'c' * 32}-{'1' * 16}-01"}
    body = {"model": "m", "stream": True, "messages": []}
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body, headers=labels) as answer:
        await arrived.wait()
        await until(second)
        go_on.set()
        assert first.encode() in await answer.read()
    [call] = [call for call in await proxy.calls() if call.trace_id == "c" * 32]
    assert (call.policy_version, call.status) == (first, CallStatus.OK)


async def test_an_agent_that_knows_only_its_sdk_is_recorded_turn_by_turn_and_scored(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = f"answer {len(body['messages'])}"
        if body.get("stream"):
            return await replies.streaming(chat_events({"role": "assistant", "content": text}))(request, body)
        return web.json_response(replies.completion(text))

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"main": upstream.url})
    client = openai.AsyncOpenAI(
        base_url=f"{proxy.url}/apps/dispatch/nodes/reply/v1",
        api_key="the-agents-own",
        max_retries=0,
        default_headers={"traceparent": ORIGIN["traceparent"]},
    )
    messages: list[dict[str, Any]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}"})
        if turn == 1:
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            content = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        else:
            answer = await client.chat.completions.create(model="m", messages=messages)
            content = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": content})
    await client.close()
    feedback = {"trace_id": TRACE, "name": "solved", "value": 1.0, "source": "rule", "scorer": "test"}
    async with proxy.session.post(f"{proxy.url}/v1/feedback", json=feedback) as said:
        assert said.status == 200
    await proxy.calls()
    key = {"Authorization": f"Bearer {proxy.config.trainer_key()}"}
    async with proxy.session.get(f"{proxy.url}/v1/traces/{TRACE}", headers=key) as trace:
        calls = [call_from_json(call) for call in (await trace.json())["calls"]]
    assert [json.loads(call.input)["messages"] for call in calls] == [messages[:1], messages[:3], messages[:5]]
    said = [json.loads(call.output)["choices"][0]["message"]["content"] for call in calls]
    assert said == ["answer 1", "answer 3", "answer 5"]
    assert {call.target for call in calls} == {"dispatch.reply"}
    assert [(score.name, score.value) for score in proxy.store.scores_of_trace(TRACE)] == [("solved", 1.0)]
