"""`POST /v1/traces`: an agent that already emits GenAI spans is a source of calls, without the proxy in between.

OTLP over HTTP (https://opentelemetry.io/docs/specs/otlp/#otlphttp), protobuf or JSON, as every OpenTelemetry SDK and
the collector send it. Spans that are model calls become calls; all others are taken and left. Sending spans again
changes nothing: the uid of a call is made of tenant, trace id and span id.
"""

import asyncio
import logging

from aiohttp import web
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from noria.config_services import ProxyConfig
from noria.contracts.access import Scope
from noria.contracts.call import Call
from noria.contracts.errors import NoriaError
from noria.services.proxy.access import Access, Caller
from noria.services.proxy.identity import identify, sampled
from noria.services.proxy.limits import Limits
from noria.services.proxy.otlp_calls import Received, received
from noria.services.proxy.otlp_request import JSON, PROTOBUF, media_type
from noria.services.proxy.otlp_sender import Sender
from noria.services.proxy.refusal import REFUSALS, StoreUnavailable, refusal_response
from noria.services.proxy.request_body import read_bytes
from noria.services.proxy.spool import Spool

_SHOWN_REASONS = 3
_CODES = {400: 3, 401: 16, 403: 7, 413: 3, 429: 8, 503: 14}
"""`google.rpc.Code` for an HTTP status; everything else is UNKNOWN (2)."""

_log = logging.getLogger("noria.services.proxy")


def calls_of(
    body: bytes, content_type: str, content_encoding: str, *, tenant: str, app: str, limit: int = 32_000_000
) -> list[Call]:
    """The calls in one request body, for a tenant; `app` is that of spans whose service has no name.

    Raises `InvalidRecord` for a body that is no request of OTLP.
    """
    return list(received(body, content_type, content_encoding, Sender(tenant, app), limit).calls)


class OtlpIntake:
    """Takes spans in. Its errors are those of OTLP: a `google.rpc.Status` in the encoding of the request."""

    def __init__(self, proxy: ProxyConfig, access: Access, limits: Limits, spool: Spool) -> None:
        self._proxy = proxy
        self._access = access
        self._limits = limits
        self._spool = spool
        self._one_at_a_time = asyncio.Lock()
        self.received = 0
        """Calls that came as spans and are in the spool."""
        self.rejected = 0
        """Spans that are model calls and could not be kept."""

    async def traces(self, request: web.Request) -> web.Response:
        """Keep the model calls of one request, if their traces are sampled. Needs scope `call`."""
        encoding = JSON if request.content_type == JSON else PROTOBUF
        try:
            caller = self._access.caller(request.headers)
            self._access.require(caller, Scope.CALL)
            with self._limits.admit(caller):
                media_type(request.content_type)  # nobody reads a large body to refuse it
                found = await self._read(request, self._sender(request, caller))
                await self._keep([call for call in found.calls if self._is_sampled(call)])
        except REFUSALS as error:
            return _refusal(error, encoding)
        self.rejected += len(found.rejected)
        if found.rejected:
            _log.warning("%d spans were rejected: %s", len(found.rejected), found.rejected[0])
        return _response(_report(found), encoding, 200)

    def _sender(self, request: web.Request, caller: Caller) -> Sender:
        identity = identify(request.headers, request.match_info, self._proxy, caller.tenant)
        said = {name: f"x-noria-{name}" in request.headers or name in request.match_info for name in ("app", "node")}
        return Sender(
            tenant=identity.tenant,
            default_app=self._proxy.app,
            app=identity.app if said["app"] else None,
            node=identity.node if said["node"] else None,
            any_tenant=caller.tenant is None,
        )

    async def _read(self, request: web.Request, sender: Sender) -> Received:
        limit = self._proxy.max_body_bytes
        body = await read_bytes(request, limit)
        coding = request.headers.get("Content-Encoding", "")
        async with self._one_at_a_time:  # reading spans is work for the processor, and calls come first
            return await asyncio.to_thread(received, body, request.content_type, coding, sender, limit)

    def _is_sampled(self, call: Call) -> bool:
        return sampled(call.trace_id, self._proxy.sampling_rate)

    async def _keep(self, calls: list[Call]) -> None:
        """All of them in the spool, synced once; what an exporter sends again after a 503 is not kept twice."""
        for place, call in enumerate(calls):
            kept = await self._spool.write(call) if place == len(calls) - 1 else self._spool.append(call)
            if not kept:
                raise StoreUnavailable("the spool does not take records (noria_unrecorded_total); see the proxy's log")
            self.received += 1
            await asyncio.sleep(0)  # between two records, other calls go on


def _report(found: Received) -> ExportTraceServiceResponse:
    """What OTLP reports: `partial_success` is set only where there is something to say."""
    response = ExportTraceServiceResponse()
    reasons = [*found.rejected, *found.warnings]
    if reasons:
        shown = "; ".join(reasons[:_SHOWN_REASONS])
        more = len(reasons) - _SHOWN_REASONS
        response.partial_success.rejected_spans = len(found.rejected)
        response.partial_success.error_message = f"{shown}; and {more} more" if more > 0 else shown
    return response


def _refusal(error: NoriaError, encoding: str) -> web.Response:
    refused, _ = refusal_response(error)
    response = _response(Status(code=_CODES.get(refused.status, 2), message=str(error)), encoding, refused.status)
    for name in ("Retry-After", "WWW-Authenticate"):
        if name in refused.headers:
            response.headers[name] = refused.headers[name]
    return response


def _response(message: Message, encoding: str, status: int) -> web.Response:
    body = MessageToJson(message, indent=None).encode() if encoding == JSON else message.SerializeToString()
    return web.Response(status=status, body=body, content_type=encoding)
