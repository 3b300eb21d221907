"""Model calls: who calls and whose call it is, whether a rollout directs it, and what answers it."""

import asyncio
import fnmatch
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from noria.config import Config
from noria.contracts.access import Scope
from noria.contracts.call import Arm, CallStatus
from noria.contracts.errors import InvalidRecord, NoriaError
from noria.contracts.rollout import Directive
from noria.rollout.assemble import MISS
from noria.rollout.directive import read
from noria.services.proxy.access import Access, Caller
from noria.services.proxy.captured import CaptureMemory
from noria.services.proxy.exchange import Ending, Kind
from noria.services.proxy.identity import anonymous, check_model_node, identify, sampled
from noria.services.proxy.limits import Limits
from noria.services.proxy.metrics import Metrics
from noria.services.proxy.passing import Passing
from noria.services.proxy.pending import Pending
from noria.services.proxy.pinned import Asked, Miss, Pinned, Recorded, Target
from noria.services.proxy.ready import Readiness
from noria.services.proxy.refusal import REFUSALS, Forbidden, PinnedMiss, refusal_response
from noria.services.proxy.relay import Relay, name_response
from noria.services.proxy.request_body import read_bytes, too_large
from noria.services.proxy.retries import Unanswered
from noria.services.proxy.routing import Route, Router
from noria.services.proxy.upstreams import Upstream
from noria.services.proxy.wire.decode import DecodedTooLarge, decode_body
from noria.services.proxy.wire.json_text import parse
from noria.services.proxy.wire.replay import Replay, replay
from noria.services.proxy.wire.to_call import to_call


