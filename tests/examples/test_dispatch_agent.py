import asyncio
import io
import json
import re
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from examples.dispatch.agent import Settings, agent_version, make_app, settings_of
from examples.dispatch.data import traffic
from examples.dispatch.tool import run_tool
from noria.config import load

QUERY = traffic()[0]


@pytest.fixture
async def agent(proxy, serve, right_model) -> str:
    proxy.answer = right_model
    return await serve(make_app(Settings(f"{proxy.url}/v1", "none", 10.0)))


async def post(url: str, body: object) -> tuple[int, dict]:
    options = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
    async with aiohttp.ClientSession() as session, session.post(url, **options) as response:
        return response.status, await response.json()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the mock proxy only keeps lists
            await asyncio.sleep(0.01)


async def test_a_query_is_routed_run_and_phrased(agent, proxy):
    status, answer = await post(f"{agent}/dispatch", {"query": QUERY.text})
    result = run_tool(QUERY.tool, QUERY.text)
    assert status == 200
    assert (answer["tool"], answer["result"]) == (QUERY.tool, result)
    assert answer["reply"].startswith(f"I found {result['found']} ")
    assert answer["reply"] == answer["reply"].strip()
    (_, router), (_, reply) = proxy.chats
    assert router["messages"] == [{"role": "system", "content": "route"}, {"role": "user", "content": QUERY.text}]
    assert json.loads(reply["messages"][1]["content"]) == result
    assert [(b["model"], b["temperature"], b["max_tokens"]) for b in (router, reply)] == [
        ("base", 0, 24),
        ("base", 0, 32),
    ]


async def test_each_call_says_whose_it_is(agent, proxy):
    _, body = await post(f"{agent}/dispatch", {"query": QUERY.text})
    headers = [{key.lower(): value for key, value in sent.items()} for sent, _ in proxy.chats]
    assert [sent["x-noria-node"] for sent in headers] == ["router", "reply"]
    for sent in headers:
        assert sent["x-noria-app"] == "dispatch"
        assert sent["x-noria-agent-version"] == agent_version()
        assert re.fullmatch(rf"00-{body['trace_id']}-[0-9a-f]{{16}}-01", sent["traceparent"])
        assert sent["baggage"] == f"noria.app=dispatch,noria.node={sent['x-noria-node']}"
        assert "x-noria-meta" not in sent


async def test_the_whole_task_is_reported(agent, proxy):
    request = json.dumps({"query": QUERY.text})
    async with aiohttp.ClientSession() as session, session.post(f"{agent}/dispatch", data=request) as response:
        text = await response.text()
    await until(lambda: proxy.episodes)
    assert proxy.episodes == [
        {
            "app": "dispatch",
            "agent_version": agent_version(),
            "trace_id": json.loads(text)["trace_id"],
            "request": request,
            "response": text,
            "status": "ok",
        }
    ]


async def test_a_rollout_is_the_same_task_with_its_directive_and_no_episode(agent, proxy):
    body = {"originRequest": json.dumps({"query": QUERY.text}), "trainMeta": "a.b-c_d"}
    status, answer = await post(f"{agent}/rollout", body)
    live_status, live = await post(f"{agent}/dispatch", {"query": QUERY.text})
    assert (status, live_status) == (200, 200)
    origin = json.loads(answer["originResponse"])
    assert {**origin, "trace_id": ""} == {**live, "trace_id": ""}
    assert [sent.get("x-noria-meta") for sent, _ in proxy.chats] == ["a.b-c_d", "a.b-c_d", None, None]
    assert proxy.chats[0][1] == proxy.chats[2][1]
    await until(lambda: proxy.episodes)
    assert [episode["trace_id"] for episode in proxy.episodes] == [live["trace_id"]]


@pytest.mark.parametrize("answer", ["", "no json", '{"name": "no tool"}', '{"name": 4}', "[]", '{"name": "unknown"}'])
async def test_an_answer_that_is_no_tool_is_told_as_such(agent, proxy, answer):
    proxy.answer = lambda node, text: answer if node == "route" else "I found 0 results."
    status, body = await post(f"{agent}/dispatch", {"query": "x"})
    assert (status, body["tool"], body["result"]) == (200, None, {"tool": "unknown", "found": 0})


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/dispatch", b"no json", "body: Invalid JSON"),
        ("/dispatch", b"\xff", "body: not UTF-8"),
        ("/dispatch", {}, "body.query: Field required"),
        ("/dispatch", {"query": 3}, "body.query: Input should be a valid string"),
        ("/dispatch", {"query": ""}, "body.query: String should have at least 1 character"),
        ("/dispatch", {"query": "x" * 4001}, "body.query: String should have at most 4000"),
        ("/rollout", {"originRequest": "{}"}, "body.trainMeta: Field required"),
        ("/rollout", {"originRequest": "{}", "trainMeta": "a\nb"}, "body.trainMeta: String should match"),
        ("/rollout", {"originRequest": "{}", "trainMeta": "m"}, "originRequest.query: Field required"),
        ("/rollout", {"originRequest": "x", "trainMeta": "m"}, "originRequest: Invalid JSON"),
    ],
)
async def test_a_bad_request_says_what_is_wrong(agent, proxy, path, body, message):
    status, answer = await post(agent + path, body)
    assert status == 400
    assert answer["error"]["type"] == "bad_request"
    assert answer["error"]["message"].startswith(message)
    assert not proxy.chats


