"""A real proxy over a real SQLite store, and real upstream servers on loopback that answer as each test says."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from uuid_utils import uuid7

from noria.config import Config
from noria.contracts.call import Arm, Call, CallStatus
from noria.contracts.rollout import META_HEADER, Directive
from noria.rollout.directive import sign
from noria.services.proxy.app import SPOOL, create_app
from noria.services.proxy.runner import ProxyRunner
from noria.services.proxy.writer import open_store
from noria.stores.online import OnlineStore

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def completion(content: str = "hello", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"id": "c1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage, **more}


async def echo(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers with the last message, so that a test sees which call it was."""
    return web.json_response(completion(f"echo {body['messages'][-1]['content']}"))


def streaming(*pieces: bytes, status: int = 200) -> Reply:
    """Sends the pieces one by one, each on its own."""

    async def reply(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return reply


@dataclass
class Upstream:
    """An upstream and what it was asked."""

    url: str = ""
    reply: Reply = echo
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        return await self.reply(request, json.loads(body))


async def serve(app: web.Application, runner: web.AppRunner | None = None) -> tuple[web.AppRunner, str]:
    runner = runner or web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def start_upstream() -> AsyncIterator[Callable[..., Awaitable[Upstream]]]:
    runners = []

    async def start(reply: Reply = echo) -> Upstream:
        upstream = Upstream(reply=reply)

        async def models(_request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

        app = web.Application(client_max_size=0)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/{rest:.*}", upstream.chat)
        runner, upstream.url = await serve(app)
        runners.append(runner)
        return upstream

    yield start
    for runner in runners:
        await runner.cleanup()


@dataclass
class Proxy:
    """A running proxy, its store, and a client session."""

    url: str
    app: web.Application
    config: Config
    store: OnlineStore
    session: aiohttp.ClientSession

    async def chat(self, content: str = "hi", headers: dict[str, str] | None = None, **more: Any) -> tuple[int, Any]:
        """Make one unstreamed call; status and parsed answer."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **more}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def stream(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """Make one streamed call; the parsed chunks before `[DONE]`."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            events = (await answer.read()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def directed(self, directive: Directive, node: str, **changes: Any) -> dict[str, str]:
        """Headers of a call of a rollout."""
        token = sign(replace(directive, **changes), self.config.trainer_key())
        return {META_HEADER: token, "x-noria-app": "dispatch", "x-noria-node": node}

    async def calls(self) -> list[Call]:
        """Everything recorded so far."""
        await self.app[SPOOL].flushed()
        return self.store.calls_after(0, 1000)

    async def metrics(self) -> str:
        async with self.session.get(f"{self.url}/metrics") as answer:
            return await answer.text()


@pytest.fixture
async def start_proxy(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Proxy]]]:
    started = []

    async def start(upstreams: dict[str, Any], store_url: str | None = None, **proxy: Any) -> Proxy:
        table = {name: {"url": value} if isinstance(value, str) else value for name, value in upstreams.items()}
        name = next(iter(table))
        policy = "policy" if "policy" in table else name
        settings = {"default_upstream": name, "policy_upstream": policy, "writer": "thread", **proxy}
        config = Config.model_validate(
            {"proxy": {"upstreams": table, **settings}, "store": {"url": store_url}, "root": tmp_path}
        )
        store = open_store(config)
        if store_url is None:
            store.upgrade()
        app = create_app(config, store)
        runner, url = await serve(app, ProxyRunner(app, config.proxy, drain_seconds=2))
        session = aiohttp.ClientSession()
        started.append((session, runner, store))
        return Proxy(url, app, config, store, session)

    yield start
    for session, runner, store in started:
        await session.close()
        await runner.cleanup()
        store.close()


@pytest.fixture
def replies() -> SimpleNamespace:
    """What an upstream can answer: `echo`, `streaming(*pieces)`, and the object `completion(content, **more)`."""
    return SimpleNamespace(echo=echo, streaming=streaming, completion=completion)


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """A valid call, with the changes that a test names."""

    def make(**changes: Any) -> Call:
        now = datetime.now(UTC)
        call = Call(
            uid=str(uuid7()),
            tenant="t",
            app="a",
            process_node="n",
            trace_id="1" * 32,
            model_name="m",
            policy_version=None,
            arm=Arm.LIVE,
            input="{}",
            output="{}",
            status=CallStatus.OK,
            request_time=now,
            response_time=now,
            duration_ms=1.0,
        )
        return replace(call, **changes)

    return make