class Calls:
    """Answers requests below /v1/: those of the known kinds are recorded, all others pass through."""

    def __init__(
        self,
        config: Config,
        access: Access,
        limits: Limits,
        readiness: Readiness,
        router: Router,
        pinned: Pinned,
        relay: Relay,
        passing: Passing,
        metrics: Metrics,
        memory: CaptureMemory,
    ) -> None:
        self._proxy = config.proxy
        self._key = config.trainer_key()
        self._access = access
        self._limits = limits
        self._readiness = readiness
        self._router = router
        self._pinned = pinned
        self._relay = relay
        self._passing = passing
        self._metrics = metrics
        self._memory = memory

    async def handle(self, request: web.Request, kind: Kind, path: str) -> web.StreamResponse:
        """Answer one model call; what the proxy refuses to a known caller is recorded as refused."""
        try:
            caller = self._admit(request)
        except REFUSALS as error:
            return self._turn_away(error)
        try:
            identity = identify(request.headers, request.match_info, self._proxy, caller.tenant)
        except REFUSALS as error:
            nobody = Pending(anonymous(self._proxy, caller.tenant), kind, path, self._memory)
            return await self._refuse(nobody, error)
        pending = Pending(identity, kind, path, self._memory)
        pending.recorded = sampled(identity.trace_id, self._proxy.sampling_rate)
        try:
            with self._limits.admit(caller):
                check_model_node(identity)
                await self._read(request, pending)
                if identity.meta is not None:
                    return await self._directed(request, pending, identity.meta)
                route = self._router.route(identity, pending.model, kind)
                return await self._relay.call(request, pending, route)
        except REFUSALS as error:
            return await self._refuse(pending, error)

    async def pass_through(self, request: web.Request, path: str) -> web.StreamResponse:
        """Answer a request that no record is kept of."""
        try:
            caller = self._admit(request)
            identity = identify(request.headers, request.match_info, self._proxy, caller.tenant)
            with self._limits.admit(caller):
                upstream = self._router.route(identity, "", None).upstream
                self._check_shared(caller, upstream, path)
                return await self._passing.handle(request, upstream, path)
        except REFUSALS as error:
            return self._turn_away(error)

    def _admit(self, request: web.Request) -> Caller:
        self._readiness.require()
        caller = self._access.caller(request.headers)
        self._access.require(caller, Scope.CALL)
        return caller

    def _check_shared(self, caller: Caller, upstream: Upstream, path: str) -> None:
        """Raise `Forbidden` where a tenant would meet at the upstream what another one has put there.

        Files, batches and stored answers belong to whoever's key the upstream knows: the operator's.
        """
        if caller.tenant in (None, self._proxy.tenant) or not upstream.credentials:
            return
        plain = path.partition("?")[0]
        if not any(fnmatch.fnmatchcase(plain, pattern) for pattern in upstream.shared_paths):
            raise Forbidden(
                f"what upstream {upstream.name!r} keeps at {plain[:200]!r} is under the operator's key, the same for "
                f"all tenants; an operator can open it with proxy.upstreams.{upstream.name}.shared_paths"
            )

    def _turn_away(self, error: NoriaError) -> web.Response:
        response, code = refusal_response(error)
        self._metrics.refused(code)
        return response

    async def _refuse(self, pending: Pending, error: NoriaError) -> web.Response:
        response, code = refusal_response(error)
        self._metrics.refused(code)
        pending.http_status = response.status
        pending.content_type = "application/json"
        body = response.body
        await self._relay.record(pending, Ending.REFUSED, code, body if isinstance(body, bytes) else b"")
        return name_response(response, pending)

    async def _read(self, request: web.Request, pending: Pending) -> None:
        """The request's body: its bytes as they came, and the JSON object in them."""
        limit = self._proxy.max_body_bytes
        raw = await read_bytes(request, limit)
        pending.raw = raw
        pending.request_encoding = request.headers.get("Content-Encoding", "")
        try:
            plain = decode_body(raw, pending.request_encoding, limit) if pending.request_encoding else raw
            pending.body = _object(plain)
        except DecodedTooLarge as error:
            raise too_large(limit) from error
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(f"the request body is not a JSON object: {error}") from error

    async def _directed(self, request: web.Request, pending: Pending, meta: str) -> web.StreamResponse:
        """A call of a rollout: the target's own goes to the policy, every other is answered from the recording."""
        directive = read(meta, self._key)
        pending.identity = pending.identity.in_rollout(directive, request.headers.get("traceparent"))
        pending.arm = Arm.ROLLOUT
        pending.recorded = True
        pending.attributes["rollout"] = rollout_attributes(directive)
        try:
            plan = await self._pinned.plan(pending.identity, directive, pending.kind, pending.body)
            if isinstance(plan, Target):
                return await self._relay.call(request, pending, plan.route)
            if isinstance(plan, Miss):
                return await self._missed(request, pending, plan)
            return await self._replay(request, pending, plan)
        except PinnedMiss:
            pending.attributes["pinned"] = MISS
            self._metrics.pinned(MISS)
            raise
        except asyncio.CancelledError:
            self._relay.left(request, pending)
            raise

    async def _missed(self, request: web.Request, pending: Pending, miss: Miss) -> web.StreamResponse:
        """A pinned call without a recording: asked live, once for the whole group."""

        async def ask() -> Asked[bytes | Unanswered]:
            return await self._ask_live(request, pending, miss.route)

        settled = await self._pinned.settle(miss, ask)
        if isinstance(settled, Recorded):
            return await self._replay(request, pending, settled)
        pending.attributes.update(miss.attributes)
        self._metrics.pinned(MISS)
        came = settled.response
        if isinstance(came, Unanswered):
            response, code = self._relay.unanswered(pending, came)
            await self._relay.record(pending, Ending.NO_ANSWER, code)
            return response
        await self._relay.record(pending, Ending.WHOLE, None, came)
        if not settled.ok:
            headers = {"Content-Type": pending.content_type or "application/json"}
            if pending.content_encoding:
                headers["Content-Encoding"] = pending.content_encoding
            return name_response(web.Response(status=pending.http_status or 502, body=came, headers=headers), pending)
        return await self._answer(request, pending, replay(pending.kind, settled.output, pending.body))

    async def _ask_live(self, request: web.Request, pending: Pending, route: Route) -> Asked[bytes | Unanswered]:
        came = await self._relay.fetch(request.headers, pending, route)
        if pending.http_status == 400 and isinstance(came, bytes) and route.overrides and b"temperature" in came:
            # Reasoning models take no temperature. The group is told one answer all the same.
            came = await self._relay.fetch(request.headers, pending, replace(route, overrides={}))
        if isinstance(came, Unanswered):
            return Asked(False, "null", None, pending.uid, came)
        call = to_call(pending.exchange(Ending.WHOLE, None, came))
        return Asked(call.status is CallStatus.OK, call.output, call.policy_version, pending.uid, came)

    async def _replay(self, request: web.Request, pending: Pending, recorded: Recorded) -> web.StreamResponse:
        """Answer from a recording, and record that."""
        pending.attributes.update(recorded.attributes)
        pending.policy_version = recorded.policy_version
        self._metrics.pinned(recorded.how)
        answer = replay(pending.kind, recorded.output, pending.body)
        pending.answered(200, "application/json", "")
        await self._relay.record(pending, Ending.WHOLE, None, answer.output.encode())
        return await self._answer(request, pending, answer)

    async def _answer(self, request: web.Request, pending: Pending, answer: Replay) -> web.StreamResponse:
        """A recorded output in the shape that the caller asks for."""
        headers = {"Content-Type": answer.content_type}
        if answer.events is None:
            return name_response(web.Response(body=answer.body, headers=headers), pending)
        response = name_response(web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"}), pending)
        await response.prepare(request)
        for event in answer.events:
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


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except ValueError:
        value = parse(raw)  # takes what JSON allows and orjson does not, such as half a surrogate pair
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}")
    return value
