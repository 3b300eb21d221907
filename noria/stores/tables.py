"""Tables of the online store, and how records become rows.

The SQL is what SQLite and PostgreSQL have in common. JSON is stored as text: the wire's own bytes for `input` and
`output`, ASCII for the rest. Token ids are little-endian int32, logprobs little-endian float64: a quarter of the size
of JSON, and bit-exact.

On PostgreSQL `calls` and `scores` have one column more, `written_by`: the transaction that wrote the row, which the
database fills in and only followers read (migration v0002, noria/stores/online.py).
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator

from noria.contracts.call import Arm, Call, CallStatus, CallTokens, Score, ScoreSource
from noria.contracts.errors import InvalidRecord
from noria.contracts.release import Release, ReleaseEvent, ReleaseState


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC with microseconds; SQLite keeps it as naive text in UTC, PostgreSQL as timestamptz."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no timezone; times are aware and in UTC")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the database."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _id() -> Column[int]:
    # INTEGER, because only that makes SQLite's rowid; with AUTOINCREMENT an id is never given out twice.
    return Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)


metadata = MetaData()

calls = Table(
    "calls",
    metadata,
    _id(),
    Column("uid", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("app", Text, nullable=False),
    Column("process_node", Text, nullable=False),
    Column("trace_id", Text, nullable=False),
    Column("model_name", Text, nullable=False),
    Column("policy_version", Text),
    Column("arm", Text, nullable=False),
    Column("input", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("error_type", Text),
    Column("finish_reasons", Text, nullable=False),
    Column("usage", Text),
    Column("agent_version", Text),
    Column("subject", Text),
    Column("consent", Boolean, nullable=False),
    Column("reward_score", Double),
    Column("attributes", Text, nullable=False),
    Column("request_time", UtcDateTime, nullable=False),
    Column("response_time", UtcDateTime, nullable=False),
    Column("duration_ms", Double, nullable=False),
    Index("calls_trace_id", "trace_id"),
    Index("calls_app_node_id", "app", "process_node", "id"),
    sqlite_autoincrement=True,
)

call_tokens = Table(
    "call_tokens",
    metadata,
    Column("call_id", ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("prompt_token_ids", LargeBinary, nullable=False),
    Column("completion_token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
)

call_bodies = Table(
    "call_bodies",
    metadata,
    Column("call_id", ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("sha256", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Index("call_bodies_sha256", "sha256"),
)
"""Which calls refer to which file of large content: what retention may delete."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("hash", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("scopes", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("revoked_at", UtcDateTime),
)

