"""Hand a call to its upstream and the answer to the caller, as it comes, and record what went by.

Not a byte of a body changes on the way, in either direction, but for routes that name another model and for upstreams
that are asked for token ids. The record is in the spool before the last byte of the answer leaves: for a stream that is
before the bytes at which its client stops reading.
"""

import asyncio
import contextlib
import functools
import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from noria.contracts.call import CallStatus
from noria.services.proxy.exchange import Ending, Exchange, Kind, Wants
from noria.services.proxy.headers import Headers, reason_of, request_headers, response_headers
from noria.services.proxy.masking import SecretMask, masked
from noria.services.proxy.metrics import Metrics
from noria.services.proxy.outgoing import outgoing
from noria.services.proxy.pending import Pending
from noria.services.proxy.refusal import error_response
from noria.services.proxy.retries import Answered, Connector, Sending, Unanswered, answered
from noria.services.proxy.routing import Route
from noria.services.proxy.spool import Spool
from noria.services.proxy.unavailable import unavailable
from noria.services.proxy.wire.decode import decode_body
from noria.services.proxy.wire.failure import error_event
from noria.services.proxy.wire.terminal import TerminalWatch
from noria.services.proxy.wire.tokens import EventStripper, strip_body, wants_of

TRACE_HEADER = "x-noria-trace-id"
UID_HEADER = "x-noria-call-uid"

_CONNECT_SECONDS = 10.0
_WHOLE_BYTES = 65_536
"""An answer of known length up to this is passed on in one piece."""

_LARGE_BYTES = 1 << 20
_ANY_SIZE = 1 << 28

_STATUS = {
    Ending.CLIENT_LEFT: CallStatus.CLIENT_DISCONNECT,
    Ending.UPSTREAM_DIED: CallStatus.UPSTREAM_ERROR,
    Ending.NO_ANSWER: CallStatus.UPSTREAM_ERROR,
    Ending.REFUSED: CallStatus.REFUSED,
}

_Response = TypeVar("_Response", bound=web.StreamResponse)


def open_session(timeout_seconds: float) -> aiohttp.ClientSession:
    """The one client session of a proxy: no limit on connections, `timeout_seconds` between two bytes of an answer."""
    return aiohttp.ClientSession(
        connector=Connector(limit=0),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=min(_CONNECT_SECONDS, timeout_seconds), sock_read=timeout_seconds
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=1 << 18,
        max_line_size=1 << 16,
        max_field_size=1 << 16,
    )


