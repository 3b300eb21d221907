"""Hand a call to its upstream and the answer to the caller, as it comes, and record what went by.

The record is in the spool before the last byte of the answer leaves: for a stream that is before `[DONE]`.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from noria.contracts.call import Call, CallStatus
from noria.services.proxy.capture import Exchange, StreamCapture, Wants, gather_tokens, strip, to_text
from noria.services.proxy.identity import foreign_baggage
from noria.services.proxy.metrics import Metrics
from noria.services.proxy.refusal import error_response
from noria.services.proxy.routing import Route, Upstream
from noria.services.proxy.spool import Spool

TRACE_HEADER = "x-noria-trace-id"
UID_HEADER = "x-noria-call-uid"

# RFC 9110, section 7.6.1, and what aiohttp says itself.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_SENT_ON = _HOP_BY_HOP | {"host", "accept-encoding", "expect"}
_CONNECT_SECONDS = 10.0


_Response = TypeVar("_Response", bound=web.StreamResponse)


class UpstreamUnavailable(Exception):
    """The upstream gave no answer. `status` is what the caller gets, `code` what is recorded."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def open_session(timeout_seconds: float) -> aiohttp.ClientSession:
    """The one client session of a proxy: no limit on connections, `timeout_seconds` between two bytes of an answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=min(_CONNECT_SECONDS, timeout_seconds), sock_read=timeout_seconds
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Relay:
    """Between one caller and one upstream."""

    def __init__(self, session: aiohttp.ClientSession, spool: Spool, metrics: Metrics) -> None:
        self._session = session
        self._spool = spool
        self._metrics = metrics

    async def record(self, exchange: Exchange, call: Call) -> None:
        """Count a call that has ended and, if its trace is sampled, put it in the spool."""
        exchange.ended = True
        self._metrics.call(call.status, call.process_node)
        if exchange.recorded:
            await self._spool.write(call)

    async def get(self, request: web.Request, upstream: Upstream, path: str) -> web.Response:
        """Pass a GET on and its answer back."""
        headers = _request_headers(request.headers, upstream)
        try:
            async with self._session.get(upstream.url + path, headers=headers, allow_redirects=False) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            why = _unavailable(upstream, error)
            return error_response(why.status, str(why), why.code)
        return web.Response(status=answer.status, body=body, headers=_response_headers(answer.headers))

    async def call(self, request: web.Request, exchange: Exchange, route: Route) -> web.StreamResponse:
        """Answer one model call."""
        exchange.policy_version = route.policy_version(exchange.model)
        asked = exchange.recorded and route.tokens
        body = _outgoing(exchange, route, asked)
        wants = Wants.of(exchange.body) if asked else None
        before = time.perf_counter() - exchange.started
        try:
            async with await self._send(request, route.upstream, body) as answer:
                self._metrics.first_byte.observe(time.perf_counter() - exchange.started)
                if answer.content_type == "text/event-stream":
                    return await self._stream(request, exchange, answer, wants, before)
                return await self._whole(exchange, route.upstream, answer, wants, before)
        except UpstreamUnavailable as error:
            await self.record(exchange, exchange.so_far(CallStatus.UPSTREAM_ERROR, error.code))
            return name_response(error_response(error.status, str(error), error.code), exchange)
        except (asyncio.CancelledError, ConnectionError) as error:
            if not exchange.ended:
                # Not `record`: a handler that is being cancelled cannot wait for the disk any more.
                why = "proxy_shutdown" if _is_open(request) else "client_left"
                call = exchange.so_far(CallStatus.CLIENT_DISCONNECT, why)
                self._metrics.call(call.status, call.process_node)
                if exchange.recorded:
                    self._spool.append(call)
            if isinstance(error, asyncio.CancelledError):
                raise
            return web.Response(status=499)  # nobody is there to read it

    async def _send(self, request: web.Request, upstream: Upstream, body: bytes) -> aiohttp.ClientResponse:
        headers = _request_headers(request.headers, upstream)
        url = f"{upstream.url}/v1/chat/completions"
        try:
            try:
                return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError):
                # The upstream may have closed a kept connection just as it was taken up again.
                return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise _unavailable(upstream, error) from error

    async def _whole(
        self, exchange: Exchange, upstream: Upstream, answer: aiohttp.ClientResponse, wants: Wants | None, before: float
    ) -> web.Response:
        try:
            body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _unavailable(upstream, error) from error
        received = time.perf_counter()
        text, completion = _parse(body)
        error_type = _error_type(answer.status, completion)
        if error_type is None:
            tokens = None
            if wants is not None:
                tokens = gather_tokens(completion)
                if strip(completion, wants):
                    text = to_text(completion)
                    body = text.encode()
            call = exchange.call(CallStatus.OK, text, completion=completion, tokens=tokens)
        else:
            call = exchange.call(CallStatus.UPSTREAM_ERROR, text, error_type=error_type)
        await self.record(exchange, call)
        headers = _response_headers(answer.headers)
        response = web.Response(status=answer.status, reason=answer.reason, body=body, headers=headers)
        self._metrics.added_latency.observe(before + time.perf_counter() - received)
        return name_response(response, exchange)

    async def _stream(
        self,
        request: web.Request,
        exchange: Exchange,
        answer: aiohttp.ClientResponse,
        wants: Wants | None,
        before: float,
    ) -> web.StreamResponse:
        headers = _response_headers(answer.headers)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        name_response(response, exchange)
        capture = exchange.capture = StreamCapture(wants)
        first = True
        await response.prepare(request)
        while True:
            try:
                chunk = await answer.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                cause = "upstream_timeout" if isinstance(error, TimeoutError) else "connection_lost"
                if not exchange.ended:
                    await self.record(exchange, exchange.so_far(CallStatus.UPSTREAM_ERROR, cause))
                if request.transport is not None:
                    request.transport.close()  # without a last chunk the caller sees that the answer is not whole
                return response
            received = time.perf_counter()
            out = capture.feed(chunk) if chunk else capture.end()
            if not exchange.ended and (capture.done or not chunk):
                why = _error_type(answer.status, None) if answer.status >= 300 else capture.error_type
                status = CallStatus.OK if why is None else CallStatus.UPSTREAM_ERROR
                await self.record(exchange, exchange.so_far(status, why))
            if out:
                await response.write(out)
            if first:
                first = False
                self._metrics.added_latency.observe(before + time.perf_counter() - received)
            if not chunk:
                return response


def name_response(response: _Response, exchange: Exchange) -> _Response:
    """Say in the response under which trace and uid it is recorded."""
    response.headers[TRACE_HEADER] = exchange.identity.trace_id
    response.headers[UID_HEADER] = exchange.uid
    return response


def _outgoing(exchange: Exchange, route: Route, ask_tokens: bool) -> bytes:
    """The request body for the upstream: the caller's bytes, unless the route changes something."""
    changes: dict[str, Any] = dict(route.overrides)
    if route.model is not None:
        changes["model"] = route.model
    if changes:
        exchange.attributes["sent"] = dict(changes)
    if ask_tokens:
        changes |= {"return_token_ids": True, "logprobs": True}
    if not changes:
        return exchange.raw.encode()
    kept = {key: value for key, value in exchange.body.items() if key not in route.drop}
    return json.dumps({**kept, **changes}, separators=(",", ":")).encode()


