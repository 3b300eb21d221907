"""What Agent Lightning 0.3's tests of its LLM proxy pin down about streams, where it makes sense here.

docs/peer_scenarios.md lists every one of their scenarios, with a verdict and the test of ours.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from noria.contracts.call import CallStatus
from noria.contracts.rollout import Directive

TRACE = "0af7651916cd43dd8448eb211c80319c"
DIRECTIVE = Directive("dispatch.router.r00001", TRACE, "b" * 32, "dispatch.router.r00002", 1, 0, 0, 0)
ORIGIN = {"traceparent": f"00-{TRACE}-{'1' * 16}-01", "x-noria-app": "dispatch", "x-noria-node": "reply"}
CLAUDE = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 1},
    },
}


def chat_events(*deltas: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    """A chat stream of these deltas; `more` are fields that each choice has beside its delta."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None, **more} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def claude_events(*events: dict[str, Any], stop: str = "end_turn") -> bytes:
    last = {
        "type": "message_delta",
        "delta": {"stop_reason": stop, "stop_sequence": None},
        "usage": {"output_tokens": 9},
    }
    whole = [CLAUDE, *events, last, {"type": "message_stop"}]
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in whole)


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def tool_block(index: int, *parts: str) -> list[dict[str, Any]]:
    deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
    return block(index, {"type": "tool_use", "id": f"toolu_{index}", "name": "find", "input": {}}, *deltas)


async def streamed(proxy: Any, path: str = "/v1/chat/completions", **more: Any) -> bytes:
    body = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **more}
    async with proxy.session.post(f"{proxy.url}{path}", json=body) as answer:
        assert answer.status == 200
        return bytes(await answer.read())


async def recorded(proxy: Any) -> Any:
    """The one recorded answer, which must count as whole."""
    [call] = await proxy.calls()
    assert (call.status, call.error_type) == (CallStatus.OK, None)
    return json.loads(call.output)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


@pytest.fixture
async def sdks() -> AsyncIterator[Any]:
    clients: list[Any] = []

    def make(sdk: Any, base_url: str, headers: dict[str, str]) -> Any:
        clients.append(sdk(base_url=base_url, api_key="the-agents-own", max_retries=0, default_headers=headers))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.mark.parametrize("length", [1, 50, 500])
async def test_text_of_any_length_is_put_together(
    start_upstream: Any, start_proxy: Any, replies: Any, length: int
) -> None:
    text = ("wörld 🌍 " * length)[:length]
    parts = [text[: length // 3], text[length // 3 : 2 * length // 3], text[2 * length // 3 :]]
    sent = chat_events({"role": "assistant"}, *({"content": part} for part in parts))
    proxy = await start_proxy({"main": (await start_upstream(replies.streaming(sent))).url})
    assert await streamed(proxy) == sent
    choice = (await recorded(proxy))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"


async def test_a_legacy_function_call_between_text(start_upstream: Any, start_proxy: Any, replies: Any) -> None:
    sent = chat_events(
        {"role": "assistant", "content": "Looking… "},
        {"function_call": {"name": "weather", "arguments": '{"town": "'}},
        {"function_call": {"arguments": 'Bergen", "unit": "'}},
        {"function_call": {"arguments": 'celsius"}'}},
        {"content": "done."},
        finish="function_call",
    )
    proxy = await start_proxy({"main": (await start_upstream(replies.streaming(sent))).url})
    assert await streamed(proxy) == sent
    message = (await recorded(proxy))["choices"][0]["message"]
    assert message["content"] == "Looking… done."
    assert message["function_call"]["name"] == "weather"
    assert json.loads(message["function_call"]["arguments"]) == {"town": "Bergen", "unit": "celsius"}


@pytest.mark.parametrize("parts", [['{"q": "', 'noria"}'], ["{", '"q": ', '"nor', 'ia"', "}"], ['{"q": "no']])
async def test_arguments_of_a_tool_call_are_the_text_that_was_sent(
    start_upstream: Any, start_proxy: Any, replies: Any, parts: list[str]
) -> None:
    begin = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "search", "arguments": ""}}
    deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts]
    sent = chat_events({"role": "assistant", "content": None, "tool_calls": [begin]}, *deltas, finish="tool_calls")
    proxy = await start_proxy({"main": (await start_upstream(replies.streaming(sent))).url})
    assert await streamed(proxy) == sent
    [tool] = (await recorded(proxy))["choices"][0]["message"]["tool_calls"]
    assert (tool["id"], tool["function"]) == ("call_1", {"name": "search", "arguments": "".join(parts)})


