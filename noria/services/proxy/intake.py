"""What agents and business systems report beside model calls, and where a rollout's records are read."""

import dataclasses
import json
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar
from uuid import UUID

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from noria.config import ProxyConfig
from noria.contracts.call import END2END, Arm, CallStatus, Score, ScoreSource
from noria.contracts.call_json import call_to_json
from noria.contracts.errors import InvalidRecord
from noria.rollout.directive import read
from noria.services.proxy.capture import Exchange, to_text
from noria.services.proxy.chat import rollout_attributes
from noria.services.proxy.identity import Identity, hash_subject, identify, is_trace_id, sampled
from noria.services.proxy.keys import holds_trainer_key
from noria.services.proxy.recording import Recordings
from noria.services.proxy.refusal import REFUSALS, StoreUnavailable, TooLarge, error_response, refusal_response
from noria.services.proxy.relay import name_response
from noria.services.proxy.spool import Spool

_Model = TypeVar("_Model", bound=BaseModel)


def _trace_id(text: str) -> str:
    if not is_trace_id(text):
        raise ValueError(f"{text!r} is not a W3C trace id (32 lower-case hex digits, not all zero)")
    return text


TraceId = Annotated[str, AfterValidator(_trace_id)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00]*$")]


class Feedback(BaseModel):
    """Body of `POST /v1/feedback`: one statement about a trace or about one call of it."""

    model_config = ConfigDict(extra="forbid")

    trace_id: TraceId | None = None
    call_uid: UUID | None = None
    name: Name
    value: FiniteFloat
    source: ScoreSource = ScoreSource.USER
    scorer: Name = "client"
    scorer_version: Name = "1"
    explanation: Any = None
    """Free text, or any JSON."""

    @model_validator(mode="after")
    def _one_target(self) -> "Feedback":
        if (self.trace_id is None) == (self.call_uid is None):
            raise ValueError("it must name either trace_id or call_uid")
        return self

    def score(self) -> Score:
        """The same as the store has it, said now."""
        kind, target = ("trace", self.trace_id) if self.trace_id is not None else ("call", str(self.call_uid))
        explanation = self.explanation
        if explanation is not None and not isinstance(explanation, str):
            explanation = to_text(explanation)
        return Score(
            target_kind=kind,
            target_id=str(target),
            name=self.name,
            value=self.value,
            source=self.source,
            scorer=self.scorer,
            scorer_version=self.scorer_version,
            at=datetime.now(UTC),
            explanation=explanation,
        )


class Episode(BaseModel):
    """Body of `POST /v1/episodes`: the whole task, from the user's request to the answer."""

    model_config = ConfigDict(extra="forbid")

    trace_id: TraceId | None = None
    app: str | None = None
    request: str
    response: str = ""
    status: CallStatus = CallStatus.OK
    agent_version: str | None = None
    tenant: str | None = None
    subject: str | None = None
    consent: bool | None = None


class Intake:
    """Takes feedback and episodes in, and gives recorded traces out."""

    def __init__(self, proxy: ProxyConfig, key: str, spool: Spool, recordings: Recordings) -> None:
        self._proxy = proxy
        self._key = key
        self._spool = spool
        self._recordings = recordings

    async def feedback(self, request: web.Request) -> web.Response:
        """Keep a score; also for a trace that is not sampled, or that the proxy has not seen yet."""
        try:
            score = (await _body(request, Feedback, self._proxy.max_body_bytes)).score()
            await self._keep(score)
        except REFUSALS as error:
            return refusal_response(error)[0]
        return web.json_response({"status": "ok", score.target_kind: score.target_id, "name": score.name})

    async def episode(self, request: web.Request) -> web.Response:
        """Record the end2end row of a trace, if the trace is sampled."""
        try:
            episode = await _body(request, Episode, self._proxy.max_body_bytes)
            exchange = self._exchange(request, episode)
            if exchange.recorded:
                exchange.raw = episode.request
                await self._keep(exchange.call(episode.status, episode.response))
        except REFUSALS as error:
            return refusal_response(error)[0]
        answer = {"status": "ok", "trace_id": exchange.identity.trace_id, "recorded": exchange.recorded}
        return name_response(web.json_response(answer), exchange)

    async def trace(self, request: web.Request) -> web.Response:
        """The calls of one trace, with their tokens, in id order; for the holder of the trainer's key."""
        if not holds_trainer_key(request, self._key):
            message = "recorded traces are read with Authorization: Bearer <the trainer's key> (NORIA_TRAINER_KEY)"
            return error_response(401, message, "no_trainer_key")
        trace_id = request.match_info["trace_id"]
        try:
            if not is_trace_id(trace_id):
                raise InvalidRecord(f"{trace_id!r} is not a W3C trace id (32 lower-case hex digits, not all zero)")
            calls = await self._recordings.fresh(trace_id)
        except REFUSALS as error:
            return refusal_response(error)[0]
        return web.json_response({"calls": [call_to_json(call) for call in calls]})

    async def _keep(self, record: Any) -> None:
        if not await self._spool.write(record):
            raise StoreUnavailable("the spool does not take records (noria_unrecorded_total); see the proxy's log")

    def _exchange(self, request: web.Request, episode: Episode) -> Exchange:
        prefix = {**request.match_info}
        headers = {name.lower(): value for name, value in request.headers.items()}
        for name in ("tenant", "app"):
            if (said := getattr(episode, name)) is not None:
                headers[f"x-noria-{name}"] = said  # what the body says counts before any header
        identity = dataclasses.replace(identify(headers, prefix, self._proxy), node=END2END)
        changes = {name: getattr(episode, name) for name in ("trace_id", "agent_version", "consent")}
        identity = dataclasses.replace(identity, **{name: said for name, said in changes.items() if said is not None})
        if episode.subject is not None:
            identity = dataclasses.replace(identity, subject=hash_subject(identity.tenant, episode.subject))
        if identity.meta is not None:
            return self._of_rollout(identity, identity.meta, headers.get("traceparent"))
        if episode.trace_id is None and "traceparent" not in headers:
            raise InvalidRecord("an episode needs a trace_id, in its body or as traceparent")
        return Exchange(identity, recorded=sampled(identity.trace_id, self._proxy.sampling_rate))

    def _of_rollout(self, identity: Identity, meta: str, traceparent: str | None) -> Exchange:
        directive = read(meta, self._key)
        attributes = {"rollout": rollout_attributes(directive)}
        return Exchange(identity.in_rollout(directive, traceparent), arm=Arm.ROLLOUT, attributes=attributes)


async def _body(request: web.Request, model: type[_Model], limit: int) -> _Model:
    try:
        value = json.loads(await request.read())
        return model.model_validate(value)
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(f"the request body is over {limit} bytes; proxy.max_body_bytes sets the limit") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise InvalidRecord(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"the request body is not JSON: {error}") from error