async def test_other_mistakes_are_json_too(agent):
    status, answer = await post(f"{agent}/nowhere", {})
    assert (status, answer["error"]["message"]) == (404, "Not Found: POST /nowhere")
    status, answer = await post(f"{agent}/dispatch", b"x" * 1_500_000)
    assert (status, answer["error"]["type"]) == (413, "request_entity_too_large")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            lambda: web.json_response({"error": {"message": "out of memory"}}, status=500),
            "the model answered 500: .*memory",
        ),
        (lambda: web.json_response({"error": {"message": "no such model"}}, status=404), "the model answered 404"),
        (lambda: web.Response(text="<html>"), "no chat completion"),
        (lambda: web.json_response({"choices": []}), "no chat completion"),
        (lambda: web.json_response({"choices": None}), "no chat completion"),
        (lambda: web.json_response({"choices": [{"message": {"content": [1]}}]}), "content is list"),
        (lambda: web.Response(text="{", content_type="application/json"), "node 'reply'"),
    ],
)
async def test_a_failing_model_is_502_with_the_reason(agent, proxy, right_model, answer, reason):
    proxy.answer = lambda node, text: right_model(node, text) if node == "route" else answer()
    status, body = await post(f"{agent}/dispatch", {"query": QUERY.text})
    assert status == 502
    assert re.search(reason, body["error"]["message"])
    assert body["error"]["message"].startswith("node 'reply'")
    await until(lambda: proxy.episodes)
    assert (proxy.episodes[0]["status"], proxy.episodes[0]["trace_id"]) == ("upstream_error", body["trace_id"])
    assert len(proxy.chats) == 2  # no retries behind the task's back
    status, rollout = await post(
        f"{agent}/rollout", {"originRequest": json.dumps({"query": QUERY.text}), "trainMeta": "m"}
    )
    assert (status, rollout["error"]["type"]) == (502, "upstream_error")
    assert len(proxy.episodes) == 1


async def test_a_model_that_is_down_is_502(serve):
    agent = await serve(make_app(Settings("http://127.0.0.1:9/v1", "none", 2.0)))
    status, body = await post(f"{agent}/rollout", {"originRequest": '{"query": "x"}', "trainMeta": "m"})
    assert status == 502
    assert "http://127.0.0.1:9/v1/ does not answer" in body["error"]["message"]


async def test_a_slow_model_is_502(proxy, serve):
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", slow)
    agent = await serve(make_app(Settings(f"{await serve(app)}/v1", "none", 0.1)))
    status, body = await post(f"{agent}/rollout", {"originRequest": '{"query": "x"}', "trainMeta": "m"})
    assert status == 502
    assert "does not answer" in body["error"]["message"]


async def test_a_report_that_fails_is_tried_again(agent, proxy):
    proxy.episode_statuses = [500, 503]
    await post(f"{agent}/dispatch", {"query": QUERY.text})
    await until(lambda: proxy.episodes)
    assert not proxy.episode_statuses


async def test_a_refused_report_is_not_repeated(agent, proxy, caplog):
    proxy.episode_statuses = [400]
    status, _ = await post(f"{agent}/dispatch", {"query": QUERY.text})
    await until(lambda: "refused: 400" in caplog.text)
    assert status == 200
    assert not proxy.episodes


async def test_reports_are_drained_at_the_end(proxy, serve, right_model):
    proxy.answer = right_model
    proxy.episode_statuses = [500]
    app = make_app(Settings(f"{proxy.url}/v1", "none", 10.0))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    await post(f"http://127.0.0.1:{runner.addresses[0][1]}/dispatch", {"query": QUERY.text})
    await runner.cleanup()
    assert len(proxy.episodes) == 1


async def test_health(agent):
    async with aiohttp.ClientSession() as session, session.get(f"{agent}/healthz") as response:
        assert await response.json() == {"status": "ok"}


def test_settings_come_from_the_proxy_or_the_environment():
    config = load(Path(__file__).resolve().parents[2] / "noria.toml", {})
    assert settings_of(config, {}).base_url == "http://127.0.0.1:8700/v1"
    elsewhere = settings_of(config, {"OPENAI_BASE_URL": "https://x/v1", "OPENAI_API_KEY": "k"})
    assert (elsewhere.base_url, elsewhere.api_key) == ("https://x/v1", "k")
