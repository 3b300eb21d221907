"""The warehouse's tables as Arrow schemas, and how records become their rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from typing import Any

import pyarrow as pa

from noria.contracts.call import Call, CallTokens, Score

_TIME = pa.timestamp("us", tz="UTC")
_CALLS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("uid", pa.string(), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("app", pa.string()),  # Delta reads an empty partition value back as null
        pa.field("process_node", pa.string(), nullable=False),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("model_name", pa.string(), nullable=False),
        pa.field("policy_version", pa.string()),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("input", pa.string(), nullable=False),
        pa.field("output", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error_type", pa.string()),
        pa.field("finish_reasons", pa.list_(pa.string()), nullable=False),
        pa.field("usage", pa.string()),
        pa.field("agent_version", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("consent", pa.bool_(), nullable=False),
        pa.field("reward_score", pa.float64()),
        pa.field("attributes", pa.string(), nullable=False),
        pa.field("request_time", _TIME, nullable=False),
        pa.field("response_time", _TIME, nullable=False),
        pa.field("duration_ms", pa.float64(), nullable=False),
        pa.field("day", pa.date32()),
    ]
)
_CALL_TOKENS = pa.schema(
    [
        pa.field("call_id", pa.int64(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float64()), nullable=False),
    ]
)
_SCORES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("target_kind", pa.string(), nullable=False),
        pa.field("target_id", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("scorer", pa.string(), nullable=False),
        pa.field("scorer_version", pa.string(), nullable=False),
        pa.field("at", _TIME, nullable=False),
        pa.field("explanation", pa.string()),
    ]
)
SCHEMAS: Mapping[str, pa.Schema] = {"calls": _CALLS, "call_tokens": _CALL_TOKENS, "scores": _SCORES}
"""The tables of the warehouse. `calls` has the fields of `Call`, JSON as text, and its day in UTC."""

PARTITIONS: Mapping[str, list[str]] = {"calls": ["day", "app"]}
CONFIGURATION: Mapping[str, str | None] = {
    # A round pins versions for as long as it may be made again: the log that knows them is kept.
    "delta.enableExpiredLogCleanup": "false"
}


def calls_to_arrow(calls: Sequence[Call]) -> pa.Table:
    """Rows of `calls`."""
    special: dict[str, Callable[[Call], Any]] = {
        "arm": lambda call: call.arm.value,
        "status": lambda call: call.status.value,
        "usage": lambda call: None if call.usage is None else json.dumps(dict(call.usage)),
        "attributes": lambda call: json.dumps(dict(call.attributes)),
        "day": lambda call: call.request_time.astimezone(UTC).date(),
    }
    columns = {
        name: [special[name](call) if name in special else getattr(call, name) for call in calls]
        for name in _CALLS.names
    }
    return pa.table(columns, schema=_CALLS)


def tokens_to_arrow(rows: Sequence[tuple[int, CallTokens]]) -> pa.Table:
    """Rows of `call_tokens` from pairs (call id, tokens)."""
    columns: dict[str, list[Any]] = {"call_id": [call_id for call_id, _ in rows]}
    for name in _CALL_TOKENS.names[1:]:
        columns[name] = [getattr(tokens, name) for _, tokens in rows]
    return pa.table(columns, schema=_CALL_TOKENS)


def scores_to_arrow(scores: Sequence[Score]) -> pa.Table:
    """Rows of `scores`."""
    columns = {name: [getattr(score, name) for score in scores] for name in _SCORES.names}
    columns["source"] = [score.source.value for score in scores]
    return pa.table(columns, schema=_SCORES)
