import json
from typing import Any

import pytest
from aiohttp import web

from noria.contracts.call import CallStatus, CallTokens

LOGPROBS = {
    "content": [
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []},
        {"token": "b", "logprob": 1e-9, "bytes": [98], "top_logprobs": []},
    ]
}
TOKENS = CallTokens((1, 2, 3), (4, 5), (-0.5, 0.0))


def whole(replies: Any) -> Any:
    async def reply(_request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = replies.completion("ab", prompt_token_ids=[1, 2, 3])
        assert body["return_token_ids"] is True
        assert body["logprobs"] is True
        answer["choices"][0] |= {"token_ids": [4, 5], "logprobs": LOGPROBS}
        return web.json_response(answer)

    return reply


def streamed(replies: Any) -> Any:
    def event(delta: dict[str, Any], top: dict[str, Any] | None = None, **choice: Any) -> bytes:
        chunk = {"id": "a", "choices": [{"index": 0, "delta": delta, **choice}], **(top or {})}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    first, second = LOGPROBS["content"]
    stream = (
        event({"role": "assistant", "content": ""}, {"prompt_token_ids": [1, 2, 3]})
        + event({"content": "a"}, token_ids=[4], logprobs={"content": [first]})
        + b": ping\n\n"
        + event({"content": "b"}, token_ids=[5], logprobs={"content": [second]})
        + event({}, finish_reason="stop")
        + b"data: [DONE]\n\n"
    )
    return replies.streaming(stream[:50], stream[50:333], stream[333:])


async def test_tokens_are_recorded_and_the_caller_does_not_see_them(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    upstream = await start_upstream(whole(replies))
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    status, answer = await proxy.chat(temperature=0.5)
    assert (status, answer) == (200, replies.completion("ab"))
    assert upstream.asked[0]["temperature"] == 0.5
    [call] = await proxy.calls()
    assert call.tokens == TOKENS
    assert call.policy_version == "m"
    assert "return_token_ids" not in call.input
    assert json.loads(call.output) == answer


@pytest.mark.parametrize(
    ("asked", "seen", "hidden"),
    [
        ({"logprobs": True}, ["logprobs"], ["token_ids"]),
        ({"return_token_ids": True}, ["token_ids"], ["logprobs"]),
        ({"return_token_ids": True, "logprobs": True}, ["token_ids", "logprobs"], []),
    ],
)
async def test_what_the_caller_asked_for_itself_it_gets(
    start_upstream: Any, start_proxy: Any, replies: Any, asked: dict[str, bool], seen: list[str], hidden: list[str]
) -> None:
    upstream = await start_upstream(whole(replies))
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    _status, answer = await proxy.chat(**asked)
    assert not [name for name in seen if name not in answer["choices"][0]]
    assert not [name for name in hidden if name in answer["choices"][0]]
    assert ("prompt_token_ids" in answer) == ("token_ids" in seen)
    assert (await proxy.calls())[0].tokens == TOKENS


async def test_tokens_of_a_stream_are_taken_out_event_by_event(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    upstream = await start_upstream(streamed(replies))
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    body = {"model": "m", "stream": True, "messages": []}
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
        seen = await answer.text()
    assert ": ping\n\n" in seen
    assert "token_ids" not in seen
    assert "logprob" not in seen
    chunks = [json.loads(line[6:]) for line in seen.split("\n") if line.startswith("data: {")]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a", "b", None]
    assert seen.endswith("data: [DONE]\n\n")
    [call] = await proxy.calls()
    assert call.tokens == TOKENS
    assert call.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert json.loads(call.output)["choices"][0]["message"]["content"] == "ab"


async def test_a_stream_whose_caller_asked_for_all_of_it_stays_as_it_is(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    upstream = await start_upstream(streamed(replies))
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    body = {"model": "m", "stream": True, "messages": [], "return_token_ids": True, "logprobs": True}
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
        seen = await answer.text()
    assert seen.count('"token_ids"') == seen.count('"logprobs"') == 2
    assert json.loads((await proxy.calls())[0].output)["choices"][0]["token_ids"] == [4, 5]


async def test_tokens_that_do_not_fit_their_logprobs_are_not_kept(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    async def reply(_request: web.Request, _body: dict[str, Any]) -> web.Response:
        answer = replies.completion("ab", prompt_token_ids=[1])
        answer["choices"][0] |= {"token_ids": [4, 5, 6], "logprobs": LOGPROBS}
        return web.json_response(answer)

    upstream = await start_upstream(reply)
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    await proxy.chat()
    [call] = await proxy.calls()
    assert (call.status, call.tokens) == (CallStatus.OK, None)
