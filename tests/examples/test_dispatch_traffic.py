import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from aiohttp import web

from examples.dispatch import traffic
from examples.dispatch.agent import Settings, make_app
from examples.dispatch.data import queries
from examples.dispatch.data import traffic as traffic_queries
from noria.config import Config, ProxyConfig, TrafficConfig
from noria.contracts.errors import AgentUnavailable

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {query.text: query.tool for query in queries()}


def config_for(proxy_url: str, **settings: object) -> Config:
    port = int(proxy_url.rsplit(":", 1)[1])
    settings = {"rate": 200.0, "feedback_delay_seconds": 0.05, **settings}
    return Config(proxy=ProxyConfig(port=port), traffic=TrafficConfig(**settings))


@pytest.fixture
async def agent(proxy, serve, right_model) -> str:
    proxy.answer = right_model
    return await serve(make_app(Settings(f"{proxy.url}/v1", "none", 10.0)))


async def test_each_request_is_judged_by_the_business_system(agent, proxy, right_model):
    wrong = {query.text for query in islice(traffic.order(traffic_queries(), 0), 5)}

    def sometimes_wrong(node: str, text: str) -> str:
        return '{"name": "nothing"}' if text in wrong else right_model(node, text)

    proxy.answer = sometimes_wrong
    summary = await traffic.run(config_for(proxy.url), 20, url=agent)
    assert (summary.sent, summary.right, summary.errors, summary.unreported) == (20, 15, 0, 0)
    assert summary.accuracy == 0.75
    assert len(proxy.feedback) == 20
    asked = {headers["traceparent"].split("-")[1]: body for headers, body in proxy.chats if body["max_tokens"] == 24}
    for score in proxy.feedback:
        query = asked[score["trace_id"]]["messages"][-1]["content"]
        assert score == {
            "trace_id": score["trace_id"],
            "name": "right_function",
            "value": 0.0 if query in wrong else 1.0,
            "source": "business",
            "scorer": "dispatch-desk",
            "explanation": {"expected": TOOLS[query]},
        }


def test_the_order_is_shuffled_passes_by_seed():
    everything = traffic_queries()
    count = len(everything)
    first = list(islice(traffic.order(everything, 0), 2 * count))
    passes = [[query.text for query in first[:count]], [query.text for query in first[count:]]]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(query.text for query in everything)
    assert passes[0] != passes[1]
    assert [q.text for q in islice(traffic.order(everything, 0), 9)] == [q.text for q in first[:9]]
    assert [q.text for q in islice(traffic.order(everything, 1), 9)] != [q.text for q in first[:9]]


async def test_the_rate_is_kept(agent, proxy):
    began = time.monotonic()
    await traffic.run(config_for(proxy.url, feedback_delay_seconds=0.0), 20, 40.0, url=agent)
    assert 0.2 < time.monotonic() - began < 2.0  # 19 gaps of 25 ms on average


async def test_errors_are_counted_and_the_next_request_follows(agent, proxy, right_model):
    failing = iter([True, False, True, False, False])

    def answer(node: str, text: str):
        if node == "route" and next(failing):
            return web.json_response({}, status=500)
        return right_model(node, text)

    proxy.answer = answer
    summary = await traffic.run(config_for(proxy.url, concurrency=1), 5, url=agent)
    assert (summary.sent, summary.right, summary.errors) == (5, 3, 2)
    assert summary.accuracy == 1.0
    assert len(proxy.feedback) == 3


async def test_nonsense_from_the_agent_is_an_error(proxy, serve):
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(["what"])

    app = web.Application()
    app.router.add_get("/healthz", answer)
    app.router.add_post("/dispatch", answer)
    summary = await traffic.run(config_for(proxy.url), 2, url=await serve(app))
    assert (summary.sent, summary.errors, summary.accuracy) == (2, 2, 0.0)


async def test_it_waits_for_the_agent_and_says_so(proxy, right_model, caplog):
    caplog.set_level("INFO")
    proxy.answer = right_model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    run = asyncio.create_task(traffic.run(config_for(proxy.url), 2, url=url))
    await asyncio.sleep(0.5)
    assert caplog.text.count(f"waiting for the agent at {url}") == 1
    runner = web.AppRunner(make_app(Settings(f"{proxy.url}/v1", "none", 10.0)), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    assert (await run).right == 2
    await runner.cleanup()


async def test_patience_ends_in_one_clear_error(proxy):
    with pytest.raises(AgentUnavailable, match=r"the agent at http://127.0.0.1:9 is not up after 0.1 s"):
        await traffic.run(config_for(proxy.url), 1, url="http://127.0.0.1:9", patience_seconds=0.1)


async def test_stopping_posts_the_feedback_that_is_due(agent, proxy):
    stop = asyncio.Event()
    run = asyncio.create_task(traffic.run(config_for(proxy.url, feedback_delay_seconds=60.0), url=agent, stop=stop))
    while len(proxy.chats) < 10:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    stop.set()
    summary = await asyncio.wait_for(run, 10)
    assert summary.sent == summary.right == len(proxy.feedback) >= 5


def test_the_program_ends_cleanly_on_sigterm(tmp_path):
    environment = {**os.environ, "NORIA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "examples.dispatch.traffic", "--url", "http://127.0.0.1:9"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = [process.stderr.readline(), process.stderr.readline()]
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=20)[1]
    assert "traffic ready: 8 requests per second to http://127.0.0.1:9" in lines[0]
    assert "waiting for the agent at http://127.0.0.1:9" in lines[1]
    assert "sent 0, right 0" in rest
    assert process.returncode == 0


def test_bad_configuration_is_one_line_and_exit_code_2(tmp_path):
    environment = {**os.environ, "NORIA_TRAFFIC__RAET": "3"}
    command = [sys.executable, "-m", "examples.dispatch.traffic", "--count", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == "noria traffic: noria.toml: unknown key 'traffic.raet'; did you mean 'rate'?"
