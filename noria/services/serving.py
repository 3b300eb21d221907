"""How every service starts and ends: one readiness line, a clean SIGTERM, and one clear line when it cannot start."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

from aiohttp import web

from noria.config import Config, load
from noria.contracts.errors import ConfigError, NoriaError

EXIT_CANNOT_START = 2
"""Exit code for what the user must mend: a key, a port in use, a missing model."""

DRAIN_SECONDS = 10.0
"""How long running requests have to end after SIGTERM."""

_BACKLOG = 1024
_log = logging.getLogger("noria.services")


def run(
    name: str,
    build: Callable[[Config], Awaitable[web.Application]],
    address: Callable[[Config], tuple[str, int]],
    *,
    runner: Callable[[web.Application, Config], web.AppRunner] | None = None,
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> NoReturn:
    """Serve one aiohttp application until SIGTERM or SIGINT, then exit with code 0.

    `build` makes the application from the configuration and `address` says where it listens. The port is taken before
    `build` runs, so that a port in use is told before a model is loaded; connections are accepted only once the
    application is ready. Any `NoriaError` of loading or building, and any error of binding, ends the process with one
    line on stderr and exit code 2. `runner` makes another than the plain `AppRunner`. On SIGTERM no new connection is
    taken and running requests have `DRAIN_SECONDS` to end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # its plugins announce themselves one by one
    try:
        config = load()
        with asyncio.Runner(loop_factory=new_event_loop) as loop:
            loop.run(_serve(name, config, build, address(config), runner or _plain_runner))
    except NoriaError as error:
        sys.stderr.write(f"noria {name}: {error}\n")
        sys.exit(EXIT_CANNOT_START)
    except KeyboardInterrupt:
        pass
    sys.exit(0)


async def _serve(
    name: str,
    config: Config,
    build: Callable[[Config], Awaitable[web.Application]],
    address: tuple[str, int],
    make_runner: Callable[[web.Application, Config], web.AppRunner],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = _bind(name, *address)
    with contextlib.closing(listener):
        app = await _unless(stop, build(config))
        if app is None:
            return
        runner = make_runner(app, config)
        try:
            await runner.setup()
            try:
                await web.SockSite(runner, listener, backlog=_BACKLOG).start()
            except OSError as error:  # another process bound the port as well and was first to listen on it
                raise _cannot_listen(name, *address, error) from error
            _log.info("%s ready on http://%s:%d", name, *address)
            await stop.wait()
            _log.info("%s is ending", name)
        finally:
            await runner.cleanup()


def _plain_runner(app: web.Application, _config: Config) -> web.AppRunner:
    return web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_SECONDS)


def cancelling_runner(app: web.Application, _config: Config) -> web.AppRunner:
    """Cancels a handler whose client has left."""
    return web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_SECONDS, handler_cancellation=True)


async def _unless(stop: asyncio.Event, building: Awaitable[web.Application]) -> web.Application | None:
    """The application, or None if `stop` is set before it is built."""
    build = asyncio.ensure_future(building)
    waiting = asyncio.ensure_future(stop.wait())
    await asyncio.wait((build, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if build.done():
        return build.result()
    build.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await build
    return None


def _bind(name: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _cannot_listen(name, host, port, error) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        listener.close()
        raise _cannot_listen(name, host, port, error) from error
    return listener


def _cannot_listen(name: str, host: str, port: int, error: OSError) -> ConfigError:
    section = name.replace(" ", "_").removesuffix("_server")
    in_use = error.errno == errno.EADDRINUSE
    why = "another process has this port" if in_use else error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {host}:{port}: {why}; stop that process or set another host or port ([{section}])"
    )
