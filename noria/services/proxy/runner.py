"""The HTTP server under the proxy: limits on the head of a request, and aiohttp's own errors in the OpenAI error shape.

aiohttp answers some requests itself: what is no HTTP, an unknown path, a wrong method. Its texts quote what came, and
its log does too. A line that is not quite a header may hold a key, so nothing of it is repeated here.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from itertools import chain
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong

from noria.config_services import ProxyConfig
from noria.contracts.access import without_keys
from noria.services.proxy.refusal import HeadersTooLarge, error_response, refusal_response

MAX_REQUEST_LINE = 8190
"""Bytes of method, URL and version; a longer line is answered with 414."""

MAX_HEADERS = 128

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_REASON = re.compile(r"[A-Z][A-Za-z' -]{3,60}")
_CODES = {
    HTTPStatus.NOT_FOUND: "unknown_path",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
}

_log = logging.getLogger("noria.services.proxy")


class ProxyRunner(web.AppRunner):
    """Runs the proxy's application; bodies reach its handlers compressed as they came.

    `drain_seconds` is how long running requests have to end after a cleanup has begun, `lingering_seconds` how long the
    rest of a body is still read that an answer did not wait for.
    """

    def __init__(
        self,
        app: web.Application,
        proxy: ProxyConfig,
        *,
        drain_seconds: float = 10.0,
        lingering_seconds: float = 10.0,
    ) -> None:
        super().__init__(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=drain_seconds,
            lingering_time=lingering_seconds,
            auto_decompress=False,
            max_line_size=MAX_REQUEST_LINE,
            max_field_size=proxy.max_header_bytes,
            max_headers=MAX_HEADERS,
        )
        self._max_header_bytes = proxy.max_header_bytes

    async def _make_server(self) -> web.Server:
        # aiohttp has no public place for another RequestHandler in an AppRunner; a test fails if this one goes away.
        server = await super()._make_server()
        server.__class__ = _Server
        server.request_handler = _bounded(server.request_handler, self._max_header_bytes)
        return server


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take in what arrived; a body that goes on as no HTTP ends at once, for whoever reads it.

        aiohttp 3.14's compiled parser queues such an error as the next request's, and leaves the reader waiting.
        """
        super().data_received(data)
        if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            current = () if self._current_request is None else (self._current_request.content,)
            for body in (*current, *(body for _, body in self._messages)):
                if not body.is_eof():
                    body.set_exception(web.RequestPayloadError("the body breaks off: what follows is not HTTP"))
                    body.feed_eof()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; an error that aiohttp raised itself is put into the OpenAI error shape first."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = _of_exception(request, resp)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that cannot be read, or whose handler failed; the connection is closed after it."""
        if isinstance(exc, (HttpProcessingError, web.RequestPayloadError)):
            _log.info("a request from %s is not HTTP: %s", request.remote, type(exc).__name__)
            response = _of_parser(exc, self.max_line_size)
        elif status == HTTPStatus.GATEWAY_TIMEOUT:
            response = error_response(status, "this took longer than the proxy waits; try again", "timeout")
        else:
            _log.error("a request from %s failed", request.remote, exc_info=exc)
            response = error_response(500, "the proxy failed at this request; its log has the reason", "internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer has gone out, so no error can follow it")
        response.force_close()
        return response


def _bounded(handler: _Handler, max_bytes: int) -> _Handler:
    async def bounded(request: web.BaseRequest) -> web.StreamResponse:
        size = sum(map(len, chain.from_iterable(request.raw_headers)))
        if size > max_bytes:
            return refusal_response(_headers_too_large(f"the headers have {size} bytes", max_bytes))[0]
        return await handler(request)

    return bounded


def _headers_too_large(seen: str, max_bytes: object) -> HeadersTooLarge:
    return HeadersTooLarge(f"{seen}, and proxy.max_header_bytes is {max_bytes}; send less, or raise it")


def _of_parser(error: HttpProcessingError | web.RequestPayloadError, max_line: int) -> web.Response:
    first = str(getattr(error, "message", "")).partition("\n")[0]
    if isinstance(error, LineTooLong):
        limit = error.args[1] if len(error.args) > 1 else "?"
        if str(limit) == str(max_line):
            message = f"the request line is longer than {max_line} bytes; say it in the body"
            return error_response(HTTPStatus.REQUEST_URI_TOO_LONG, message, "uri_too_long")
        return refusal_response(_headers_too_large("a header is too long", limit))[0]
    if first.startswith("Too many headers"):
        return refusal_response(HeadersTooLarge(f"there are more than {MAX_HEADERS} headers; send fewer"))[0]
    # Beside URLs, aiohttp's first line says what is wrong, and only further ones quote what came.
    reason = None if isinstance(error, InvalidURLError) else _REASON.match(first)
    why = "" if reason is None else f" ({reason[0].strip()})"
    return error_response(400, f"this is no valid HTTP/1.1 request{why}; mend the client", "invalid_http")


def _of_exception(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    path = without_keys(request.path[:200])
    message = error.text or error.reason
    if isinstance(error, web.HTTPNotFound):
        message = f"there is nothing at {path!r}; models answer below /v1/, and GET /openapi.json lists every path"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not allowed at {path!r}; it takes {allowed}"
    response = error_response(error.status, message, _CODES.get(HTTPStatus(error.status), "invalid_request"))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def only(router: web.UrlDispatcher, path: str, **handlers: Any) -> None:
    """Add handlers by method (`get=…`, which answers HEAD too, `post=…`) to a path of the proxy's own.

    Any other method there is a 405; otherwise it would go on to the path's next match, below /v1/ the upstream.
    """
    resource = router.add_resource(path)
    by_method = {name.upper(): handler for name, handler in handlers.items()}
    if "GET" in by_method:
        by_method["HEAD"] = by_method["GET"]
    for method, handler in by_method.items():
        resource.add_route(method, handler)

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise web.HTTPMethodNotAllowed(request.method, by_method)

    resource.add_route("*", refuse)
