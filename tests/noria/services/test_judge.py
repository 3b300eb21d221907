"""The judge against a scripted policy server on loopback that speaks the OpenAI wire format."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from noria.config import Config, load
from noria.contracts.errors import PolicyUnavailable
from noria.contracts.evaluation import EvaluationRequest, EvaluationResult
from noria.release.suite import freeze
from noria.services.judge import build
from noria.services.judge_client import evaluate
from noria.stores.artifacts import Artifacts

GOOD, OLD = "shop.router.r00002", "shop.router.r00001"
REWARD = """
import json

def router(attempt):
    expected = attempt.reference["right"]["explanation"]
    assert attempt.node == "router" and attempt.messages and attempt.response is None
    return 1.0 if attempt.output == expected else 0.1 if attempt.output else 0.0

def fails(attempt):
    raise KeyError("tool")
"""
TOML = """
[policy]
port = {policy_port}
[judge]
port = {judge_port}
concurrency = 3
timeout_seconds = 5
[proxy.upstreams.policy]
url = "http://127.0.0.1:1"
[targets."shop.router"]
selection = "router.sql"
reward = "rewards.py:router"
suite = "suites.py:router"
[targets."shop.broken"]
selection = "router.sql"
reward = "rewards.py:fails"
suite = "suites.py:router"
"""

Answer = Callable[["Policy", dict[str, Any]], Awaitable[web.Response]]


def completion(content: str | None, **message: Any) -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return web.json_response({"object": "chat.completion", "choices": [choice]})


async def answers(policy: "Policy", body: dict[str, Any]) -> web.Response:
    """The better version knows every answer, the older one only those of even questions."""
    await asyncio.sleep(0.002)
    number = int(body["messages"][0]["content"])
    return completion(f"tool-{number}" if body["model"] == GOOD or number % 2 == 0 else "tool-?")


@dataclass
class Policy:
    """A policy server that answers as its script says, and what it has seen."""

    answer: Answer = answers
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.answer(self, body)
        finally:
            self.in_flight -= 1

    @property
    def asked(self) -> Counter[str]:
        return Counter(body["model"] for body in self.bodies)


@dataclass
class World:
    policy: Policy
    config: Config
    artifacts: Artifacts
    suite: str
    url: str
    folder: Path

    async def ask(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        body = {"target": "shop.router", "candidate": GOOD, "baseline": OLD, "suite": self.suite, "seed": 1, **changes}
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/evaluations", json=body) as response:
            return response.status, await response.json()

    async def result(self, **changes: Any) -> EvaluationResult:
        status, body = await self.ask(**changes)
        assert status == 200, body
        return EvaluationResult.model_validate(body)

    async def refusal(self, status: int, **changes: Any) -> str:
        found, body = await self.ask(**changes)
        assert found == status, body
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return str(body["error"]["message"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def write_project(folder: Path, policy_port: int, judge_port: int = 8702) -> Config:
    (folder / "rewards.py").write_text(REWARD)
    file = folder / "noria.toml"
    file.write_text(TOML.format(policy_port=policy_port, judge_port=judge_port))
    return load(file, overrides={})


def items(count: int = 8, **request: Any) -> list[dict[str, Any]]:
    return [
        {
            "item": f"q{k}",
            "input": {"messages": [{"role": "user", "content": str(k)}], **request},
            "reference": {"right": {"value": 1.0, "explanation": f"tool-{k}"}},
        }
        for k in range(count)
    ]


@contextlib.asynccontextmanager
async def world(folder: Path, policy: Policy | None = None, **request: Any) -> AsyncIterator[World]:
    policy = policy or Policy()
    server = web.Application()
    server.router.add_post("/v1/chat/completions", policy.chat)
    async with TestServer(server) as policy_server:
        config = write_project(folder, int(policy_server.port or 0))
        artifacts = Artifacts(config.artifacts_dir)
        suite = freeze(items(**request), artifacts, "shop.router")
        async with TestServer(await build(config)) as judge:
            yield World(policy, config, artifacts, suite.path, str(judge.make_url("")).rstrip("/"), folder)


async def test_both_versions_are_scored_on_every_item(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        result = await w.result()
    assert [(p.item, p.candidate, p.baseline) for p in result.pairs] == [
        (f"q{k}", 1.0, 1.0 if k % 2 == 0 else 0.1) for k in range(8)
    ]
    assert result.pairs[1].candidate_answer == "tool-1"
    assert result.pairs[1].baseline_answer == "tool-?"
    assert result.scorer == "rewards.py:router"
    assert len(result.scorer_version) == 12
    assert result.suite == w.suite
    assert result.suite_sha256.startswith(w.suite.split("/")[-1].removesuffix(".parquet"))
    assert result.seconds > 0
    assert result.cached == ()
    assert w.policy.asked == {GOOD: 8, OLD: 8}
    assert w.policy.most_in_flight == 3


async def test_sampling_is_the_evaluations_not_the_items(tmp_path: Path) -> None:
    async with world(tmp_path, top_p=0.1, stream=True, temperature=1.3, model="base", tools=[], seed=99) as w:
        await w.result(temperature=0.5, max_tokens=7)
    for body in w.policy.bodies:
        assert body.keys() == {"messages", "model", "temperature", "seed", "n", "max_tokens", "tools"}
        assert (body["temperature"], body["max_tokens"], body["n"]) == (0.5, 7, 1)
    seeds = {
        model: {b["messages"][0]["content"]: b["seed"] for b in w.policy.bodies if b["model"] == model}
        for model in (GOOD, OLD)
    }
    assert seeds[GOOD] == seeds[OLD], "chance is paired too"
    assert len(set(seeds[GOOD].values())) == 8


async def test_tool_calls_are_scored_as_their_json(tmp_path: Path) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    async def call_tools(policy: Policy, body: dict[str, Any]) -> web.Response:
        return completion(None, tool_calls=calls)

    async with world(tmp_path, Policy(call_tools)) as w:
        result = await w.result()
    assert json.loads(result.pairs[0].candidate_answer) == calls


async def test_scores_outlive_the_judge(tmp_path: Path) -> None:
    policy = Policy()
    async with world(tmp_path, policy) as w:
        first = await w.result()
    async with world(tmp_path, policy) as w:
        again = await w.result()
        third = await w.result(candidate="shop.router.r00003")
    assert again.cached == (GOOD, OLD)
    assert again.pairs == first.pairs
    assert third.cached == (OLD,)
    assert policy.asked == {GOOD: 8, OLD: 8, "shop.router.r00003": 8}


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"temperature": 0.7}, {"max_tokens": 3}, {"target": "shop.other"}, {"reward": "# other\n"}]
)
async def test_scores_are_known_only_for_the_same_question(tmp_path: Path, change: dict[str, Any]) -> None:
    async with world(tmp_path) as w:
        await w.result()
        if "reward" in change:
            (w.folder / "rewards.py").write_text(REWARD + change.pop("reward"))
        if change.get("target") == "shop.other":
            assert "no target 'shop.other'" in await w.refusal(404, **change)
            return
        assert (await w.result(**change)).cached == ()
        assert w.policy.asked == {GOOD: 16, OLD: 16}


async def test_new_weights_under_an_old_name_are_asked_anew(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.result(baseline="base")
        w.artifacts.mark_complete("base", {"weights_sha256": "made anew"})
        assert (await w.result(baseline="shop.router.r00000")).cached == (GOOD,)
        assert (await w.result(baseline="base")).cached == (GOOD, "base"), "two names of the same weights"


async def test_a_broken_cache_file_is_made_again(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        first = await w.result()
        for broken in ("{", '{"scores": {"q0": [1.0, "x"]}}', "[]", '{"scores": {"q0": null}}'):
            for name in w.artifacts.list_dir("evaluations"):
                w.artifacts.write_bytes(f"evaluations/{name}", broken.encode())
            again = await w.result()
            assert again.cached == ()
            assert again.pairs == first.pairs


async def test_one_version_against_itself_is_asked_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        result = await w.result(candidate="base", baseline="shop.router.r00000")
    assert sum(w.policy.asked.values()) == 8
    assert all(p.candidate == p.baseline for p in result.pairs)


async def test_two_requests_for_the_same_share_one_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        one, other = await asyncio.gather(w.result(), w.result())
    assert one.pairs == other.pairs
    assert w.policy.asked == {GOOD: 8, OLD: 8}


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"mode": "end2end"}, 400, "the only mode is 'node'"),
        ({"target": "shop.nothing"}, 404, "known: shop.broken, shop.router"),
        ({"suite": "suites/shop.router/none.parquet"}, 404, "no suite at"),
        ({"suite": "../../etc/passwd"}, 400, "leaves the artifact folder"),
        ({"candidate": "gpt-4"}, 404, "no version 'gpt-4'"),
        ({"seed": -1}, 400, "seed"),
        ({"temprature": 1}, 400, "temprature"),
        ({"candidate": None}, 400, "candidate"),
        ({"target": "shop.broken"}, 400, "rewards.py:fails raised KeyError"),
    ],
)
async def test_what_cannot_be_evaluated_is_told(
    tmp_path: Path, changes: dict[str, Any], status: int, said: str
) -> None:
    async with world(tmp_path) as w:
        assert said in await w.refusal(status, **changes)


async def test_a_body_that_is_no_json_and_paths_that_do_not_exist_are_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w, aiohttp.ClientSession() as session:
        async with session.post(f"{w.url}/evaluations", data=b"{") as response:
            assert response.status == 400
            assert "EvaluationRequest" in (await response.json())["error"]["message"]
        async with session.get(f"{w.url}/nothing") as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"] == "GET /nothing: Not Found"


async def test_a_changed_suite_is_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.artifacts.write_bytes(w.suite, b"something else")
        assert "freeze the suite again" in await w.refusal(409)


@pytest.mark.parametrize(
    ("response", "status", "said"),
    [
        ((404, '{"error": {"message": "no model"}}'), 404, f"has no version '{GOOD}'"),
        ((400, '{"error": {"message": "too long"}}'), 400, "refused item"),
        ((500, "Traceback"), 502, "with 500: Traceback"),
        ((200, "nonsense"), 502, "with 200: nonsense"),
        ((200, '{"choices": []}'), 502, "with 200"),
    ],
)
async def test_what_the_policy_server_cannot_do_is_told(
    tmp_path: Path, response: tuple[int, str], status: int, said: str
) -> None:
    async def refuse(policy: Policy, body: dict[str, Any]) -> web.Response:
        return web.Response(status=response[0], text=response[1])

    async with world(tmp_path, Policy(refuse)) as w:
        message = await w.refusal(status)
        assert said in message
        assert w.config.policy.url in message
        assert w.artifacts.list_dir("evaluations") == [], "nothing half done is kept"


async def test_a_policy_server_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    async def starting(policy: Policy, body: dict[str, Any]) -> web.Response:
        return web.Response(status=503) if len(policy.bodies) <= 4 else await answers(policy, body)

    async with world(tmp_path, Policy(starting)) as w:
        assert len((await w.result()).pairs) == 8


async def test_a_policy_server_that_is_down_is_told_to_the_client(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        request = EvaluationRequest(target="shop.router", candidate=GOOD, baseline=OLD, suite=w.suite)
        result = await asyncio.to_thread(evaluate, w.url, request, 30.0)
        assert result.pairs[0].candidate == 1.0
    config = write_project(tmp_path, free_port())
    async with TestServer(await build(config)) as judge:
        url = str(judge.make_url(""))
        with pytest.raises(PolicyUnavailable, match=r"does not answer .* \[policy\] port") as caught:
            await asyncio.to_thread(evaluate, url, request.model_copy(update={"seed": 5}), 30.0)
    assert config.policy.url in str(caught.value)
    assert "(502)" in str(caught.value)
    with pytest.raises(PolicyUnavailable, match=r"\[judge\] port"):
        evaluate(f"http://127.0.0.1:{free_port()}", request, 5.0)


async def test_a_slow_judge_and_one_that_is_none_are_told(tmp_path: Path) -> None:
    request = EvaluationRequest(target="shop.router", candidate=GOOD, baseline=OLD, suite="x")

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response({"hello": "world"})

    app = web.Application()
    app.router.add_post("/evaluations", slow)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        with pytest.raises(PolicyUnavailable, match=r"no answer within 0.1 s"):
            await asyncio.to_thread(evaluate, url, request, 0.1)
        with pytest.raises(PolicyUnavailable, match="no evaluation"):
            await asyncio.to_thread(evaluate, url, request, 5.0)
        with pytest.raises(PolicyUnavailable, match=r"refused \(404\)"):
            await asyncio.to_thread(evaluate, f"{url}/elsewhere", request, 5.0)


async def test_health_answers_while_a_reward_is_slow(tmp_path: Path) -> None:
    async with world(tmp_path) as w, aiohttp.ClientSession() as session:
        (w.folder / "rewards.py").write_text("import time\ndef router(attempt):\n    time.sleep(0.2)\n    return 1.0\n")
        evaluation = asyncio.ensure_future(w.result())
        longest = 0.0
        while w.policy.asked[OLD] < 8:
            start = time.perf_counter()
            async with session.get(f"{w.url}/healthz") as response:
                assert await response.json() == {"status": "ok"}
            longest = max(longest, time.perf_counter() - start)
        assert longest < 1.0, "scoring the first version takes 1.6 s"
        await evaluation
        async with session.get(f"{w.url}/metrics") as response:
            text = await response.text()
    assert 'noria_judge_evaluations_total{outcome="ok"} 1.0' in text
    assert 'noria_judge_answers_total{source="policy"} 16.0' in text


def test_the_service_starts_answers_and_ends(tmp_path: Path) -> None:
    port = free_port()
    write_project(tmp_path, free_port(), port)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NORIA_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "noria.services.judge"],
        cwd=Path(__file__).parents[3],
        env={**environment, "NORIA_CONFIG": str(tmp_path / "noria.toml")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "judge ready on" in process.stderr.readline()
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.communicate()


def test_importing_the_judge_loads_no_model_library() -> None:
    check = "import sys, noria.services.judge, noria.release.report_page; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "great_expectations", "dagster", "scipy", "matplotlib"} & set(loaded)
