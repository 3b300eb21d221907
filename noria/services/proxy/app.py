"""The proxy as one aiohttp application: its routes, and the parts behind them from start to end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import unquote

from aiohttp import web

from noria.config import Config
from noria.contracts.access import Scope
from noria.services.proxy.access import Access
from noria.services.proxy.calls import Calls
from noria.services.proxy.captured import CaptureMemory
from noria.services.proxy.exchange import KINDS, Kind
from noria.services.proxy.intake import Intake
from noria.services.proxy.key_endpoints import KeyEndpoints
from noria.services.proxy.keys import check_exposure
from noria.services.proxy.limits import Limits
from noria.services.proxy.metrics import Metrics
from noria.services.proxy.openapi import description
from noria.services.proxy.otlp import OtlpIntake
from noria.services.proxy.passing import Passing
from noria.services.proxy.pinned import Pinned
from noria.services.proxy.ready import Readiness
from noria.services.proxy.refusal import REFUSALS, refusal_response
from noria.services.proxy.relay import Relay, open_session
from noria.services.proxy.routing import Router
from noria.services.proxy.runner import only
from noria.services.proxy.serving_table import ReleaseTable
from noria.services.proxy.spool import Spool
from noria.services.proxy.writer import ProcessWriter, ThreadWriter
from noria.stores.online import OnlineStore

SPOOL = web.AppKey("spool", Spool)
"""The running proxy's spool."""

PREFIXES = ("", "/apps/{app}", "/apps/{app}/nodes/{node}", "/tenants/{tenant}/apps/{app}",
            "/tenants/{tenant}/apps/{app}/nodes/{node}")  # fmt: skip
"""What may stand before `/v1`, so that an agent can say whose call it is with a base URL alone."""

_CALLS = web.AppKey("calls", Calls)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(config: Config, store: OnlineStore) -> web.Application:
    """The proxy over one online store; it starts with the application and ends with it.

    Serve it with `ProxyRunner`: by that it learns that a caller has left, and gets bodies as they came. Raises
    `ConfigError` for upstreams, keys or a host that cannot serve.
    """
    proxy = config.proxy
    check_exposure(config, store)
    access = Access(config, store)
    limits = Limits(proxy)
    readiness = Readiness(store, access)
    releases = ReleaseTable(store, proxy.release_poll_seconds)
    router = Router(config, releases)
    memory = CaptureMemory(proxy.capture_memory_bytes, config.spool_dir)
    writer = ProcessWriter(config) if proxy.writer == "process" else ThreadWriter(config, store)
    spool = Spool(
        config.spool_dir,
        writer,
        fsync=proxy.spool_fsync,
        flush_seconds=proxy.store_flush_seconds,
        max_bytes=proxy.spool_max_bytes,
    )
    metrics = Metrics(spool, memory, limits)
    pinned = Pinned(config, store, spool, router)
    app = web.Application(client_max_size=0)
    app[SPOOL] = spool

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with open_session(proxy.timeout_seconds) as session:
            relay = Relay(session, spool, metrics, access.is_own_key)
            passing = Passing(session, proxy.max_body_bytes, access.is_own_key)
            app[_CALLS] = Calls(config, access, limits, readiness, router, pinned, relay, passing, metrics, memory)
            await spool.start()
            await asyncio.gather(readiness.refresh(), access.refresh(), releases.refresh())
            following = [asyncio.create_task(part.follow()) for part in (readiness, access, releases)]
            yield
            for task in following:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*following)
            await spool.close()

    app.cleanup_ctx.append(running)
    _add_own_routes(app, config, store, access, limits, spool, readiness, metrics)
    for prefix in PREFIXES:
        for path, kind in KINDS.items():
            app.router.add_post(f"{prefix}{path}", _model_call(prefix, kind))
        app.router.add_route("*", f"{prefix}/v1/{{rest:.*}}", _pass_through(prefix))
    return app


def _add_own_routes(
    app: web.Application,
    config: Config,
    store: OnlineStore,
    access: Access,
    limits: Limits,
    spool: Spool,
    readiness: Readiness,
    metrics: Metrics,
) -> None:
    """What the proxy answers itself."""
    intake = Intake(config, store, spool, access)
    otlp = OtlpIntake(config.proxy, access, limits, spool)
    metrics.watch("noria_otlp_calls", "Calls that came in as spans and are in the spool", lambda: otlp.received)
    metrics.watch("noria_otlp_rejected_spans", "Spans of calls that could not be kept", lambda: otlp.rejected)
    keys = KeyEndpoints(config, store, access)
    for prefix in PREFIXES:
        only(app.router, f"{prefix}/v1/feedback", post=intake.feedback)
        only(app.router, f"{prefix}/v1/episodes", post=intake.episode)
        only(app.router, f"{prefix}/v1/traces", post=otlp.traces)
    only(app.router, "/v1/traces/{trace_id}", get=intake.trace)
    only(app.router, "/noria/v1/keys", get=keys.list, post=keys.create)
    only(app.router, "/noria/v1/keys/{key_id}", delete=keys.revoke)

    async def healthz(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def readyz(_request: web.Request) -> web.StreamResponse:
        problem = readiness.problem
        if problem is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "reason": problem}, status=503)

    async def scrape(request: web.Request) -> web.StreamResponse:
        try:
            if access.required:
                access.require_instance(access.caller(request.headers), Scope.ADMIN)
        except REFUSALS as error:
            return refusal_response(error)[0]
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=metrics.text(), headers=headers)

    async def openapi(_request: web.Request) -> web.StreamResponse:
        return web.json_response(description(keys_required=access.required))

    for path, handler in (
        ("/healthz", healthz),
        ("/readyz", readyz),
        ("/metrics", scrape),
        ("/openapi.json", openapi),
    ):
        only(app.router, path, get=handler)


def _model_call(prefix: str, kind: Kind) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await request.app[_CALLS].handle(request, kind, _path(request, prefix))

    return handle


def _pass_through(prefix: str) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await request.app[_CALLS].pass_through(request, _path(request, prefix))

    return handle


def _path(request: web.Request, prefix: str) -> str:
    """The path and query below the upstream's URL, in the caller's own spelling."""
    target = request.raw_path
    if not target.startswith("/"):  # a request line may have the whole URL (RFC 9112, section 3.2.2)
        target = request.rel_url.raw_path_qs
    for _ in range(prefix.count("/")):
        target = target[target.index("/", 1) :]
    _check_path(target)
    return target


def _check_path(target: str) -> None:
    """Raise 400 for a path that would lead out of /v1/ on an upstream that resolves `..` in it."""
    path = target.partition("?")[0]
    if "." not in path and "%" not in path:
        return
    plain = unquote(unquote(path)).replace("\\", "/")
    if any(segment in (".", "..") for segment in plain.split("/")):
        raise web.HTTPBadRequest(text=f"the path {path[:200]!r} has a '.' or '..' segment; write it out")