class Relay:
    """Between one caller and one upstream."""

    def __init__(
        self, session: aiohttp.ClientSession, spool: Spool, metrics: Metrics, is_own_key: Callable[[str], bool]
    ) -> None:
        self._session = session
        self._is_own_key = is_own_key
        self._spool = spool
        self._metrics = metrics

    async def record(
        self, pending: Pending, ending: Ending, error_type: str | None = None, response: bytes | None = None
    ) -> None:
        """Count a call that has ended and, if its trace is sampled, put it in the spool."""
        exchange = self._end(pending, ending, error_type, response)
        if exchange is not None:
            await self._spool.write(exchange)

    def _record_now(self, pending: Pending, ending: Ending, error_type: str) -> None:
        """As `record`, for a handler that is being cancelled and cannot wait for the disk any more."""
        exchange = self._end(pending, ending, error_type)
        if exchange is not None:
            self._spool.append(exchange)

    def _end(
        self, pending: Pending, ending: Ending, error_type: str | None, response: bytes | None = None
    ) -> Exchange | None:
        """Count a call; what is recorded of it, None if nothing is."""
        pending.ended = True
        failed = pending.http_status is not None and pending.http_status >= 300
        whole = CallStatus.UPSTREAM_ERROR if failed else CallStatus.OK
        self._metrics.call(_STATUS.get(ending, whole), pending.identity.node)
        if not pending.recorded:
            return None
        try:
            exchange = None if pending.lost else pending.exchange(ending, error_type, response)
        except OSError as error:  # what went to disk cannot be read again
            exchange, pending.lost = None, str(error)
        pending.close()
        if exchange is None:
            self._spool.lose(f"the capture of an answer failed: {pending.lost}")
        return exchange

    async def call(self, request: web.Request, pending: Pending, route: Route) -> web.StreamResponse:
        """Answer one model call."""
        before = time.perf_counter() - pending.started
        try:
            came = await self._ask(request.headers, pending, route)
            async with came.answer as answer:
                self._metrics.first_byte.observe(time.perf_counter() - pending.started)
                return await self._pass_on(request, pending, came.route, answer, before)
        except Unanswered as error:
            return await self._no_answer(pending, error)
        except (asyncio.CancelledError, ConnectionError) as error:
            self.left(request, pending)
            if isinstance(error, asyncio.CancelledError):
                raise
            return web.Response(status=499)  # nobody is there to read it
        finally:
            pending.close()

    def left(self, request: web.Request, pending: Pending) -> None:
        """Record that the handler of a call was cancelled, unless the call had ended."""
        if not pending.ended:
            why = "proxy_shutdown" if _is_open(request) else "client_left"
            self._record_now(pending, Ending.CLIENT_LEFT, why)

    async def fetch(self, headers: Headers, pending: Pending, route: Route) -> bytes | Unanswered:
        """Ask an upstream for a whole answer, which is neither passed on nor recorded yet.

        `pending` knows the head of the answer afterwards. An answer that breaks off counts as none.
        """
        try:
            came = await self._ask(headers, pending, route)
            async with came.answer as answer:
                try:
                    return masked(await answer.read(), came.route.upstream.secrets)
                except (aiohttp.ClientError, OSError) as error:
                    return Unanswered(came.route, came.attempts, error)
        except Unanswered as error:
            return error

    def unanswered(self, pending: Pending, error: Unanswered) -> tuple[web.Response, str]:
        """What the caller is told where no upstream answered, and what is recorded as the reason."""
        status, code, message = unavailable(error.route.upstream, error.error)
        return name_response(error_response(status, message, code), pending), code

    async def _no_answer(self, pending: Pending, error: Unanswered) -> web.Response:
        response, code = self.unanswered(pending, error)
        pending.http_status = None
        await self.record(pending, Ending.NO_ANSWER, code)
        return response

    async def _ask(self, headers: Headers, pending: Pending, route: Route) -> Answered[aiohttp.ClientResponse]:
        async def send(leg: Route, _sending: Sending) -> aiohttp.ClientResponse:
            wants = _wants(pending, leg)
            body, changed = outgoing(pending, leg, wants)
            return await self._session.post(
                _url(leg.upstream.url + pending.path),
                # aiohttp writes bytes of any size in one go, and warns of it; a file it sends piece by piece.
                data=body if len(body) < _LARGE_BYTES else io.BytesIO(body),
                headers=request_headers(
                    headers,
                    leg.upstream,
                    self._is_own_key,
                    body_changed=changed,
                    plain=wants is not None,
                    pass_key=leg.pass_key,
                ),
                allow_redirects=False,
            )

        try:
            came = await answered(route, send)
        except Unanswered as error:
            _took(pending, error.route)
            if error.attempts > 1:
                pending.attributes["attempts"] = error.attempts
            raise
        _took(pending, came.route)
        pending.attributes.update(came.attributes(route))
        answer = came.answer
        pending.answered(
            answer.status, answer.headers.get("Content-Type", ""), answer.headers.get("Content-Encoding", "")
        )
        return came

    async def _pass_on(
        self, request: web.Request, pending: Pending, route: Route, answer: aiohttp.ClientResponse, before: float
    ) -> web.StreamResponse:
        if answer.content_type == "text/event-stream":
            return await self._stream(request, pending, route, answer, before)
        repeats_key = answer.status >= 400 and route.upstream.secrets and pending.content_encoding
        if pending.wants is not None or repeats_key:
            return await self._whole(pending, route, answer, before, decode=True)
        length = answer.content_length
        if length is not None and length <= _WHOLE_BYTES and request.method != "HEAD":
            return await self._whole(pending, route, answer, before)
        return await self._stream(request, pending, route, answer, before)

    async def _whole(
        self, pending: Pending, route: Route, answer: aiohttp.ClientResponse, before: float, *, decode: bool = False
    ) -> web.Response:
        """A small answer, or one that has to be whole to be read: `decode` undoes a content coding first."""
        try:
            body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(route, 1, error) from error
        received = time.perf_counter()
        headers = response_headers(answer, route.upstream.secrets, resized=True)
        if decode and pending.content_encoding:
            with contextlib.suppress(ValueError):  # it passes as it came
                body = decode_body(body, pending.content_encoding, _ANY_SIZE)
                pending.content_encoding = ""
                headers.popall("Content-Encoding", None)
        if route.upstream.secrets:
            body = masked(body, route.upstream.secrets)
        await self.record(pending, Ending.WHOLE, None, body)
        if pending.wants is not None and not pending.content_encoding:
            body = strip_body(body, pending.wants)
        reason = reason_of(answer, route.upstream.secrets)
        response = web.Response(status=answer.status, reason=reason, body=body, headers=headers)
        self._metrics.added_latency.observe(before + time.perf_counter() - received)
        return name_response(response, pending)

    async def _stream(
        self, request: web.Request, pending: Pending, route: Route, answer: aiohttp.ClientResponse, before: float
    ) -> web.StreamResponse:
        events = answer.content_type == "text/event-stream"
        plain = events and not pending.content_encoding
        stripper = EventStripper(pending.wants) if pending.wants is not None and plain else None
        watch = TerminalWatch(pending.kind) if plain else None
        secrets = route.upstream.secrets
        mask = SecretMask(secrets) if secrets and not pending.content_encoding else None
        response = web.StreamResponse(
            status=answer.status,
            reason=reason_of(answer, secrets),
            headers=response_headers(answer, secrets, resized=stripper is not None),
        )
        name_response(response, pending)
        await response.prepare(request)
        content = answer.content
        first = True
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                await self._break_off(request, response, pending, route, error, watch, stripper)
                return response
            received = time.perf_counter()
            last = not chunk or content.at_eof()
            if mask is not None:
                chunk = mask.feed(chunk) + (mask.end() if last else b"")
            if chunk and not pending.ended:
                pending.capture(chunk)
            # Evaluated for every chunk, since the watch has to see them all.
            over = watch is not None and watch.feed(chunk)
            if (over or last) and not pending.ended:
                await self.record(pending, Ending.WHOLE)
            out = chunk if stripper is None else stripper.feed(chunk) + (stripper.end() if last else b"")
            if out:
                await response.write(out)
            if first:
                first = False
                self._metrics.added_latency.observe(before + time.perf_counter() - received)
            if last:
                return response

    async def _break_off(
        self,
        request: web.Request,
        response: web.StreamResponse,
        pending: Pending,
        route: Route,
        error: Exception,
        watch: TerminalWatch | None,
        stripper: EventStripper | None,
    ) -> None:
        """Say in the stream that the upstream died, and end it so that nobody takes it for whole."""
        _, code, message = unavailable(route.upstream, error)
        if not pending.ended:
            await self.record(pending, Ending.UPSTREAM_DIED, code)
            if watch is not None and response.content_length is None:
                # What the stripper still holds is half an event; without a stripper that half has gone out.
                ended = b"\n\n" if watch.mid_event and stripper is None else b""
                await response.write(ended + error_event(pending.kind, message, code))
        if request.transport is not None:
            request.transport.close()  # after what was written; the chunk that ends a whole answer is left out


@functools.lru_cache(maxsize=1024)
def _url(text: str) -> URL:
    return URL(text, encoded=True)


def name_response(response: _Response, pending: Pending) -> _Response:
    """Say in the response under which trace and uid it is recorded."""
    response.headers[TRACE_HEADER] = pending.identity.trace_id
    response.headers[UID_HEADER] = pending.uid
    return response


def _wants(pending: Pending, leg: Route) -> Wants | None:
    asks = pending.recorded and leg.tokens and pending.kind in (Kind.CHAT, Kind.COMPLETION)
    return wants_of(pending.body) if asks else None


def _took(pending: Pending, leg: Route) -> None:
    """What the record says about the upstream that was asked last."""
    pending.arm = leg.arm
    pending.policy_version = leg.policy_version(pending.model)
    pending.wants = _wants(pending, leg)
    changes: dict[str, Any] = dict(leg.overrides)
    if leg.model is not None:
        changes["model"] = leg.model
    if changes:
        pending.attributes["sent"] = changes
    else:
        pending.attributes.pop("sent", None)


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()