async def test_blocks_of_a_messages_stream_are_put_together(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    text = [{"type": "text_delta", "text": part} for part in ("Start ", "middle ", "end.")]
    sent = claude_events(
        *block(0, {"type": "text", "text": ""}, *text),
        *tool_block(1, "", '{"url": "', 'https://example.com"}'),
        *block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "done."}),
        *tool_block(3),
        stop="tool_use",
    )
    proxy = await start_proxy({"main": (await start_upstream(replies.streaming(sent))).url})
    assert await streamed(proxy, "/v1/messages") == sent
    message = await recorded(proxy)
    assert [part["type"] for part in message["content"]] == ["text", "tool_use", "text", "tool_use"]
    assert [part["text"] for part in message["content"] if part["type"] == "text"] == ["Start middle end.", "done."]
    tools = [part for part in message["content"] if part["type"] == "tool_use"]
    assert [tool["id"] for tool in tools] == ["toolu_1", "toolu_3"]
    assert [tool["input"] for tool in tools] == [{"url": "https://example.com"}, {}]
    assert (message["role"], message["stop_reason"]) == ("assistant", "tool_use")
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (5, 9)


async def test_tool_input_that_is_no_json_stays_the_text_it_is(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    sent = claude_events(*tool_block(0, '{"alpha": 1, ', '"beta": 2'), stop="max_tokens")
    proxy = await start_proxy({"main": (await start_upstream(replies.streaming(sent))).url})
    assert await streamed(proxy, "/v1/messages") == sent
    [call] = await proxy.calls()
    assert '{"alpha": 1, "beta": 2' in list(strings(json.loads(call.output)))


LONG = 'A long answer, näturlich, with 你好 and 🌍, line\nends and "quotes". ' * 40
TOOLS = [
    {"id": f"call_{n}", "type": "function", "function": {"name": "find", "arguments": json.dumps({"n": n, "t": "ü"})}}
    for n in range(2)
]


@pytest.mark.parametrize(
    ("message", "finish"),
    [
        ({"content": "Hello world."}, "stop"),
        ({"content": "This was cut"}, "length"),
        ({"content": LONG}, "stop"),
        ({"content": None, "tool_calls": TOOLS[:1]}, "tool_calls"),
        ({"content": "I will look.", "tool_calls": TOOLS}, "tool_calls"),
    ],
    ids=["text", "cut", "long", "tool", "text-and-tools"],
)
async def test_a_whole_answer_that_is_replayed_as_a_stream_adds_up(
    start_upstream: Any, start_proxy: Any, replies: Any, sdks: Any, message: dict[str, Any], finish: str
) -> None:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        answer = replies.completion(created=1)
        answer["choices"][0] |= {"message": {"role": "assistant", **message}, "finish_reason": finish}
        return web.json_response(answer)

    live = await start_upstream(reply)
    proxy = await start_proxy({"live": live.url})
    await proxy.chat("look", headers=ORIGIN)
    client = sdks(openai.AsyncOpenAI, f"{proxy.url}/v1", proxy.directed(DIRECTIVE, "reply"))
    asked = [{"role": "user", "content": "look"}]
    stream = await client.chat.completions.create(model="m", messages=asked, stream=True)
    content, tools, finishes = "", dict[int, dict[str, str]](), []
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                tool = tools.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                tool["id"] += call.id or ""
                tool["name"] += call.function.name or ""
                tool["arguments"] += call.function.arguments or ""
    assert (content, finishes) == (message["content"] or "", [finish])
    assert [tools[index] for index in sorted(tools)] == [
        {"id": tool["id"], **tool["function"]} for tool in message.get("tool_calls", [])
    ]
    assert len(live.bodies) == 1


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "Hello there."}],
        [{"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"town": "Bergen"}}],
        [
            {"type": "text", "text": LONG},
            {"type": "tool_use", "id": "toolu_2", "name": "find", "input": {"deep": {"days": [1, 2.5], "ü": None}}},
        ],
    ],
    ids=["text", "tool", "text-and-tool"],
)
async def test_a_whole_message_that_is_replayed_as_a_stream_adds_up(
    start_upstream: Any, start_proxy: Any, sdks: Any, content: list[dict[str, Any]]
) -> None:
    whole = {**CLAUDE["message"], "content": content, "stop_reason": "end_turn"}

    async def reply(_request: web.Request, _body: Any) -> web.Response:
        return web.json_response(whole)

    live = await start_upstream(reply)
    proxy = await start_proxy({"live": live.url})
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "look"}]}
    async with proxy.session.post(f"{proxy.url}/v1/messages", json=asked, headers=ORIGIN) as answer:
        assert await answer.json() == whole
    client = sdks(anthropic.AsyncAnthropic, proxy.url, proxy.directed(DIRECTIVE, "reply"))
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert [part.model_dump(exclude_none=True, exclude_unset=True) for part in final.content] == content
    assert final.stop_reason == "end_turn"
    assert len(live.bodies) == 1
