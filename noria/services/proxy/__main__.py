"""`python -m noria.services.proxy`."""

from aiohttp import web

from noria.config import Config
from noria.services.proxy.app import create_app
from noria.services.serving import run
from noria.stores.online import OnlineStore


async def _build(config: Config) -> web.Application:
    return create_app(config, OnlineStore(config.store_url))


def _address(config: Config) -> tuple[str, int]:
    return config.proxy.host, config.proxy.port


if __name__ == "__main__":
    run("proxy", _build, _address, cancel_on_disconnect=True)
