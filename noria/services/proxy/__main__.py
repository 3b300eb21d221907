"""`python -m noria.services.proxy`."""

import gc

import uvloop
from aiohttp import web

from noria.config import Config
from noria.services.proxy.app import create_app
from noria.services.proxy.runner import ProxyRunner
from noria.services.proxy.writer import open_store
from noria.services.serving import DRAIN_SECONDS, run


async def _build(config: Config) -> web.Application:
    app = create_app(config, open_store(config))
    app.on_startup.append(_spare_collector)
    return app


async def _spare_collector(_app: web.Application) -> None:
    """Leave what lives as long as the process out of garbage collections; each would walk over all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _address(config: Config) -> tuple[str, int]:
    return config.proxy.host, config.proxy.port


def _runner(app: web.Application, config: Config) -> web.AppRunner:
    return ProxyRunner(app, config.proxy, drain_seconds=DRAIN_SECONDS)


if __name__ == "__main__":
    # uvloop: the libuv loop; aiohttp's own advice for servers, and the peer of the benchmark runs on it too.
    run("proxy", _build, _address, runner=_runner, new_event_loop=uvloop.new_event_loop)
