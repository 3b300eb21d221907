"""The agent: an ordinary service that asks a model through an OpenAI client and knows nothing of training.

`POST /dispatch {"query"}` is its business: node `router` asks the model which tool is right, the tool runs, and node
`reply` asks the model to phrase the result. Noria meets it in two places: the client's base URL is the proxy, with
headers that say whose call it is, and `POST /rollout {"originRequest", "trainMeta"}` runs the same business on a
recorded request, with `trainMeta` forwarded on each model call and nothing reported as business.

    python -m examples.dispatch.agent
"""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from examples.dispatch.episodes import EpisodeLog
from examples.dispatch.prompts import (
    APP,
    MAX_TOKENS,
    MODEL,
    REPLY,
    ROUTER,
    UNKNOWN_TOOL,
    Message,
    named_tool,
    reply_messages,
    router_messages,
)
from examples.dispatch.tool import run_tool
from noria.config import Config
from noria.services.serving import run

META_HEADER = "x-noria-meta"

_Body = TypeVar("_Body", bound=BaseModel)
_log = logging.getLogger("dispatch.agent")
_AGENT = web.AppKey("agent", "Agent")
_EPISODES = web.AppKey("episodes", EpisodeLog)


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the model is (`base_url` ends in /v1), the key for it, and how long one model call may take."""

    base_url: str
    api_key: str
    timeout_seconds: float


class DispatchBody(BaseModel):
    """Body of `POST /dispatch`."""

    query: str = Field(min_length=1, max_length=4000)


class RolloutBody(BaseModel):
    """Body of `POST /rollout`: a recorded body of `POST /dispatch` as text, and what to forward (fit for a header)."""

    originRequest: str
    trainMeta: str = Field(min_length=1, max_length=7000, pattern=r"^[\x21-\x7e]+$")


class UpstreamFailed(Exception):
    """The model could not be asked, or what came back is no chat completion."""


class Agent:
    """The business logic: router, tool, reply."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def dispatch(self, query: str, trace_id: str, forward: Mapping[str, str]) -> dict[str, Any]:
        """Answer one query. `forward` holds headers to send with each model call. Raises `UpstreamFailed`."""
        name = named_tool(await self._ask(ROUTER, router_messages(query), trace_id, forward))
        result = run_tool(name, query)
        reply = await self._ask(REPLY, reply_messages(result), trace_id, forward)
        tool = None if result["tool"] == UNKNOWN_TOOL else result["tool"]
        return {"reply": reply.strip(), "tool": tool, "result": result, "trace_id": trace_id}

    async def _ask(self, node: str, messages: list[Message], trace_id: str, forward: Mapping[str, str]) -> str:
        headers = {
            "x-noria-node": node,
            "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
            "baggage": f"noria.app={APP},noria.node={node}",
            **forward,
        }
        try:
            completion = await self._client.chat.completions.create(
                model=MODEL,
                messages=messages,  # type: ignore[arg-type]  # the SDK's union of TypedDicts
                temperature=0.0,
                max_tokens=MAX_TOKENS[node],
                extra_headers=headers,
            )
        except openai.APIStatusError as error:
            raise UpstreamFailed(f"node {node!r}: the model answered {error.status_code}: {error.message}") from error
        except openai.APIConnectionError as error:
            why = error.__cause__ or error
            raise UpstreamFailed(f"node {node!r}: {self._client.base_url} does not answer: {why!r}") from error
        except (openai.OpenAIError, ValueError) as error:  # ValueError: a body that says JSON and is none
            raise UpstreamFailed(f"node {node!r}: {error}") from error
        try:  # the SDK does not check what a server sends: a body without choices arrives here all the same
            content = completion.choices[0].message.content or ""
        except (AttributeError, IndexError, TypeError) as error:
            raise UpstreamFailed(f"node {node!r}: the model's answer is no chat completion") from error
        if not isinstance(content, str):
            raise UpstreamFailed(f"node {node!r}: the model's content is {type(content).__name__}, not text")
        return content


