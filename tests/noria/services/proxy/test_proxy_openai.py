"""The OpenAI SDK, as any agent uses it, sees an OpenAI server."""

import json
from typing import Any

import openai
import pytest

FIRST = b'data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","prompt_token_ids":[1],"choices":'


def sdk_stream(replies: Any) -> Any:
    def event(text: str, token: int, finish: str = "null") -> bytes:
        logprobs = json.dumps({"content": [{"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": []}]})
        choice = f'[{{"index":0,"delta":{{"content":"{text}"}},"token_ids":[{token}],"logprobs":{logprobs},'
        return FIRST + choice.encode() + f'"finish_reason":{finish}}}]}}\n\n'.encode()

    return replies.streaming(event("hel", 5), event("lo", 6, '"stop"'), b"data: [DONE]\n\n")


@pytest.fixture
async def sdk() -> Any:
    clients: list[openai.AsyncOpenAI] = []

    def make(base_url: str) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=base_url, api_key="the-agents-own", max_retries=0)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


async def test_an_unstreamed_call(start_upstream: Any, start_proxy: Any, sdk: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    client = sdk(f"{proxy.url}/apps/dispatch/nodes/router/v1")
    answer = await client.chat.completions.create(model="base", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "echo hi"
    assert answer.usage.total_tokens == 4
    assert [model.id async for model in client.models.list()] == ["m"]
    [call] = await proxy.calls()
    assert (call.target, call.model_name) == ("dispatch.router", "base")


async def test_a_streamed_call(start_upstream: Any, start_proxy: Any, replies: Any, sdk: Any) -> None:
    upstream = await start_upstream(sdk_stream(replies))
    proxy = await start_proxy({"policy": {"url": upstream.url, "token_ids": True}})
    client = sdk(f"{proxy.url}/v1")
    stream = await client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hi"}], stream=True, extra_headers={"x-noria-node": "n"}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert not any(chunk.choices[0].logprobs for chunk in chunks)
    assert not any("token_ids" in (chunk.choices[0].model_extra or {}) for chunk in chunks)
    [call] = await proxy.calls()
    assert call.tokens is not None
    assert call.tokens.completion_token_ids == (5, 6)


async def test_a_refusal_is_an_error_that_the_sdk_knows(start_upstream: Any, start_proxy: Any, sdk: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"policy": upstream.url})
    client = sdk(f"{proxy.url}/v1")
    with pytest.raises(openai.PermissionDeniedError, match="trainMeta"):
        await client.chat.completions.create(
            model="base", messages=[{"role": "user", "content": "hi"}], extra_headers={"x-noria-meta": "nonsense"}
        )
