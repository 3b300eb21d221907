"""The HTTP side of the policy server: requests in, versions and engine behind, OpenAI's wire format out."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web
from uuid_utils import uuid7

from noria.config_services import PolicyConfig
from noria.contracts.errors import InvalidRecord, NotFound, PolicyUnavailable
from noria.services.policy.engine import Engine
from noria.services.policy.metrics import PolicyMetrics
from noria.services.policy.row import Progress, Row
from noria.services.policy.versions import Resolve, Version, Versions
from noria.services.policy.wire import Answer, ChatRequest, RequestRefused, error_body, read_chat, read_object

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32_000_000


def create_app(config: PolicyConfig, resolve: Resolve, names: Callable[[], Iterable[str]] = tuple) -> web.Application:
    """The policy server as an aiohttp application.

    `resolve` finds a version's folder by name and raises `NotFound`; `names` lists the versions on disk. Run it with
    `web.AppRunner(app, handler_cancellation=True)`: only then a client that leaves frees its rows.
    """
    server = PolicyServer(config, resolve, names)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    app.cleanup_ctx.append(server.run)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/versions", server.preload)
    app.router.add_get("/healthz", server.healthz)
    app.router.add_get("/metrics", server.expose)
    return app


class PolicyServer:
    """The handlers, and the engine and versions that they share."""

    def __init__(self, config: PolicyConfig, resolve: Resolve, names: Callable[[], Iterable[str]]) -> None:
        self._config = config
        self._names = names
        self._versions = Versions(resolve, config.max_versions, config.device)
        self._metrics = PolicyMetrics()
        self._engine: Engine

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Start the engine with the application and end it with it."""
        self._engine = Engine(
            max_batch=self._config.max_batch,
            batch_wait_ms=self._config.batch_wait_ms,
            threads=self._config.threads,
            observer=self._metrics,
            post=asyncio.get_running_loop().call_soon_threadsafe,
        )
        yield
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._versions.close)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        begin = time.monotonic()
        status = 500
        try:
            request = read_chat(await http.read())
            async with self._versions.lease(request.model) as version:
                # Templates and long prompts take milliseconds that other connections need not wait for.
                prompt = await asyncio.to_thread(
                    version.encode_chat, request.conversation(), request.tools, request.chat_template_kwargs
                )
                room = self._room(version, prompt)
                self._metrics.prompt_tokens.inc(len(prompt))
                answer = Answer(request, version, prompt, f"chatcmpl-{uuid7().hex}", int(time.time()))
                async with self._rows(request, version, prompt, room) as news:
                    reply = self._stream if request.stream else self._whole
                    response = await reply(http, request, answer, news)
            status = response.status
            return response
        except Exception as error:
            status = _status(error)
            raise
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            self._metrics.requests.labels(str(status)).inc()
            self._metrics.seconds.observe(time.monotonic() - begin)

    def _room(self, version: Version, prompt: list[int]) -> int:
        """The most tokens that an answer to this prompt may have. Raises `RequestRefused` if there is room for none."""
        if not prompt:
            raise RequestRefused("the chat template makes no tokens of these messages; send some text", "messages")
        room = version.context - len(prompt)
        if room < 1:
            raise RequestRefused(
                f"the messages have {len(prompt)} tokens, but the model's context is {version.context} tokens with the "
                "answer; shorten the messages",
                "messages",
                "context_length_exceeded",
            )
        return min(room, self._config.max_new_tokens)

    @asynccontextmanager
    async def _rows(
        self, request: ChatRequest, version: Version, prompt: list[int], room: int
    ) -> AsyncIterator["asyncio.Queue[tuple[int, Progress]]"]:
        """Put the `n` answers to work and lend the queue of their progress; give them up on the way out."""
        news: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()

        def sink(member: int, progress: Progress) -> None:
            news.put_nowait((member, progress))

        settings = (
            request.settings(member, room, deterministic=self._config.deterministic) for member in range(request.n)
        )
        rows = [
            Row(version, prompt, each, partial(sink, member), stream=request.stream)
            for member, each in enumerate(settings)
        ]
        self._engine.submit(rows)
        try:
            yield news
        finally:
            for row in rows:
                row.cancel()

    async def _whole(
        self, _: web.Request, request: ChatRequest, answer: Answer, news: "asyncio.Queue[tuple[int, Progress]]"
    ) -> web.StreamResponse:
        answers: dict[int, Progress] = {}
        while len(answers) < request.n:
            member, progress = await _next(news)
            answers[member] = progress
        return web.json_response(answer.whole([answers[i] for i in range(request.n)]))

    async def _stream(
        self, http: web.Request, request: ChatRequest, answer: Answer, news: "asyncio.Queue[tuple[int, Progress]]"
    ) -> web.StreamResponse:
        # The head waits for the first token, so that a failure before it is still an honest HTTP status.
        member, progress = await _next(news)
        chunk: dict[str, Any] | None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        for chunk in answer.opening():
            await response.write(_event(chunk))
        completion, ended = 0, 0
        try:
            while True:
                completion += len(progress.token_ids)
                if (chunk := answer.delta(member, progress)) is not None:
                    await response.write(_event(chunk))
                ended += progress.finish_reason is not None
                if ended == request.n:
                    break
                member, progress = await _next(news)
        except PolicyUnavailable as error:
            # The status has been sent. An error event and no [DONE] is what OpenAI's clients take for a failure.
            await response.write(_event(error_body(error, 500)))
        else:
            if request.stream_options.include_usage:
                await response.write(_event(answer.closing(completion)))
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`: what can be asked for, loaded or not."""
        loaded = self._versions.loaded
        on_disk = await asyncio.to_thread(lambda: list(self._names()))
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "noria", "loaded": name in loaded}
            for name in dict.fromkeys([*on_disk, *sorted(loaded)])
        ]
        return web.json_response({"object": "list", "data": data})

    async def preload(self, http: web.Request) -> web.Response:
        """`POST /v1/versions` with `{"name": …}`: load a version before the first request asks for it."""
        name = read_object(await http.read()).get("name")
        if not isinstance(name, str) or not name:
            raise RequestRefused(
                f'name is {name!r}, but must be text; send {{"name": "dispatch.router.r00001"}}', "name"
            )
        begin = time.monotonic()
        async with self._versions.lease(name) as version:
            loaded = {"name": name, "path": str(version.path), "seconds": time.monotonic() - begin}
        return web.json_response(loaded)

    async def healthz(self, _: web.Request) -> web.Response:
        """`GET /healthz`: 200 while the engine's worker lives."""
        alive = self._engine.alive
        return web.json_response({"status": "ok" if alive else "engine died"}, status=200 if alive else 503)

    async def expose(self, _: web.Request) -> web.Response:
        """`GET /metrics`."""
        self._metrics.versions.set(len(set(self._versions.loaded.values())))
        self._metrics.waiting.set(self._engine.waiting)
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def _next(news: "asyncio.Queue[tuple[int, Progress]]") -> tuple[int, Progress]:
    member, progress = await news.get()
    if progress.error is not None:
        raise progress.error
    return member, progress


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _status(error: Exception) -> int:
    if isinstance(error, web.HTTPException):
        return error.status
    if isinstance(error, ConnectionError):
        return 499
    return 400 if isinstance(error, InvalidRecord) else 404 if isinstance(error, NotFound) else 500


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error leaves in OpenAI's shape."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has left; there is nobody to tell
    except web.HTTPException as error:
        body = error_body(RequestRefused(f"{request.method} {request.path}: {error.reason}"), error.status)
        return web.json_response(body, status=error.status)
    except Exception as error:
        status = _status(error)
        if status == 500 and not isinstance(error, PolicyUnavailable):
            log.exception("%s %s failed", request.method, request.path)
        return web.json_response(error_body(error, status), status=status)
