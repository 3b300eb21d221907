"""The SDKs of OpenAI and Anthropic as clients: what they read through the proxy is what the upstream said."""

import base64
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from noria.contracts.call import CallStatus
from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire.failure import error_event
from tests.noria.services.proxy.wire.exchanges import cut
from tests.noria.services.proxy.wire.shapes import (
    CHAT,
    CHAT_STREAMS,
    COMPLETION,
    EMBEDDING,
    EVENTS,
    JSON,
    MESSAGE,
    RESPONSE,
    SHAPES,
    USAGE,
)
from tests.noria.services.proxy.wire.upstream import Answer, WireUpstream, wire_upstream

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASK_CLAUDE: dict[str, Any] = {**ASK, "max_tokens": 9}


@pytest.fixture
async def upstream() -> AsyncIterator[WireUpstream]:
    async with wire_upstream() as running:
        yield running


@pytest.fixture
async def proxy(start_proxy: Callable[..., Awaitable[Any]], upstream: WireUpstream) -> Any:
    return await start_proxy({"up": upstream.url})


@pytest.fixture
async def gpt(proxy: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk-x", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(proxy: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="sk-x", max_retries=0) as client:
        yield client


def answers(upstream: WireUpstream, body: Any, content_type: str = JSON, **more: Any) -> None:
    """Let the upstream answer so: an object as JSON, bytes in small pieces."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = cut(data, list(range(0, len(data), 7)))
    upstream.answer = Answer(pieces, headers=(("Content-Type", content_type),), **more)


async def recorded(proxy: Any) -> dict[str, Any]:
    """The output of the last record, which is ok."""
    call = (await proxy.calls())[-1]
    assert (call.status, call.error_type) == (CallStatus.OK, None)
    output: dict[str, Any] = json.loads(call.output)
    return output


async def test_chat(proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI) -> None:
    answers(upstream, CHAT)
    completion = await gpt.chat.completions.create(**ASK)
    assert completion.choices[0].message.content == "grüße"
    assert completion.usage is not None
    assert completion.usage.total_tokens == 5
    assert await recorded(proxy) == CHAT


async def chunks_of(client: openai.AsyncOpenAI) -> Any:
    """What the SDK reads of a streamed call, or which error it raises: it does not read every stream that is legal."""
    try:
        return [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
    except (ValueError, TypeError, AttributeError) as error:
        return repr(error)


async def test_the_sdk_reads_every_chat_stream_as_without_a_proxy(
    proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{upstream.url}/v1", api_key="sk-x", max_retries=0) as direct:
        for name, stream in CHAT_STREAMS.items():
            answers(upstream, stream, EVENTS)
            assert await chunks_of(gpt) == await chunks_of(direct), name
    calls = await proxy.calls()
    assert len(calls) == len(CHAT_STREAMS)
    assert {call.status for call in calls} == {CallStatus.OK}


async def test_chat_tools_streamed(proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI) -> None:
    answers(upstream, CHAT_STREAMS["tool calls interleaved"], EVENTS)
    async with gpt.chat.completions.stream(**ASK) as stream:
        final = await stream.get_final_completion()
    read = final.choices[0].message.tool_calls or []
    said = [(call.id, call.function.name, call.function.arguments) for call in read]
    assert said == [("a", "find", '{"q":"ü"}'), ("b", "buy", '{"n":2}')]
    message = (await recorded(proxy))["choices"][0]["message"]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == said


async def test_usage_of_a_chat_stream(proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI) -> None:
    answers(upstream, CHAT_STREAMS["usage chunk"], EVENTS)
    stream = await gpt.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2
    assert (await recorded(proxy))["usage"] == USAGE


async def test_legacy_completions(proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI) -> None:
    answers(upstream, COMPLETION)
    completion = await gpt.completions.create(model="m", prompt="p")
    assert [choice.text for choice in completion.choices] == ["grü", "ße"]
    assert await recorded(proxy) == COMPLETION
    answers(upstream, SHAPES["completions: streamed"].body, EVENTS)
    texts = {0: "", 1: ""}
    async for chunk in await gpt.completions.create(model="m", prompt="p", n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "grü", 1: "ße"}
    assert await recorded(proxy) == COMPLETION


async def test_responses(proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI) -> None:
    answers(upstream, RESPONSE)
    response = await gpt.responses.create(model="m", input="i")
    assert response.output_text == "grüße"
    assert await recorded(proxy) == RESPONSE
    answers(upstream, SHAPES["responses: streamed"].body, EVENTS)
    async with gpt.responses.stream(model="m", input="i") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "grüße"
    assert final.output[1].model_dump(exclude_none=True)["arguments"] == '{"q":"ü"}'
    assert await recorded(proxy) == RESPONSE


async def test_embeddings(proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI) -> None:
    packed = base64.b64encode(struct.pack("<2f", 0.5, -0.25)).decode()
    answer = {**EMBEDDING, "data": [{"object": "embedding", "index": 0, "embedding": packed}]}
    answers(upstream, answer)
    embeddings = await gpt.embeddings.create(model="e", input="i")
    assert embeddings.data[0].embedding == [0.5, -0.25]
    assert json.loads(upstream.asked[-1].body)["encoding_format"] == "base64"
    assert await recorded(proxy) == answer


async def test_messages(proxy: Any, upstream: WireUpstream, claude: anthropic.AsyncAnthropic) -> None:
    answers(upstream, MESSAGE)
    message = await claude.messages.create(**ASK_CLAUDE)
    assert message.content[1].text == "grüße"
    assert upstream.asked[-1].header("Authorization") == "Bearer sk-x"
    assert await recorded(proxy) == MESSAGE
    answers(upstream, SHAPES["messages: streamed"].body, EVENTS)
    async with claude.messages.stream(**ASK_CLAUDE) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == "grüße"
    assert final.content[2].input == {"q": "ü"}
    assert final.usage.output_tokens == 2
    assert await recorded(proxy) == MESSAGE


async def test_errors_reach_the_sdks(
    upstream: WireUpstream, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    answers(upstream, {"error": {"message": "slow down", "type": "rate_limit", "code": "x"}}, status=429)
    with pytest.raises(openai.RateLimitError, match="slow down"):
        await gpt.chat.completions.create(**ASK, stream=True)
    answers(upstream, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, status=529)
    with pytest.raises(anthropic.APIStatusError, match="busy"):
        await claude.messages.create(**ASK_CLAUDE)


async def read_to_its_end(kind: Kind, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> list[Any]:
    if kind is Kind.MESSAGE:
        return [event async for event in await claude.messages.create(**ASK_CLAUDE, stream=True)]
    if kind is Kind.RESPONSE:
        return [event async for event in await gpt.responses.create(model="m", input="i", stream=True)]
    if kind is Kind.COMPLETION:
        return [event async for event in await gpt.completions.create(model="m", prompt="p", stream=True)]
    return [event async for event in await gpt.chat.completions.create(**ASK, stream=True)]


STREAMED = {
    Kind.CHAT: "chat: plain",
    Kind.COMPLETION: "completions: streamed",
    Kind.RESPONSE: "responses: streamed",
    Kind.MESSAGE: "messages: streamed",
}


@pytest.mark.parametrize("kind", list(STREAMED))
async def test_the_event_of_a_failure_is_an_exception_of_the_sdk(
    kind: Kind, upstream: WireUpstream, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    first = SHAPES[STREAMED[kind]].body.partition(b"\n\n")[0] + b"\n\n"
    answers(upstream, first + error_event(kind, "it broke off", "connection_lost"), EVENTS)
    with pytest.raises((openai.APIError, anthropic.APIStatusError), match="it broke off"):
        await read_to_its_end(kind, gpt, claude)


@pytest.mark.parametrize("kind", list(STREAMED))
async def test_an_upstream_that_dies_is_an_exception_of_the_sdk(
    kind: Kind, proxy: Any, upstream: WireUpstream, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    first = SHAPES[STREAMED[kind]].body.partition(b"\n\n")[0] + b"\n\n"
    answers(upstream, first, EVENTS, dies=True)
    with pytest.raises((openai.APIError, anthropic.APIStatusError)):
        await read_to_its_end(kind, gpt, claude)
    call = (await proxy.calls())[-1]
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "connection_lost")
