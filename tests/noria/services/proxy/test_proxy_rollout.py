import json
from typing import Any

import pytest
from aiohttp import web

from noria.contracts.call import Arm, CallStatus
from noria.contracts.rollout import META_HEADER, Directive
from noria.rollout.directive import sign

ORIGIN = "a" * 32
DIRECTIVE = Directive(
    model="dispatch.router.r00003",
    invariant=ORIGIN,
    trace_id="b" * 32,
    round="dispatch.router.r00004",
    sample_id=7,
    group=1,
    member=2,
    seed=100,
    temperature=0.7,
)
REPLY = [{"role": "system", "content": "reply"}, {"role": "user", "content": "found 3"}]


def origin(node: str) -> dict[str, str]:
    return {"traceparent": f"00-{ORIGIN}-{'1' * 16}-01", "x-noria-app": "dispatch", "x-noria-node": node}


@pytest.fixture
async def recorded(start_upstream: Any, start_proxy: Any) -> Any:
    """A proxy with a policy upstream and a recorded origin trace: one router call, two reply calls."""

    async def start(**settings: Any) -> Any:
        live, policy = await start_upstream(), await start_upstream()
        upstreams = {"live": live.url, "policy": {"url": policy.url, "token_ids": True}}
        proxy = await start_proxy(upstreams, **settings)
        await proxy.chat("route me", headers=origin("router"))
        await proxy.chat("", headers=origin("reply"), messages=REPLY)
        await proxy.chat("second", headers=origin("reply"))
        live.bodies.clear()
        return proxy, live, policy

    return start


async def test_the_targets_calls_go_to_the_version_of_the_directive(recorded: Any) -> None:
    proxy, live, policy = await recorded()
    headers = {**proxy.directed(DIRECTIVE, "router"), "traceparent": f"00-{'9' * 32}-{'1' * 16}-01"}
    more = {"top_p": 0.5, "top_k": 3, "temperature": 0, "seed": 1, "max_tokens": 9}
    for _ in range(2):
        status, _answer = await proxy.chat("route me", headers=headers, **more)
        assert status == 200
    assert live.bodies == []
    for occurrence, asked in enumerate(policy.asked):
        assert asked == {
            "model": "dispatch.router.r00003",
            "messages": [{"role": "user", "content": "route me"}],
            "max_tokens": 9,
            "temperature": 0.7,
            "seed": 100 + occurrence,
            "return_token_ids": True,
            "logprobs": True,
        }
    call = (await proxy.calls())[-1]
    assert (call.arm, call.trace_id, call.model_name) == (Arm.ROLLOUT, DIRECTIVE.trace_id, "m")
    assert call.policy_version == "dispatch.router.r00003"
    measured = {"endpoint", "http_status", "stream", "first_byte_ms"}
    assert {name: said for name, said in call.attributes.items() if name not in measured} == {
        "client_traceparent": headers["traceparent"],
        "rollout": {
            "round": "dispatch.router.r00004",
            "sample_id": 7,
            "group": 1,
            "member": 2,
            "origin_trace": ORIGIN,
        },
        "sent": {"temperature": 0.7, "seed": 101, "model": "dispatch.router.r00003"},
    }


async def test_the_directive_may_travel_as_baggage_and_no_upstream_sees_it(recorded: Any) -> None:
    proxy, _live, policy = await recorded()
    token = proxy.directed(DIRECTIVE, "router")[META_HEADER]
    baggage = f"noria.meta={token},noria.node=router,noria.app=dispatch,mine=1"
    status, _answer = await proxy.chat("route me", headers={"baggage": baggage})
    assert status == 200
    assert policy.headers[0]["baggage"] == "mine=1"
    assert META_HEADER not in policy.headers[0]


async def test_a_pinned_node_is_answered_from_the_same_input_whatever_its_key_order(recorded: Any) -> None:
    proxy, live, policy = await recorded()
    messages = [dict(reversed(message.items())) for message in REPLY]
    status, answer = await proxy.chat(
        "", headers=proxy.directed(DIRECTIVE, "reply"), messages=messages, model="other", temperature=2, tools=[]
    )
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "echo found 3")
    assert live.bodies == policy.bodies == []
    call = (await proxy.calls())[-1]
    assert (call.arm, call.status, call.trace_id) == (Arm.ROLLOUT, CallStatus.OK, DIRECTIVE.trace_id)
    assert call.attributes["pinned"] == "exact"
    assert call.attributes["recorded_uid"] == (await proxy.calls())[1].uid
    assert call.tokens is None
    assert 'noria_pinned_total{kind="exact"} 1.0' in await proxy.metrics()


async def test_another_input_is_answered_by_its_place_in_the_trace(recorded: Any) -> None:
    proxy, live, _policy = await recorded()
    headers = proxy.directed(DIRECTIVE, "reply")
    answers = [(await proxy.chat(f"new {number}", headers=headers))[1] for number in range(2)]
    assert [a["choices"][0]["message"]["content"] for a in answers] == ["echo found 3", "echo second"]
    assert live.bodies == []
    assert [call.attributes["pinned"] for call in (await proxy.calls())[3:]] == ["occurrence"] * 2
    other = proxy.directed(DIRECTIVE, "reply", trace_id="c" * 32)
    assert (await proxy.chat("new", headers=other))[1]["choices"][0]["message"]["content"] == "echo found 3"


