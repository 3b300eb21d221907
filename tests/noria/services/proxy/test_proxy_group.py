"""A whole group of rollouts through real proxies: what its upstreams are asked, as their own logs show."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from noria.contracts.call import Arm, Call, CallStatus
from noria.contracts.rollout import Directive
from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire.replay import replay

ORIGIN = "a" * 32
MEMBERS = 6

NODES: dict[str, tuple[str, Kind, dict[str, Any]]] = {
    "plan": ("/v1/messages", Kind.MESSAGE, {"max_tokens": 9, "messages": [{"role": "user", "content": "plan"}]}),
    "search": ("/v1/responses", Kind.RESPONSE, {"input": "search"}),
    "index": ("/v1/embeddings", Kind.EMBEDDING, {"input": ["one", "two"]}),
    "fill": ("/v1/completions", Kind.COMPLETION, {"prompt": "fill"}),
    "reply": ("/v1/chat/completions", Kind.CHAT, {"messages": [{"role": "user", "content": "reply"}]}),
}
"""The pinned nodes of the agent, one for each API."""


def directive(member: int, **changes: Any) -> Directive:
    values = {
        "model": "dispatch.router.r00003",
        "invariant": ORIGIN,
        "trace_id": f"{member + 1:032x}",
        "round": "dispatch.router.r00004",
        "sample_id": 7,
        "group": 1,
        "member": member,
        "seed": 100 * member,
    }
    return Directive(**{**values, **changes})


class Answers:
    """An upstream of every API that never says the same twice, streamed where it is asked for a stream."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.count = 0
        self.seconds = seconds

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.count += 1
        said = f"answer {self.count}"
        await asyncio.sleep(self.seconds)
        kind = next(kind for path, kind, _ in NODES.values() if path == request.path)
        answer = replay(kind, json.dumps(_answer(kind, said, float(self.count))), body)
        if answer.events is None:
            return web.Response(body=answer.body, content_type=answer.content_type)
        response = web.StreamResponse(headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        for event in answer.events:
            await response.write(event)
        return response


def _answer(kind: Kind, said: str, number: float) -> dict[str, Any]:
    message = {"role": "assistant", "content": said}
    text = {"type": "output_text", "text": said, "annotations": []}
    output = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [text]}
    return {
        Kind.CHAT: {
            "id": "c1",
            "object": "chat.completion",
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        },
        Kind.COMPLETION: {
            "id": "c1",
            "object": "text_completion",
            "model": "m",
            "choices": [{"index": 0, "text": said, "finish_reason": "stop", "logprobs": None}],
        },
        Kind.RESPONSE: {"id": "r1", "object": "response", "model": "m", "status": "completed", "output": [output]},
        Kind.EMBEDDING: {
            "object": "list",
            "model": "m",
            "data": [{"object": "embedding", "index": i, "embedding": [number, float(i)]} for i in range(2)],
        },
        Kind.MESSAGE: {
            "id": "msg1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": said}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        },
    }[kind]


def _said(kind: Kind, raw: str) -> str:
    """What a caller was told, streamed or not."""
    if not raw.startswith(("data:", "event:")):
        answer = json.loads(raw)
        said = {
            Kind.CHAT: lambda: answer["choices"][0]["message"]["content"],
            Kind.COMPLETION: lambda: answer["choices"][0]["text"],
            Kind.RESPONSE: lambda: answer["output"][0]["content"][0]["text"],
            Kind.EMBEDDING: lambda: f"answer {answer['data'][0]['embedding'][0]:g}",
            Kind.MESSAGE: lambda: answer["content"][0]["text"],
        }[kind]()
        return str(said)
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if kind is Kind.CHAT:
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    if kind is Kind.COMPLETION:
        return "".join(choice["text"] for event in events for choice in event["choices"])
    if kind is Kind.RESPONSE:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