def _request_headers(headers: Mapping[str, str], upstream: Upstream) -> CIMultiDict[str]:
    sent: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower in _NOT_SENT_ON or lower.startswith("x-noria-"):
            continue
        if lower == "baggage":
            value = foreign_baggage(value)
            if not value:
                continue
        sent.add(name, value)
    if upstream.key is not None:
        sent["Authorization"] = f"Bearer {upstream.key}"
    sent["Accept-Encoding"] = "identity"  # a compressed stream would hold events back
    return sent


def _response_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _parse(body: bytes) -> tuple[str, dict[str, Any]]:
    """The answer as JSON text, and parsed; what is no JSON object becomes a JSON string, and empty."""
    text = body.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return to_text(text), {}
    return text, value if isinstance(value, dict) else {}


def _error_type(status: int, completion: Mapping[str, Any] | None) -> str | None:
    """Why an answer is not one to learn from, None if it is."""
    if status < 300:
        choices = (completion or {}).get("choices")
        whole = isinstance(choices, list) and bool(choices) and all(isinstance(choice, dict) for choice in choices)
        return None if whole else "no_choices"
    error = (completion or {}).get("error")
    said = (error.get("type") or error.get("code")) if isinstance(error, dict) else None
    return str(said or f"http_{status}")


def _unavailable(upstream: Upstream, error: Exception) -> UpstreamUnavailable:
    where = f"upstream {upstream.name!r} ({upstream.url})"
    why = str(error) or type(error).__name__
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        mend = f"start it, or mend [proxy.upstreams.{upstream.name}] url"
        return UpstreamUnavailable(502, "upstream_unreachable", f"{where} cannot be reached: {why}; {mend}")
    if isinstance(error, TimeoutError):
        mend = "proxy.timeout_seconds may be too short"
        return UpstreamUnavailable(504, "upstream_timeout", f"{where} did not answer in time: {why}; {mend}")
    return UpstreamUnavailable(502, "connection_lost", f"{where} broke off before its answer was whole: {why}")
