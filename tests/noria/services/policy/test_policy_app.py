import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from noria.services.policy.versions import Version

Serve = Callable[..., AbstractAsyncContextManager[str]]

USER = [{"role": "user", "content": "the river"}]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def chat(http: aiohttp.ClientSession, url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "base", "messages": USER, **fields}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def events(http: aiohttp.ClientSession, url: str, **fields: Any) -> list[str]:
    body = {"model": "base", "messages": USER, "stream": True, **fields}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        text = await response.text()
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as response:
        match = re.search(rf"^{re.escape(name)} (\S+)$", await response.text(), re.MULTILINE)
    return float(match[1]) if match else 0.0


async def test_an_answer_carries_what_was_asked_for(
    serve: Serve, http: aiohttp.ClientSession, version: Version
) -> None:
    asked = {"seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    async with serve() as url:
        plain = await chat(http, url, seed=3, max_tokens=12)
        full = await chat(http, url, **asked)
    choice = full["choices"][0]
    assert full["object"] == "chat.completion"
    assert full["model"] == "base"
    assert full["prompt_token_ids"] == version.encode_chat(USER)
    assert version.tokenizer.decode(full["prompt_token_ids"]) == (
        "<|im_start|>user\nthe river<|im_end|>\n<|im_start|>assistant\n"
    )
    assert choice["message"] == {"role": "assistant", "content": version.decode(choice["token_ids"])}
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 12
    assert full["usage"] == {
        "prompt_tokens": len(full["prompt_token_ids"]),
        "completion_tokens": 12,
        "total_tokens": len(full["prompt_token_ids"]) + 12,
    }
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == choice["message"]["content"]
    assert all(entry["logprob"] < 0 for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    assert plain["choices"][0]["message"] == choice["message"]


async def test_a_stream_adds_up_to_the_whole_answer(serve: Serve, http: aiohttp.ClientSession) -> None:
    asked = {"seed": 5, "max_tokens": 24, "n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    async with serve(max_new_tokens=32) as url:
        whole = await chat(http, url, **asked)
        received = await events(http, url, stream_options={"include_usage": True}, **asked)
    assert received[-1] == "[DONE]"
    chunks = [json.loads(event) for event in received[:-1]]
    assert [i for i, chunk in enumerate(chunks) if "prompt_token_ids" in chunk] == [0]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index, choice in enumerate(whole["choices"]):
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert [token for part in own for token in part.get("token_ids", [])] == choice["token_ids"]
        entries = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]


async def test_a_plain_stream_says_nothing_that_was_not_asked(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve() as url:
        received = await events(http, url, seed=5, max_tokens=24)
    chunks = [json.loads(event) for event in received[:-1]]
    assert received[-1] == "[DONE]"
    assert all("usage" not in chunk and "prompt_token_ids" not in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_openai_sdk_reads_it(serve: Serve) -> None:
    async with serve() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "base", "messages": USER, "seed": 1, "max_tokens": 8, "logprobs": True}
        whole = await client.chat.completions.create(**asked, n=2, extra_body={"return_token_ids": True})
        text = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == 8
        assert whole.choices[0].model_extra is not None
        assert len(whole.choices[0].model_extra["token_ids"]) == 8
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="a.b.r00009", messages=USER)  # type: ignore[arg-type]
        assert "materialize its checkpoint" in caught.value.message
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature is -1"):
            await client.chat.completions.create(**asked, temperature=-1)
        assert {model.id for model in (await client.models.list()).data} == {"base", "a.b.r00000", "a.b.r00001"}


async def test_n_answers_take_n_seeds(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve() as url:
        many = await chat(http, url, seed=7, n=3, max_tokens=16, return_token_ids=True, deterministic=True)
        ones = [
            await chat(http, url, seed=7 + i, max_tokens=16, return_token_ids=True, deterministic=True)
            for i in range(3)
        ]
    assert [c["token_ids"] for c in many["choices"]] == [one["choices"][0]["token_ids"] for one in ones]
    assert [c["index"] for c in many["choices"]] == [0, 1, 2]
    assert many["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in ones)


@pytest.mark.parametrize("by_configuration", [True, False])
async def test_a_deterministic_answer_is_the_same_alone_and_in_a_crowd(
    serve: Serve, http: aiohttp.ClientSession, by_configuration: bool
) -> None:
    asked = {"seed": 9, "max_tokens": 32, "logprobs": True, "return_token_ids": True}
    if not by_configuration:
        asked["deterministic"] = True
    async with serve(deterministic=by_configuration) as url:
        alone = (await chat(http, url, **asked))["choices"]
        others = [
            chat(
                http,
                url,
                model=("base", "a.b.r00001")[i % 3 == 0],
                seed=i,
                max_tokens=20 + i,
                messages=USER * (i % 5 + 1),
            )
            for i in range(24)
        ]
        crowd = await asyncio.gather(*others[:12], *(chat(http, url, **asked) for _ in range(3)), *others[12:])
    for again in crowd[12:15]:
        assert again["choices"] == alone  # JSON carries each logprob exactly
    assert by_configuration or len(crowd) == 27


async def test_a_deterministic_answer_needs_no_seed(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve() as url:
        one, two = [await chat(http, url, deterministic=True) for _ in range(2)]
        free = {(await chat(http, url))["choices"][0]["message"]["content"] for _ in range(3)}
    assert one["choices"] == two["choices"]
    assert len(free) > 1


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b"{", 400, None, "not valid JSON"),
        (b"\xff", 400, None, "not valid JSON"),
        (b"[]", 400, None, "JSON list; send one JSON object"),
        (b'{"model": "base"}', 400, "messages", "messages is missing; send a list"),
        (b'{"model": "base", "messages": null}', 400, "messages", "messages is missing"),
        (b'{"messages": []}', 400, "model", "model is missing; send the name of a version"),
        ({"messages": []}, 400, "messages", "messages is [], but"),
        ({"messages": [{"content": "x"}]}, 400, "messages", "messages.0.role is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "a part of type 'image_url', but this model reads text only",
        ),
        ({"model": "nobody"}, 404, "model", "version 'nobody' is not there; materialize"),
        ({"temperature": -1}, 400, "temperature", "temperature is -1, but input should be greater than or equal to 0"),
        ({"temperature": "hot"}, 400, "temperature", 'temperature is "hot", but input should be a valid number'),
        (b'{"model": "base", "messages": [{"role": "user"}], "temperature": NaN}', 400, "temperature", "NaN"),
        ({"top_p": 0}, 400, "top_p", "top_p is 0, but"),
        ({"top_k": -2}, 400, "top_k", "top_k is -2, but"),
        ({"n": 0}, 400, "n", "n is 0, but"),
        ({"n": True}, 400, "n", "n is true, but"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens is 0, but"),
        ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens", "max_completion_tokens is 1.5, but"),
        ({"seed": 2**64}, 400, "seed", "but input should be less than"),
        ({"stop": ""}, 400, "stop", 'stop.constrained-str is "", but'),
        ({"stream": "yes"}, 400, "stream", 'stream is "yes", but'),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "top_logprobs is 21, but"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "send logprobs: true"),
        ({"messages": [{"role": "user", "content": "wheel " * 3000}]}, 400, "messages", "context is 2048 tokens"),
    ],
)
async def test_bad_requests_are_told_what_is_wrong(
    serve: Serve, http: aiohttp.ClientSession, body: bytes | dict[str, Any], status: int, param: str | None, words: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps({"model": "base", "messages": USER, **body}).encode()
    async with serve() as url, http.post(f"{url}/v1/chat/completions", data=data) as response:
        error = (await response.json())["error"]
        assert response.status == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


async def test_unknown_and_null_fields_are_ignored(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve() as url:
        answer = await chat(
            http, url, user="me", metadata={"a": 1}, parallel_tool_calls=True, presence_penalty=1, stop=None, seed=None,
            temperature=None, n=None, stream=None, tools=None, max_tokens=None,
        )  # fmt: skip
    assert answer["usage"]["completion_tokens"] <= 64


async def test_max_tokens_is_capped_by_server_and_context(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve(max_new_tokens=16) as url:
        capped = await chat(http, url, max_tokens=500, seed=1)
        newer = await chat(http, url, max_tokens=9, max_completion_tokens=3, seed=1)
    assert capped["usage"]["completion_tokens"] == 16
    assert newer["usage"]["completion_tokens"] == 3
    long = [{"role": "user", "content": "\u0007" * 2030}]
    async with serve(max_new_tokens=64) as url:
        full = await chat(http, url, messages=long, seed=1)
    assert full["usage"]["total_tokens"] == 2048
    assert full["choices"][0]["finish_reason"] == "length"


async def test_tools_and_parts_and_calls_reach_the_template(
    serve: Serve, http: aiohttp.ClientSession, version: Version
) -> None:
    tools = [{"type": "function", "function": {"name": "turn", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "turn", "arguments": '{"by": 3}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "lift "}, {"type": "text", "text": "water"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    async with serve() as url:
        answer = await chat(http, url, messages=messages, tools=tools, return_token_ids=True, max_tokens=1)
    prompt = version.tokenizer.decode(answer["prompt_token_ids"])
    assert prompt.startswith('<|im_start|>tools\n[{"type": "function"')
    assert "lift water<|im_end|>" in prompt
    assert '"arguments": {"by": 3}' in prompt


async def test_a_client_that_leaves_frees_its_rows(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve(max_new_tokens=2_000, max_batch=4) as url:
        await chat(http, url, max_tokens=1)
        endless = {"max_tokens": 2_000, "n": 4, "logit_bias": {}}
        for stream in (False, True):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(chat(http, url, stream=stream, **endless), 0.3)
        async with asyncio.timeout(20):
            while await metric(http, url, 'noria_policy_requests_total{status="499"}') < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await chat(http, url, max_tokens=1)
        assert await metric(http, url, "noria_policy_completion_tokens_total") < 8_000


async def test_a_new_version_loads_while_another_answers(
    serve: Serve, http: aiohttp.ClientSession, model_dir: Path, tmp_path: Path
) -> None:
    copies = {f"a.b.r{i:05d}": tmp_path / str(i) for i in range(10, 16)}
    for path in copies.values():
        shutil.copytree(model_dir, path)
    async with serve(extra=copies, max_versions=8) as url:
        await chat(http, url, max_tokens=1)

        async def traffic() -> int:
            count = 0
            while not loads.done():
                await chat(http, url, max_tokens=4)
                count += 1
            return count

        async def preload(name: str) -> dict[str, Any]:
            async with http.post(f"{url}/v1/versions", json={"name": name}) as response:
                assert response.status == 200
                return await response.json()  # type: ignore[no-any-return]

        loads = asyncio.gather(*(preload(name) for name in copies))
        answered = await traffic()
        assert [one["name"] for one in await loads] == list(copies)
        assert answered >= 3
        async with http.get(f"{url}/v1/models") as response:
            listed = (await response.json())["data"]
        assert {model["id"]: model["loaded"] for model in listed} == {
            **dict.fromkeys(["base", *copies], True),
            "a.b.r00000": False,
            "a.b.r00001": False,
        }
        assert await metric(http, url, "noria_policy_versions_loaded") == 7


async def test_versions_differ_and_names_of_one_folder_do_not(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve() as url:
        base, zero, one = [
            (await chat(http, url, model=model, seed=1, deterministic=True))["choices"]
            for model in ("base", "a.b.r00000", "a.b.r00001")
        ]
        assert base == zero != one
        assert await metric(http, url, "noria_policy_versions_loaded") == 2


async def test_a_broken_folder_is_a_500_and_harms_no_other(
    serve: Serve, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    async with serve(extra={"broken": tmp_path / "broken"}) as url:
        for path, body in [
            ("chat/completions", {"model": "broken", "messages": USER}),
            ("versions", {"name": "broken"}),
        ]:
            async with http.post(f"{url}/v1/{path}", json=body) as response:
                assert response.status == 500
                error = (await response.json())["error"]
                assert "cannot be loaded" in error["message"]
                assert error["type"] == "server_error"
        assert (await chat(http, url, max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_a_failing_batch_is_a_500_whole_and_streamed(
    serve: Serve, http: aiohttp.ClientSession, mismatched: Path
) -> None:
    async with serve(extra={"mismatched": mismatched}) as url:
        for stream in (False, True):
            body = {"model": "mismatched", "messages": USER, "stream": stream}
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == 500
                assert "the model failed on this batch (IndexError" in (await response.json())["error"]["message"]
        assert (await chat(http, url, max_tokens=1))["usage"]["completion_tokens"] == 1
        async with http.get(f"{url}/healthz") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_metrics_count(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve(batch_wait_ms=50) as url:
        await asyncio.gather(*(chat(http, url, max_tokens=10, seed=i) for i in range(5)))
        async with http.post(f"{url}/v1/chat/completions", data=b"{") as response:
            assert response.status == 400
        assert await metric(http, url, 'noria_policy_requests_total{status="200"}') == 5
        assert await metric(http, url, 'noria_policy_requests_total{status="400"}') == 1
        assert 5 <= await metric(http, url, "noria_policy_completion_tokens_total") <= 50
        assert await metric(http, url, "noria_policy_prompt_tokens_total") > 5
        assert await metric(http, url, "noria_policy_batch_size_sum") == 5
        busy = await metric(http, url, "noria_policy_busy_seconds_total")
        assert 0 < busy < 10
        await asyncio.sleep(0.1)
        assert await metric(http, url, "noria_policy_busy_seconds_total") == busy


async def test_wrong_paths_and_methods_have_the_same_error_shape(serve: Serve, http: aiohttp.ClientSession) -> None:
    async with serve() as url:
        for method, path, status in [("GET", "/v1/nowhere", 404), ("GET", "/v1/chat/completions", 405)]:
            async with http.request(method, url + path) as response:
                assert response.status == status
                assert path in (await response.json())["error"]["message"]
        for body in ({}, {"name": 5}):
            async with http.post(f"{url}/v1/versions", json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "name"
        async with http.post(f"{url}/v1/versions", json={"name": "nobody"}) as response:
            assert response.status == 404
