"""What agents and business systems report beside model calls, and where a rollout's records are read.

Tenants do not cross here. A key reads the calls of its own tenant, and what it reports is of its own tenant. A score
has no tenant of its own: it belongs to whom its trace or call belongs to. So a key's feedback is kept only where the
store has seen the target and all of it is the key's tenant's; whoever speaks for any tenant may also be early.
"""

import asyncio
import dataclasses
import hashlib
import json
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from noria.config import Config
from noria.contracts.access import Scope, without_keys
from noria.contracts.call import END2END, Arm, Call, Score
from noria.contracts.call_json import call_to_json
from noria.contracts.errors import ConfigError, InvalidRecord, NotFound
from noria.rollout.directive import read
from noria.services.proxy.access import Access, Caller
from noria.services.proxy.calls import rollout_attributes
from noria.services.proxy.identity import Identity, attributes_of, hash_subject, identify, is_trace_id, sampled
from noria.services.proxy.recording import FLUSH_SECONDS
from noria.services.proxy.refusal import REFUSALS, Forbidden, StoreUnavailable, refusal_response
from noria.services.proxy.relay import TRACE_HEADER, UID_HEADER
from noria.services.proxy.reports import Episode, Feedback
from noria.services.proxy.request_body import read_body
from noria.services.proxy.spool import Spool
from noria.stores.online import OnlineStore
from noria.stores.tenants import tenants_of_call, tenants_of_trace

IDEMPOTENCY_HEADER = "Idempotency-Key"
"""draft-ietf-httpapi-idempotency-key-header"""

_EPISODES = uuid.UUID("5ad1f7f2-6f0e-4b8f-9a55-0d1c7a6f3e21")
_MAX_IDEMPOTENCY_KEY = 255