async def test_a_miss_goes_live_at_temperature_zero(recorded: Any) -> None:
    proxy, live, policy = await recorded()
    status, answer = await proxy.chat("new", headers=proxy.directed(DIRECTIVE, "planner"), temperature=1.5)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "echo new")
    assert [(asked["temperature"], asked["model"]) for asked in live.asked] == [(0, "m")]
    assert policy.bodies == []
    call = (await proxy.calls())[-1]
    assert (call.attributes["pinned"], call.arm, call.policy_version) == ("miss", Arm.ROLLOUT, None)


async def test_a_miss_fails_where_the_configuration_says_so(recorded: Any) -> None:
    proxy, live, _policy = await recorded(miss_policy="fail")
    status, answer = await proxy.chat("new", headers=proxy.directed(DIRECTIVE, "planner"))
    assert status == 409
    assert "planner" in answer["error"]["message"]
    assert ORIGIN in answer["error"]["message"]
    assert live.bodies == []
    call = (await proxy.calls())[-1]
    assert (call.status, call.attributes["pinned"]) == (CallStatus.REFUSED, "miss")


async def test_a_recording_is_streamed_to_whoever_asks_for_a_stream(recorded: Any) -> None:
    proxy, _live, _policy = await recorded()
    body = {"model": "m", "stream": True, "messages": REPLY, "stream_options": {"include_usage": True}}
    chunks = await proxy.stream(body, headers=proxy.directed(DIRECTIVE, "reply"))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "echo found 3"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]] == [None, None, "stop"]
    assert chunks[-1]["usage"]["total_tokens"] == 4


async def test_a_recorded_stream_is_answered_whole_to_whoever_asks_for_that(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    event = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"st"},"finish_reason":null}]}\n\n'
    last = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"op"},"finish_reason":"stop"}]}\n\n'
    live = await start_upstream(replies.streaming(event, last, b"data: [DONE]\n\n"))
    proxy = await start_proxy({"live": live.url})
    await proxy.stream({"model": "m", "stream": True, "messages": REPLY}, headers=origin("reply"))
    status, answer = await proxy.chat("", headers=proxy.directed(DIRECTIVE, "reply"), messages=REPLY)
    assert (status, answer["object"]) == (200, "chat.completion")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "stop"}
    assert len(live.bodies) == 1


async def test_only_whole_recordings_answer(start_upstream: Any, start_proxy: Any) -> None:
    async def fail(_request: web.Request, _body: Any) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    live = await start_upstream(fail)
    proxy = await start_proxy({"live": live.url}, miss_policy="fail")
    await proxy.chat("", headers=origin("reply"), messages=REPLY)
    status, _answer = await proxy.chat("", headers=proxy.directed(DIRECTIVE, "reply"), messages=REPLY)
    assert status == 409


async def test_a_directive_counts_only_with_the_trainers_key(recorded: Any) -> None:
    proxy, live, policy = await recorded()
    forged = {**proxy.directed(DIRECTIVE, "router"), META_HEADER: sign(DIRECTIVE, "x" * 48)}
    expired = {**forged, META_HEADER: sign(DIRECTIVE, proxy.config.trainer_key(), ttl_seconds=-5)}
    for headers in (forged, expired, {**forged, META_HEADER: "nonsense"}):
        status, answer = await proxy.chat("route me", headers=headers)
        assert (status, answer["error"]["code"]) == (403, "directive_refused")
    assert live.bodies == policy.bodies == []
    refused = (await proxy.calls())[3:]
    assert [call.status for call in refused] == [CallStatus.REFUSED] * 3
    assert DIRECTIVE.trace_id not in [call.trace_id for call in refused]
    assert {call.arm for call in refused} == {Arm.LIVE}


async def test_an_origin_trace_that_does_not_exist_is_a_404(recorded: Any) -> None:
    proxy, _live, policy = await recorded()
    for node in ("router", "reply"):
        status, answer = await proxy.chat("x", headers=proxy.directed(DIRECTIVE, node, invariant="d" * 32))
        assert status == 404
        assert "d" * 32 in answer["error"]["message"]
    assert policy.bodies == []


async def test_a_version_that_the_policy_server_does_not_know_is_its_404(recorded: Any) -> None:
    proxy, _live, policy = await recorded()

    async def unknown(_request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": f"no version {body['model']}", "code": "model"}}, status=404)

    policy.reply = unknown
    status, answer = await proxy.chat("route me", headers=proxy.directed(DIRECTIVE, "router"))
    assert (status, answer["error"]["message"]) == (404, "no version dispatch.router.r00003")


async def test_rollouts_are_recorded_whatever_the_sampling_rate(
    start_upstream: Any, start_proxy: Any, make_call: Any
) -> None:
    policy = await start_upstream()
    proxy = await start_proxy({"policy": policy.url}, sampling_rate=0.0)
    proxy.store.add_calls([make_call(trace_id=ORIGIN)])
    await proxy.chat("of a user", headers=origin("router"))
    await proxy.chat("of a rollout", headers=proxy.directed(DIRECTIVE, "router"))
    contents = [json.loads(call.input).get("messages", [{}])[0].get("content") for call in await proxy.calls()]
    assert contents == [None, "of a rollout"]