def agent_version() -> str:
    """Which build of the agent this is: a hash of the files that decide what it does."""
    folder = Path(__file__).parent
    sources = b"".join((folder / name).read_bytes() for name in ("agent.py", "prompts.py", "tool.py"))
    return hashlib.sha256(sources).hexdigest()[:12]


def settings_of(config: Config, environment: Mapping[str, str] = os.environ) -> Settings:
    """The proxy of noria.toml, or the server that `OPENAI_BASE_URL` and `OPENAI_API_KEY` name."""
    return Settings(
        base_url=environment.get("OPENAI_BASE_URL") or f"{config.proxy.url}/v1",
        api_key=environment.get("OPENAI_API_KEY") or "none",
        timeout_seconds=config.agent.timeout_seconds,
    )


def make_app(settings: Settings) -> web.Application:
    """The agent's web application."""
    app = web.Application(middlewares=[_errors_as_json])
    app.router.add_post("/dispatch", _dispatch)
    app.router.add_post("/rollout", _rollout)
    app.router.add_get("/healthz", _healthz)

    async def life(app: web.Application) -> Any:
        version = agent_version()
        # No retries: a failure is told at once, and one task never leaves two records of the same call.
        client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=settings.api_key,
            timeout=settings.timeout_seconds,
            max_retries=0,
            default_headers={"x-noria-app": APP, "x-noria-agent-version": version},
        )
        episodes_url = f"{settings.base_url.rstrip('/')}/episodes"
        async with client, EpisodeLog(episodes_url, APP, version, settings.api_key) as episodes:
            app[_AGENT] = Agent(client)
            app[_EPISODES] = episodes
            yield

    app.cleanup_ctx.append(life)
    return app


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _dispatch(request: web.Request) -> web.Response:
    text = await request.text()
    query = _read(DispatchBody, text).query
    trace_id = secrets.token_hex(16)
    episodes = request.app[_EPISODES]
    try:
        answer = await request.app[_AGENT].dispatch(query, trace_id, {})
    except UpstreamFailed as error:
        response = _error("upstream_error", str(error), trace_id=trace_id)
        episodes.post(trace_id, text, response, "upstream_error")
        return web.Response(text=response, status=502, content_type="application/json")
    response = json.dumps(answer, ensure_ascii=False)
    episodes.post(trace_id, text, response, "ok")
    return web.Response(text=response, content_type="application/json")


async def _rollout(request: web.Request) -> web.Response:
    body = _read(RolloutBody, await request.text())
    query = _read(DispatchBody, body.originRequest, "originRequest").query
    trace_id = secrets.token_hex(16)
    try:
        answer = await request.app[_AGENT].dispatch(query, trace_id, {META_HEADER: body.trainMeta})
    except UpstreamFailed as error:
        text = _error("upstream_error", str(error), trace_id=trace_id)
        return web.Response(text=text, status=502, content_type="application/json")
    return web.json_response({"originResponse": json.dumps(answer, ensure_ascii=False)})


def _read(model: type[_Body], text: str, where: str = "body") -> _Body:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *(str(part) for part in first["loc"])])
        raise web.HTTPBadRequest(
            text=_error("bad_request", f"{place}: {first['msg']}"), content_type="application/json"
        ) from error


def _error(kind: str, message: str, **more: str) -> str:
    return json.dumps({"error": {"type": kind, "message": message}, **more})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400 or error.content_type == "application/json":
            raise
        return web.Response(
            text=_error(error.reason.lower().replace(" ", "_"), f"{error.reason}: {request.method} {request.path}"),
            status=error.status,
            content_type="application/json",
        )
    except UnicodeDecodeError:
        return web.Response(
            text=_error("bad_request", "body: not UTF-8 text"), status=400, content_type="application/json"
        )


async def _build(config: Config) -> web.Application:
    settings = settings_of(config)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # the SDK's client logs a line for every call
    _log.info("asking the model at %s as build %s", settings.base_url, agent_version())
    return make_app(settings)


def _address(config: Config) -> tuple[str, int]:
    url = config.agent.url
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    return host, int(port or 80)


if __name__ == "__main__":
    run("agent", _build, _address)