class Intake:
    """Takes feedback and episodes in, and gives recorded traces out."""

    def __init__(self, config: Config, store: OnlineStore, spool: Spool, access: Access) -> None:
        self._proxy = config.proxy
        self._key = config.trainer_key()
        self._store = store
        self._spool = spool
        self._access = access

    async def feedback(self, request: web.Request) -> web.Response:
        """Keep a score; of a caller for any tenant also where the trace is not sampled, or was not seen yet."""
        try:
            caller = self._allowed(request, Scope.FEEDBACK)
            score = (await read_body(request, Feedback, self._proxy.max_body_bytes)).score()
            recorded = caller.tenant is None or await self._is_of(caller.tenant, score)
            if recorded:
                await self._keep(score)
        except REFUSALS as error:
            return refusal_response(error)[0]
        return web.json_response(
            {"status": "ok", score.target_kind: score.target_id, "name": score.name, "recorded": recorded}
        )

    async def episode(self, request: web.Request) -> web.Response:
        """Record the end2end row of a trace, if the trace is sampled; once, however often a client sends it again.

        The row's uid is made from tenant, trace and content, and from `Idempotency-Key` where the client sends one, so
        that two equal episodes of one trace can be told from one that was sent twice.
        """
        started = time.perf_counter()
        now = datetime.now(UTC)
        try:
            caller = self._allowed(request, Scope.CALL)
            episode = await read_body(request, Episode, self._proxy.max_body_bytes)
            identity, arm, attributes = self._whose(request, caller, episode)
            call = Call(
                uid=_uid(identity, episode, request.headers.get(IDEMPOTENCY_HEADER, "")),
                tenant=identity.tenant,
                app=identity.app,
                process_node=END2END,
                trace_id=identity.trace_id,
                model_name="",
                policy_version=None,
                arm=arm,
                input=episode.request,
                output=episode.response,
                status=episode.status,
                request_time=now,
                response_time=now,
                duration_ms=(time.perf_counter() - started) * 1000,
                agent_version=identity.agent_version,
                subject=identity.subject,
                consent=identity.consent,
                attributes={**attributes_of(identity), **attributes},
            )
            recorded = arm is Arm.ROLLOUT or sampled(identity.trace_id, self._proxy.sampling_rate)
            if recorded:
                await self._keep(call)
        except REFUSALS as error:
            return refusal_response(error)[0]
        answer = {"status": "ok", "trace_id": call.trace_id, "recorded": recorded}
        return web.json_response(answer, headers={TRACE_HEADER: call.trace_id, UID_HEADER: call.uid})

    async def trace(self, request: web.Request) -> web.Response:
        """The calls of one trace that are the caller's tenant's, with their tokens, in id order."""
        trace_id = request.match_info["trace_id"]
        try:
            caller = self._allowed(request, Scope.TRAINER)
            if not is_trace_id(trace_id):
                seen = without_keys(trace_id)
                raise InvalidRecord(f"{seen!r} is not a W3C trace id (32 lower-case hex digits, not all zero)")
            await self._flushed()
            body = await self._read(_trace_body, self._store, trace_id, caller.tenant)
            if body is None:
                raise _no_such_trace(trace_id, caller.tenant)
        except REFUSALS as error:
            return refusal_response(error)[0]
        return web.Response(body=body, content_type="application/json")

    def _allowed(self, request: web.Request, scope: Scope) -> Caller:
        caller = self._access.caller(request.headers)
        self._access.require(caller, scope)
        return caller

    async def _keep(self, record: Call | Score) -> None:
        if not await self._spool.write(record):
            raise StoreUnavailable("the spool does not take records (noria_unrecorded_total); see the proxy's log")

    async def _is_of(self, tenant: str, score: Score) -> bool:
        """Whether a score of this tenant is to be kept; False for a trace that is not sampled, of which nothing is.

        Raises `NotFound` where the target is unknown or another tenant's, which look alike; `Forbidden` for a trace in
        which several tenants have calls, where a score would be of all of them; `StoreUnavailable` if nobody can say.
        """
        lookup = tenants_of_trace if score.target_kind == "trace" else tenants_of_call
        tenants = await self._read(lookup, self._store, score.target_id)
        if tenants != {tenant}:
            await self._flushed()  # a call of it may have been recorded a moment ago
            tenants = await self._read(lookup, self._store, score.target_id)
        if tenants == {tenant}:
            return True
        if tenant in tenants:
            raise Forbidden(
                f"trace {score.target_id} has calls of other tenants than {tenant!r} too; name one call by call_uid"
            )
        if score.target_kind == "call":
            raise NotFound(f"tenant {tenant!r} has no recorded call {score.target_id}; was its trace sampled?")
        if not sampled(score.target_id, self._proxy.sampling_rate):
            return False
        raise _no_such_trace(score.target_id, tenant)

    async def _flushed(self) -> None:
        try:
            await asyncio.wait_for(self._spool.flushed(), FLUSH_SECONDS)
        except TimeoutError as error:
            raise StoreUnavailable(f"the spool is not in the store after {FLUSH_SECONDS:g} s; try again") from error

    async def _read(self, what: Any, *args: Any) -> Any:
        try:
            return await asyncio.to_thread(what, *args)
        except (SQLAlchemyError, ConfigError, OSError) as error:
            raise StoreUnavailable(f"the online store cannot be read: {error}; try again") from error

    def _whose(self, request: web.Request, caller: Caller, episode: Episode) -> tuple[Identity, Arm, dict[str, Any]]:
        """Whose episode it is, the arm, and the attributes that say so."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        for name in ("tenant", "app"):
            if (said := getattr(episode, name)) is not None:
                headers[f"x-noria-{name}"] = said  # what the body says counts before any header
        identity = dataclasses.replace(identify(headers, request.match_info, self._proxy, caller.tenant), node=END2END)
        changes = {name: getattr(episode, name) for name in ("trace_id", "agent_version", "consent")}
        identity = dataclasses.replace(identity, **{name: said for name, said in changes.items() if said is not None})
        if episode.subject is not None:
            identity = dataclasses.replace(identity, subject=hash_subject(identity.tenant, episode.subject))
        if identity.meta is not None:
            directive = read(identity.meta, self._key)
            identity = identity.in_rollout(directive, headers.get("traceparent"))
            return identity, Arm.ROLLOUT, {"rollout": rollout_attributes(directive)}
        if episode.trace_id is None and "traceparent" not in headers:
            raise InvalidRecord("an episode needs a trace_id, in its body or as traceparent")
        return identity, Arm.LIVE, {}


def _trace_body(store: OnlineStore, trace_id: str, tenant: str | None) -> bytes | None:
    """The answer as JSON, made in the thread that reads it: a trace may have many megabytes.

    None where a caller of one tenant asks for a trace in which that tenant has no call.
    """
    calls = store.trace(trace_id, tenant=tenant)
    if tenant is not None and not calls:
        return None
    return json.dumps({"calls": [call_to_json(call) for call in calls]}).encode()


def _no_such_trace(trace_id: str, tenant: str | None) -> NotFound:
    return NotFound(
        f"tenant {tenant!r} has no recorded call in trace {trace_id}; was it sampled, was it made with a key of this "
        "tenant, and has it ended? If it went through another proxy a moment ago, try again"
    )


def _uid(identity: Identity, episode: Episode, idempotency_key: str) -> str:
    if len(idempotency_key) > _MAX_IDEMPOTENCY_KEY:
        raise InvalidRecord(
            f"{IDEMPOTENCY_HEADER} has {len(idempotency_key)} characters; at most {_MAX_IDEMPOTENCY_KEY} are kept apart"
        )
    content = hashlib.sha256(episode.model_dump_json().encode()).hexdigest()
    same = (identity.tenant, identity.app, identity.trace_id, idempotency_key, content)
    return str(uuid.uuid5(_EPISODES, json.dumps(same)))
