"""The peer that does nothing: `python -m bench.bare_aiohttp --port 9001 --upstream http://127.0.0.1:9000`.

An aiohttp server in front of an aiohttp client session on uvloop, the libraries and the event loop that Noria's proxy
runs on. It passes a request's body on and streams the answer back, and neither reads, routes, checks nor records
anything: what it reaches is what this pair of libraries can reach here.
"""

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web

_SKIPPED = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"}
_SESSION = web.AppKey("session", aiohttp.ClientSession)
_UPSTREAM = web.AppKey("upstream", str)


async def relay(request: web.Request) -> web.StreamResponse:
    """Pass one call on, and its answer back as it comes."""
    body = await request.read()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _SKIPPED}
    url = request.app[_UPSTREAM] + request.path_qs
    async with request.app[_SESSION].request(request.method, url, data=body, headers=headers) as answer:
        passed = {name: value for name, value in answer.headers.items() if name.lower() not in _SKIPPED}
        response = web.StreamResponse(status=answer.status, headers=passed)
        response.content_length = answer.content_length
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def _healthz(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def serve(port: int, upstream: str) -> None:
    """Listen on loopback until the process is ended."""
    app = web.Application(client_max_size=64_000_000)
    app[_UPSTREAM] = upstream
    app.router.add_get("/healthz", _healthz)
    app.router.add_post("/{path:.*}", relay)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        app[_SESSION] = session
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        await asyncio.Event().wait()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="base URL, without /v1")
    given = parser.parse_args()
    uvloop.run(serve(given.port, given.upstream))


if __name__ == "__main__":
    main()
