"""`POST /v1/chat/completions`: whose call it is, whether a rollout directs it, and what answers it."""

import json
from typing import Any

from aiohttp import web

from noria.config import ProxyConfig
from noria.contracts.call import Arm, CallStatus
from noria.contracts.errors import InvalidRecord, NoriaError
from noria.contracts.rollout import Directive
from noria.rollout.directive import read, target_of
from noria.services.proxy.capture import Exchange, to_text
from noria.services.proxy.identity import anonymous, check_model_node, identify, sampled
from noria.services.proxy.metrics import Metrics
from noria.services.proxy.recording import Recorded, Recordings, input_key, replay
from noria.services.proxy.refusal import REFUSALS, PinnedMiss, TooLarge, refusal_response
from noria.services.proxy.relay import Relay, name_response
from noria.services.proxy.routing import Router


class Chat:
    """Answers model calls."""

    def __init__(
        self, proxy: ProxyConfig, key: str, router: Router, recordings: Recordings, relay: Relay, metrics: Metrics
    ) -> None:
        self._proxy = proxy
        self._key = key
        self._router = router
        self._recordings = recordings
        self._relay = relay
        self._metrics = metrics

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one call; whatever the proxy refuses is recorded as refused."""
        try:
            identity = identify(request.headers, request.match_info, self._proxy)
        except InvalidRecord as error:
            return await self._refuse(Exchange(anonymous(self._proxy)), error)
        exchange = Exchange(identity, recorded=sampled(identity.trace_id, self._proxy.sampling_rate))
        try:
            check_model_node(identity)
            await self._read(request, exchange)
            if identity.meta is not None:
                return await self._directed(request, exchange, identity.meta)
            return await self._relay.call(request, exchange, self._router.route(identity))
        except REFUSALS as error:
            return await self._refuse(exchange, error)

    async def _refuse(self, exchange: Exchange, error: NoriaError) -> web.Response:
        response, code = refusal_response(error)
        answer = json.loads(response.text or "null")
        await self._relay.record(exchange, exchange.call(CallStatus.REFUSED, to_text(answer), error_type=code))
        return name_response(response, exchange)

    async def _read(self, request: web.Request, exchange: Exchange) -> None:
        limit = self._proxy.max_body_bytes
        try:
            if (request.content_length or 0) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise TooLarge(f"the request body is over {limit} bytes; proxy.max_body_bytes sets the limit") from error
        try:
            exchange.raw = raw.decode()
            exchange.body = _object(json.loads(exchange.raw))
        except (ValueError, RecursionError) as error:
            exchange.raw = to_text(raw.decode(errors="replace"))
            raise InvalidRecord(f"the request body is not a JSON object: {error}") from error

    async def _directed(self, request: web.Request, exchange: Exchange, meta: str) -> web.StreamResponse:
        """A call of a rollout: the target's own goes to the policy, every other is answered from the recording."""
        directive = read(meta, self._key)
        target = target_of(directive)
        identity = exchange.identity = exchange.identity.in_rollout(directive, request.headers.get("traceparent"))
        exchange.arm = Arm.ROLLOUT
        exchange.recorded = True
        exchange.attributes["rollout"] = rollout_attributes(directive)
        origin = await self._recordings.origin(directive.invariant)
        nth = self._recordings.count(directive.trace_id, identity.node)
        if identity.node == target.node:
            return await self._relay.call(request, exchange, self._router.directed(directive, nth))
        key = input_key(exchange.body)
        nth_same = self._recordings.count(directive.trace_id, f"{identity.node} {key}")
        kind, recorded = origin.find(identity.node, key, nth_same, nth)
        exchange.attributes["pinned"] = kind
        self._metrics.pinned(kind)
        if recorded is not None:
            return await self._replay(request, exchange, recorded)
        if self._proxy.miss_policy == "fail":
            raise PinnedMiss(
                f"node {identity.node!r} made its call {nth} with an input that origin trace {directive.invariant} "
                "has no recording for; proxy.miss_policy = 'live' would ask the default upstream"
            )
        return await self._relay.call(request, exchange, self._router.unrecorded())

    async def _replay(self, request: web.Request, exchange: Exchange, recorded: Recorded) -> web.StreamResponse:
        text, completion, events = replay(recorded, exchange.body)
        exchange.policy_version = recorded.policy_version
        exchange.attributes["recorded_uid"] = recorded.uid
        await self._relay.record(exchange, exchange.call(CallStatus.OK, text, completion=completion))
        if events is None:
            return name_response(web.Response(text=text, content_type="application/json"), exchange)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = name_response(web.StreamResponse(headers=headers), exchange)
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response


def rollout_attributes(directive: Directive) -> dict[str, Any]:
    """Where a rollout's call belongs, as `Call.attributes["rollout"]` has it."""
    return {
        "round": directive.round,
        "sample_id": directive.sample_id,
        "group": directive.group,
        "member": directive.member,
        "origin_trace": directive.invariant,
    }


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}")
    return value