async def call(proxy: Any, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    async with proxy.session.post(f"{proxy.url}{path}", json={"model": "m", **body}, headers=headers) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
        return str(raw)


async def ask(proxy: Any, node: str, headers: dict[str, str], *, stream: bool, **more: Any) -> str:
    path, kind, body = NODES[node]
    streamed = {"stream": True} if stream and kind is not Kind.EMBEDDING else {}
    raw = await call(proxy, path, {**body, **streamed, **more}, headers)
    assert raw.startswith(("data:", "event:")) == bool(streamed)
    return _said(kind, raw)


async def play(proxy: Any, member: int, nodes: Any = NODES, **more: Any) -> dict[str, str]:
    """One rollout of the group: the target node twice, every other once; odd members stream."""
    heard = {}
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": "route me"}]}
        await call(proxy, "/v1/chat/completions", body, proxy.directed(directive(member), "router"))
    for node in nodes:
        headers = proxy.directed(directive(member), node)
        heard[node] = await ask(proxy, node, headers, stream=member % 2 == 1, **more)
    return heard


async def record_origin(proxy: Any, nodes: Any = NODES) -> dict[str, str]:
    """A user's trace; what each node was told. Every second node streams."""
    heard = {}
    for number, node in enumerate(("router", *nodes)):
        headers = {"traceparent": f"00-{ORIGIN}-{'1' * 16}-01", "x-noria-app": "dispatch", "x-noria-node": node}
        if node == "router":
            await call(proxy, "/v1/chat/completions", {"messages": [{"role": "user", "content": "route me"}]}, headers)
        else:
            heard[node] = await ask(proxy, node, headers, stream=number % 2 == 0)
    return heard


def rollouts(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.arm is Arm.ROLLOUT and call.process_node != "router"]


@pytest.fixture
async def upstreams(start_upstream: Any) -> Any:
    return await start_upstream(Answers()), await start_upstream(Answers())


async def start(start_proxy: Any, live: Any, policy: Any, **settings: Any) -> Any:
    return await start_proxy({"live": live.url, "policy": {"url": policy.url, "token_ids": True}}, **settings)


@pytest.mark.parametrize("more", [{}, {"messages": [], "input": "new", "prompt": "new"}])
async def test_a_group_asks_the_default_upstream_nothing(
    start_proxy: Any, upstreams: Any, more: dict[str, Any]
) -> None:
    """Neither with the inputs of the origin trace nor, by occurrence, with others."""
    live, policy = upstreams
    proxy = await start(start_proxy, live, policy, miss_policy="fail")
    told = await record_origin(proxy)
    assert len(live.bodies) == len(NODES) + 1
    live.bodies.clear()
    heard = await asyncio.gather(*(play(proxy, member, **more) for member in range(MEMBERS)))
    assert heard == [told] * MEMBERS
    assert live.bodies == [], "the upstream's own log"
    assert Counter(asked["seed"] for asked in policy.asked) == Counter(
        100 * member + occurrence for member in range(MEMBERS) for occurrence in range(2)
    )
    calls = await proxy.calls()
    origin = {call.process_node: call.uid for call in calls if call.trace_id == ORIGIN}
    pinned = rollouts(calls)
    assert len(pinned) == MEMBERS * len(NODES)
    for call in pinned:
        assert call.status is CallStatus.OK
        assert call.attributes["pinned"] == ("occurrence" if more else "exact")
        assert call.attributes["recorded_uid"] == origin[call.process_node]


async def test_what_a_group_misses_is_asked_once_at_temperature_zero(start_proxy: Any, start_upstream: Any) -> None:
    live, policy = await start_upstream(Answers(seconds=0.05)), await start_upstream(Answers())
    proxy = await start(start_proxy, live, policy)
    await record_origin(proxy, ["reply"])
    live.bodies.clear()
    heard = await asyncio.gather(*(play(proxy, member, temperature=1.3) for member in range(MEMBERS)))
    assert all(one == heard[0] for one in heard)
    misses = NODES.keys() - {"reply"}
    assert len(live.bodies) == len(misses), "one call a node for the whole group"
    for asked in live.asked:
        assert asked["temperature"] == (1.3 if NODES["index"][2].items() <= asked.items() else 0)
        assert "stream" not in asked
    pinned = [call for call in rollouts(await proxy.calls()) if call.process_node in misses]
    assert {call.attributes["pinned"] for call in pinned} == {"miss"}, "for the trajectory each of them is one"
    asked_uid = {call.process_node: call.uid for call in pinned if "recorded_uid" not in call.attributes}
    assert asked_uid.keys() == misses
    for call in pinned:
        assert call.attributes.get("recorded_uid", call.uid) == asked_uid[call.process_node]
    assert len(pinned) == MEMBERS * len(misses)


async def test_two_proxies_tell_one_group_the_same(start_proxy: Any, start_upstream: Any) -> None:
    live, policy = await start_upstream(Answers(seconds=0.05)), await start_upstream(Answers())
    proxies = [await start(start_proxy, live, policy) for _ in range(2)]
    await record_origin(proxies[0], ["reply"])
    await proxies[0].calls()
    live.bodies.clear()
    nodes = ["search", "index"]
    heard = await asyncio.gather(*(play(proxies[member % 2], member, nodes) for member in range(MEMBERS)))
    assert all(one == heard[0] for one in heard)
    assert len(nodes) <= len(live.bodies) <= 2 * len(nodes), "at most once a proxy, where both ask at one time"
    live.bodies.clear()
    for proxy in proxies:
        assert (await play(proxy, MEMBERS, nodes))["search"] == heard[0]["search"]
    assert live.bodies == []


async def test_another_group_is_asked_for_on_its_own(start_proxy: Any, upstreams: Any) -> None:
    live, policy = upstreams
    proxy = await start(start_proxy, live, policy)
    await record_origin(proxy, [])
    live.bodies.clear()
    heard = [
        await ask(proxy, "reply", proxy.directed(directive(member, group=group), "reply"), stream=False)
        for member, group in enumerate((1, 1, 2, 2))
    ]
    assert heard[0] == heard[1] != heard[2] == heard[3]
    assert len(live.bodies) == 2


async def test_a_miss_that_fails_is_each_callers_own_and_not_kept(start_proxy: Any, upstreams: Any) -> None:
    live, policy = upstreams
    proxy = await start(start_proxy, live, policy)
    await record_origin(proxy, [])
    working, live.reply = live.reply, fail
    for member in range(2):
        status, answer = await proxy.chat("new", headers=proxy.directed(directive(member), "reply"))
        assert (status, answer["error"]["message"]) == (503, "overloaded")
    live.reply = working
    statuses = [(await proxy.chat("new", headers=proxy.directed(directive(m), "reply")))[0] for m in range(2)]
    assert statuses == [200, 200]
    calls = rollouts(await proxy.calls())
    assert [call.status for call in calls] == [CallStatus.UPSTREAM_ERROR] * 2 + [CallStatus.OK] * 2
    assert calls[3].output == calls[2].output


async def fail(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "overloaded"}}, status=503)


async def test_one_who_leaves_while_a_miss_is_asked_leaves_it_to_the_others(
    start_proxy: Any, start_upstream: Any
) -> None:
    live, policy = await start_upstream(Answers()), await start_upstream(Answers())
    proxy = await start(start_proxy, live, policy)
    await record_origin(proxy, [])
    begun, go = asyncio.Event(), asyncio.Event()
    working = live.reply

    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        begun.set()
        await go.wait()
        return await working(request, body)

    live.reply = held
    asking = []
    for member in range(3):
        headers = proxy.directed(directive(member), "reply")
        asking.append(asyncio.ensure_future(ask(proxy, "reply", headers, stream=False)))
        await begun.wait()
        await asyncio.sleep(0.05)  # until the others wait for the first
    asks, waits, staying = asking
    asks.cancel()
    waits.cancel()
    await asyncio.sleep(0.05)
    go.set()
    assert (await asyncio.wait_for(staying, 10)).startswith("answer ")
    calls = rollouts(await proxy.calls())
    assert sorted(call.status for call in calls) == [CallStatus.CLIENT_DISCONNECT] * 2 + [CallStatus.OK]
