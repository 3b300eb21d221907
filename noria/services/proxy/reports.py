"""What is reported beside model calls: the bodies of `/v1/feedback` and `/v1/episodes`, and what a store can keep."""

import sys
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict

from noria.contracts.access import TENANT
from noria.contracts.call import CallStatus, Score, ScoreSource
from noria.services.proxy.identity import is_trace_id
from noria.services.proxy.wire.json_text import to_text


def _trace_id(text: str) -> str:
    if not is_trace_id(text):
        raise ValueError(f"{text!r} is not a W3C trace id (32 lower-case hex digits, not all zero)")
    return text


def _storable(text: str) -> str:
    if "\0" in text:
        raise ValueError("it has a NUL character, which PostgreSQL cannot keep; leave it out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has half a surrogate pair at character {error.start}; send whole characters") from error
    return text


_NO_NUL = {"pattern": "^[^\\u0000]*$"}  # the validators say it, and why, in words of their own
_NAMES_ONE: JsonDict = {
    "oneOf": [{"required": [one], "properties": {one: {"type": "string"}}} for one in ("trace_id", "call_uid")]
}

TRACE_ID = {"type": "string", "pattern": "^[0-9a-f]{32}$", "not": {"const": "0" * 32}}
"""JSON schema of a W3C trace id."""

TraceId = Annotated[str, AfterValidator(_trace_id), WithJsonSchema(TRACE_ID)]
Text = Annotated[str, AfterValidator(_storable), Field(json_schema_extra=_NO_NUL)]
Name = Annotated[str, Field(min_length=1, max_length=128, json_schema_extra=_NO_NUL), AfterValidator(_storable)]
AppName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
TenantName = Annotated[str, Field(pattern=f"^{TENANT.pattern}$")]
Value = Annotated[FiniteFloat, Field(strict=True, ge=-sys.float_info.max, le=sys.float_info.max)]
Explanation = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string", **_NO_NUL}, {"type": ["object", "array", "number", "boolean", "null"]}]}
    ),
]


class Feedback(BaseModel):
    """Body of `POST /v1/feedback`: one statement about a trace or about one call of it."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_NAMES_ONE)

    trace_id: TraceId | None = None
    call_uid: uuid.UUID | None = None
    name: Name
    value: Value
    source: ScoreSource = ScoreSource.USER
    scorer: Name = "client"
    scorer_version: Name = "1"
    explanation: Explanation = None
    """Free text, or any JSON."""

    @model_validator(mode="after")
    def _one_target(self) -> "Feedback":
        if (self.trace_id is None) == (self.call_uid is None):
            raise ValueError("it must name either trace_id or call_uid")
        if isinstance(self.explanation, str):
            _storable(self.explanation)
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
    app: AppName | None = None
    request: Text
    response: Text = ""
    status: CallStatus = CallStatus.OK
    agent_version: Text | None = None
    tenant: TenantName | None = None
    subject: Text | None = None
    consent: StrictBool | None = None