pinned_answers = Table(
    "pinned_answers",
    metadata,
    Column("key", Text, primary_key=True),
    Column("uid", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("policy_version", Text),
    Column("at", UtcDateTime, nullable=False),
)
"""Answers to pinned calls that had no recording: one for a whole group, whichever proxy asked for it."""

SCORE_KEY = ("target_kind", "target_id", "name", "scorer", "scorer_version")
"""What a score is unique by."""

scores = Table(
    "scores",
    metadata,
    _id(),
    Column("target_kind", Text, nullable=False),
    Column("target_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("value", Double, nullable=False),
    Column("source", Text, nullable=False),
    Column("scorer", Text, nullable=False),
    Column("scorer_version", Text, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("explanation", Text),
    UniqueConstraint(*SCORE_KEY, name="scores_key"),
    sqlite_autoincrement=True,
)

releases = Table(
    "releases",
    metadata,
    Column("target", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("checkpoint", Text, nullable=False),
    Column("parent", Text),
    Column("state", Text, nullable=False),
    Column("weight", Double, nullable=False),
    # Two live versions of one target cannot be written, whatever a writer believes.
    Index(
        "releases_one_live",
        "target",
        unique=True,
        sqlite_where=text("state = 'live'"),
        postgresql_where=text("state = 'live'"),
    ),
)

release_events = Table(
    "release_events",
    metadata,
    _id(),
    Column("target", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("weight", Double, nullable=False),
    Column("by", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("report_sha256", Text),
    Column("at", UtcDateTime, nullable=False),
    Index("release_events_target", "target", "id"),
    sqlite_autoincrement=True,
)


def _aware(time: datetime, what: str) -> datetime:
    if time.tzinfo is None:
        raise InvalidRecord(f"{what} {time.isoformat()} has no timezone; times are aware and in UTC")
    return time


LARGE = "large"
"""Key of `Call.attributes` under which the store keeps what it moved to files (noria/stores/bodies.py)."""

MAX_TEXT_BYTES = 250_000_000
"""What a column of a row may hold; both databases end at about four times this, in whatever they make of it."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(value: str) -> str:
    """The text without what a text column cannot hold: NUL and lone surrogates become U+FFFD.

    PostgreSQL refuses both in any text, SQLite the second; the rule is the same for both, so that a store can move from
    one to the other. JSON text is not concerned: there they are written as escapes, which stay as they are.
    """
    return value if _is_storable(value) else _UNSTORABLE.sub("\ufffd", value)


def _is_storable(value: str) -> bool:
    return "\x00" not in value and (value.isascii() or _UNSTORABLE.search(value) is None)


def _storable_row(row: dict[str, Any], what: str) -> list[str]:
    """Make every text of a row storable; the names of the columns in which something was replaced."""
    joined = "".join(value for value in row.values() if type(value) is str)  # one look instead of one a column
    if len(joined) <= MAX_TEXT_BYTES // 4 and _is_storable(joined):
        return []
    replaced: list[str] = []
    for name, value in row.items():
        if type(value) is not str:
            continue
        if len(value) > MAX_TEXT_BYTES // 4 and len(value.encode(errors="replace")) > MAX_TEXT_BYTES:
            raise InvalidRecord(f"{what}: {name} has {len(value)} characters; a column holds {MAX_TEXT_BYTES} bytes")
        if not _is_storable(value):
            row[name] = storable(value)
            replaced.append(name)
    return replaced


def call_to_row(call: Call) -> dict[str, Any]:
    """The call as a row of `calls`, without its id and tokens.

    Where a text could not be stored as it is (`storable`), attributes["replaced_characters"] names the columns. Raises
    `InvalidRecord` for a time without timezone and for a text of more than `MAX_TEXT_BYTES`.
    """
    if LARGE in call.attributes:  # only the store says which strings stand for files
        call = replace(call, attributes={name: value for name, value in call.attributes.items() if name != LARGE})
    row = _call_to_row(call)
    replaced = _storable_row(row, f"call {call.uid[:80]!r}")
    if replaced:
        row["attributes"] = json.dumps({**call.attributes, "replaced_characters": replaced})
    return row


def _call_to_row(call: Call) -> dict[str, Any]:
    return {
        "uid": call.uid,
        "tenant": call.tenant,
        "app": call.app,
        "process_node": call.process_node,
        "trace_id": call.trace_id,
        "model_name": call.model_name,
        "policy_version": call.policy_version,
        "arm": call.arm.value,
        "input": call.input,
        "output": call.output,
        "status": call.status.value,
        "error_type": call.error_type,
        "finish_reasons": json.dumps(call.finish_reasons),
        "usage": None if call.usage is None else json.dumps(dict(call.usage)),
        "agent_version": call.agent_version,
        "subject": call.subject,
        "consent": call.consent,
        "reward_score": None if call.reward_score is None else float(call.reward_score),
        "attributes": json.dumps(dict(call.attributes)),
        "request_time": _aware(call.request_time, f"call {call.uid}: request_time"),
        "response_time": _aware(call.response_time, f"call {call.uid}: response_time"),
        "duration_ms": float(call.duration_ms),
    }


def call_from_row(row: RowMapping) -> Call:
    """Read a row of `calls`, left-joined with `call_tokens` where tokens are wanted."""
    values: dict[str, Any] = {name: row[name] for name in _CALL_COLUMNS}
    values["arm"] = Arm(values["arm"])
    values["status"] = CallStatus(values["status"])
    values["finish_reasons"] = tuple(json.loads(values["finish_reasons"]))
    values["usage"] = None if values["usage"] is None else json.loads(values["usage"])
    values["attributes"] = json.loads(values["attributes"])
    tokens = tokens_from_row(row) if row.get("logprobs") is not None else None
    return Call(**values, tokens=tokens)


_CALL_COLUMNS = tuple(column.name for column in calls.columns)


def tokens_to_row(tokens: CallTokens) -> dict[str, Any]:
    """The tokens as a row of `call_tokens`, without the call's id."""
    return {
        "prompt_token_ids": _pack("i", tokens.prompt_token_ids),
        "completion_token_ids": _pack("i", tokens.completion_token_ids),
        "logprobs": _pack("d", tokens.logprobs),
    }


def tokens_from_row(row: Mapping[str, Any] | RowMapping) -> CallTokens:
    """Read a row of `call_tokens`."""
    return CallTokens(
        prompt_token_ids=_unpack("i", row["prompt_token_ids"]),
        completion_token_ids=_unpack("i", row["completion_token_ids"]),
        logprobs=_unpack("d", row["logprobs"]),
    )


def _pack(kind: str, values: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


def _unpack(kind: str, data: bytes) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(data) // struct.calcsize('<' + kind)}{kind}", data)


def score_to_row(score: Score) -> dict[str, Any]:
    """The score as a row of `scores`, without its id. Raises `InvalidRecord` if it cannot be kept as it is."""
    what = f"score {score.name!r} of {score.target_kind} {score.target_id!r}"
    if score.target_kind not in ("trace", "call"):
        raise InvalidRecord(f"{what}: target_kind must be 'trace' or 'call'")
    if not math.isfinite(score.value):
        raise InvalidRecord(f"{what}: value {score.value} is not finite")
    row: dict[str, Any] = {
        "target_kind": score.target_kind,
        "target_id": score.target_id,
        "name": score.name,
        "value": score.value,
        "source": score.source.value,
        "scorer": score.scorer,
        "scorer_version": score.scorer_version,
        "at": _aware(score.at, f"{what}: at"),
        "explanation": score.explanation,
    }
    _storable_row(row, what)
    return row


def score_from_row(row: RowMapping) -> Score:
    """Read a row of `scores`."""
    values: dict[str, Any] = {column.name: row[column.name] for column in scores.columns}
    return Score(**{**values, "source": ScoreSource(values["source"])})


def release_from_row(row: RowMapping) -> Release:
    """Read a row of `releases`."""
    values: dict[str, Any] = {column.name: row[column.name] for column in releases.columns}
    return Release(**{**values, "state": ReleaseState(values["state"])})


def event_from_row(row: RowMapping) -> ReleaseEvent:
    """Read a row of `release_events`."""
    values: dict[str, Any] = {column.name: row[column.name] for column in release_events.columns}
    before = values["from_state"]
    values["from_state"] = None if before is None else ReleaseState(before)
    return ReleaseEvent(**{**values, "to_state": ReleaseState(values["to_state"])})
