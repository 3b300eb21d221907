"""The proxy as one aiohttp application: its routes, and the parts behind them from start to end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from noria.config import Config
from noria.services.proxy.chat import Chat
from noria.services.proxy.intake import Intake
from noria.services.proxy.keys import check_exposure
from noria.services.proxy.metrics import Metrics
from noria.services.proxy.recording import Recordings
from noria.services.proxy.relay import Relay, open_session
from noria.services.proxy.routing import ReleaseTable, Router
from noria.services.proxy.spool import Spool
from noria.stores.online import OnlineStore

SPOOL = web.AppKey("spool", Spool)
"""The running proxy's spool."""

FLUSH_SECONDS = 15.0
"""How long a reader of records waits for the spool to be in the store."""

PREFIXES = ("", "/apps/{app}", "/apps/{app}/nodes/{node}", "/tenants/{tenant}/apps/{app}",
            "/tenants/{tenant}/apps/{app}/nodes/{node}")  # fmt: skip
"""What may stand before `/v1`, so that an agent can say whose call it is with a base URL alone."""

_CHAT = web.AppKey("chat", Chat)
_INTAKE = web.AppKey("intake", Intake)
_METRICS = web.AppKey("metrics", Metrics)
_RELAY = web.AppKey("relay", Relay)
_ROUTER = web.AppKey("router", Router)


def create_app(config: Config, store: OnlineStore) -> web.Application:
    """The proxy over one online store; it starts with the application and ends with it.

    Serve it with `handler_cancellation=True`: by that it learns that a caller has left. Raises `ConfigError` for
    upstreams, keys or a host that cannot serve.
    """
    proxy = config.proxy
    key = config.trainer_key()
    check_exposure(proxy, key)
    releases = ReleaseTable(store, proxy.release_poll_seconds)
    router = Router(config, releases)
    app = web.Application(client_max_size=proxy.max_body_bytes)

    async def running(app: web.Application) -> AsyncIterator[None]:
        spool = Spool(
            config.spool_dir,
            store,
            fsync=proxy.spool_fsync,
            flush_seconds=proxy.store_flush_seconds,
            max_bytes=proxy.spool_max_bytes,
        )
        metrics = Metrics(spool)
        recordings = Recordings(store, spool, FLUSH_SECONDS)
        async with open_session(proxy.timeout_seconds) as session:
            relay = Relay(session, spool, metrics)
            app[SPOOL] = spool
            app[_METRICS] = metrics
            app[_RELAY] = relay
            app[_ROUTER] = router
            app[_CHAT] = Chat(proxy, key, router, recordings, relay, metrics)
            app[_INTAKE] = Intake(proxy, key, spool, recordings)
            await spool.start()
            await releases.refresh()
            following = asyncio.create_task(releases.follow())
            yield
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            await spool.close()

    app.cleanup_ctx.append(running)
    for prefix in PREFIXES:
        app.router.add_post(f"{prefix}/v1/chat/completions", _chat)
        app.router.add_get(f"{prefix}/v1/models", _models, allow_head=False)
        app.router.add_post(f"{prefix}/v1/feedback", _feedback)
        app.router.add_post(f"{prefix}/v1/episodes", _episodes)
    app.router.add_get("/v1/traces/{trace_id}", _trace)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    return app


async def _chat(request: web.Request) -> web.StreamResponse:
    return await request.app[_CHAT].handle(request)


async def _models(request: web.Request) -> web.StreamResponse:
    return await request.app[_RELAY].get(request, request.app[_ROUTER].default, "/v1/models")


async def _feedback(request: web.Request) -> web.StreamResponse:
    return await request.app[_INTAKE].feedback(request)


async def _episodes(request: web.Request) -> web.StreamResponse:
    return await request.app[_INTAKE].episode(request)


async def _trace(request: web.Request) -> web.StreamResponse:
    return await request.app[_INTAKE].trace(request)


async def _healthz(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})


async def _metrics(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=request.app[_METRICS].text(), headers=headers)
