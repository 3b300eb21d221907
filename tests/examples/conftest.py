import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # the examples are run from the project's folder and are no installed package
    sys.path.append(str(ROOT))


@dataclass
class MockProxy:
    """A server that speaks the wire format of the proxy: chat completions, episodes and feedback."""

    url: str = ""
    chats: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    feedback: list[dict[str, Any]] = field(default_factory=list)
    answer: Callable[[str, str], str | web.Response] = lambda node, text: "hello"
    episode_statuses: list[int] = field(default_factory=list)
    """Statuses with which the next posts of episodes are answered, 200 once they are used up."""

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.chats.append((dict(request.headers), body))
        answer = self.answer(body["messages"][0]["content"], body["messages"][-1]["content"])
        if isinstance(answer, web.Response):
            return answer
        message = {"role": "assistant", "content": answer}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    async def episode(self, request: web.Request) -> web.Response:
        status = self.episode_statuses.pop(0) if self.episode_statuses else 200
        if status == 200:
            self.episodes.append(await request.json())
        return web.json_response({}, status=status)

    async def score(self, request: web.Request) -> web.Response:
        self.feedback.append(await request.json())
        return web.json_response({})


async def listen(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


@pytest.fixture
async def proxy() -> AsyncIterator[MockProxy]:
    mock = MockProxy()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", mock.chat)
    app.router.add_post("/v1/episodes", mock.episode)
    app.router.add_post("/v1/feedback", mock.score)
    runner, mock.url = await listen(app)
    yield mock
    await runner.cleanup()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[web.Application], Any]]:
    """Serves an application on a free port of the loopback and returns its URL."""
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> str:
        runner, url = await listen(app)
        runners.append(runner)
        return url

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def right_model() -> Callable[[str, str], str]:
    """Answers each traffic query with its right tool, and each tool result with a right sentence."""
    from examples.dispatch.data import queries
    from examples.dispatch.tool import NOUNS

    tools = {query.text: query.tool for query in queries()}

    def answer(node: str, text: str) -> str:
        if node == "route":
            return json.dumps({"name": tools.get(text, "nothing")})
        result = json.loads(text)
        return f" I found {result['found']} {NOUNS[result['tool']].plural}. "

    return answer
