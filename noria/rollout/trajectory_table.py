"""Trajectories and rewarded sequences on disk: JSON lines while a round runs, Arrow tables when it is done."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa

from noria.contracts.call import CallTokens
from noria.contracts.errors import InvalidRecord
from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Step, Trajectory

_TOKENS = pa.struct(
    [
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)

_STEP = pa.struct(
    [
        ("node", pa.string()),
        ("call_uid", pa.string()),
        ("observation", pa.string()),
        ("thought", pa.string()),
        ("action", pa.string()),
        ("tool_result", pa.string()),
        ("sampled", pa.bool_()),
        ("pinned", pa.string()),
        ("policy_version", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", _TOKENS),
    ]
)

TRAJECTORY_SCHEMA = pa.schema(
    [
        pa.field("round", pa.string(), nullable=False),
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("member", pa.int64(), nullable=False),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("origin_trace_id", pa.string(), nullable=False),
        pa.field("policy_version", pa.string(), nullable=False),
        pa.field("origin_request", pa.string(), nullable=False),
        pa.field("origin_response", pa.string(), nullable=False),
        pa.field("steps", pa.list_(_STEP), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("diverged", pa.bool_(), nullable=False),
        pa.field("pinned_misses", pa.int64(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("agent_version", pa.string()),
        pa.field("duration_ms", pa.float64(), nullable=False),
        pa.field("reference", pa.string(), nullable=False),
    ]
)
"""One row per rollout; `reference` is JSON text."""

SEQUENCE_SCHEMA = pa.schema(
    [
        pa.field("round", pa.string(), nullable=False),
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("member", pa.int64(), nullable=False),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("policy_version", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("advantages", pa.list_(pa.float32()), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("components", pa.string(), nullable=False),
    ]
)
"""One row per sequence; `components` is JSON text {name: float}. Token-level numbers are float32, as the trainer's."""

_SEQUENCE_TUPLES = ("prompt_ids", "completion_ids", "loss_mask", "logprobs", "advantages")


def trajectory_to_record(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as a JSON object, lossless: a line of `rollouts.jsonl`."""
    return asdict(trajectory)


def trajectory_from_record(record: Mapping[str, Any]) -> Trajectory:
    """Read what `trajectory_to_record` made, before or after its way through JSON. Raises `InvalidRecord`."""
    try:
        return _trajectory(record)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidRecord(f"this is no trajectory: {error}: {str(record)[:200]}") from error


def trajectory_to_json(trajectory: Trajectory) -> str:
    """The trajectory as one line of JSON."""
    return json.dumps(trajectory_to_record(trajectory), ensure_ascii=False, allow_nan=False)


def trajectory_from_json(text: str) -> Trajectory:
    """Read what `trajectory_to_json` wrote. Raises `InvalidRecord`."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise InvalidRecord(f"this line is no JSON: {error}: {text[:200]!r}") from error
    return trajectory_from_record(record)


def latest_trajectories(records: Iterable[Mapping[str, Any]]) -> list[Trajectory]:
    """One trajectory per planned rollout from a log in which failed ones were tried again later.

    The last one counts, except that one with an error never replaces one without. Raises `InvalidRecord`.
    """
    latest: dict[tuple[str, int, int, int], Trajectory] = {}
    for record in records:
        trajectory = trajectory_from_record(record)
        place = (trajectory.round, trajectory.sample_id, trajectory.group, trajectory.member)
        if place not in latest or trajectory.error is None or latest[place].error is not None:
            latest[place] = trajectory
    return list(latest.values())


def trajectories_to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """The trajectories as a table of `TRAJECTORY_SCHEMA`, in the order given."""
    rows = [{**asdict(t), "reference": json.dumps(t.reference, ensure_ascii=False)} for t in trajectories]
    return pa.Table.from_pylist(rows, schema=TRAJECTORY_SCHEMA)


def table_to_trajectories(table: pa.Table) -> list[Trajectory]:
    """Read what `trajectories_to_table` made; logprobs have the precision of float32."""
    _check_columns(table, TRAJECTORY_SCHEMA)
    return [_trajectory({**row, "reference": json.loads(row["reference"])}) for row in table.to_pylist()]


def sequences_to_table(sequences: Sequence[RewardedSequence]) -> pa.Table:
    """The sequences as a table of `SEQUENCE_SCHEMA`, in the order given."""
    columns: dict[str, list[Any]] = {
        field.name: [getattr(sequence, field.name) for sequence in sequences] for field in fields(RewardedSequence)
    }
    columns["components"] = [json.dumps(dict(components)) for components in columns["components"]]
    return pa.Table.from_pydict(columns, schema=SEQUENCE_SCHEMA)


def table_to_sequences(table: pa.Table) -> list[RewardedSequence]:
    """Read what `sequences_to_table` made."""
    _check_columns(table, SEQUENCE_SCHEMA)
    rows = table.select(SEQUENCE_SCHEMA.names).to_pylist()
    return [
        RewardedSequence(
            **{name: tuple(value) if name in _SEQUENCE_TUPLES else value for name, value in row.items()}
            | {"components": json.loads(row["components"])}
        )
        for row in rows
    ]


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{**row, "steps": tuple(_step(step) for step in row["steps"])})


def _step(row: Mapping[str, Any]) -> Step:
    tokens = row["tokens"]
    if tokens is not None:
        tokens = CallTokens(**{name: tuple(values) for name, values in tokens.items()})
    return Step(**{**row, "tokens": tokens})


def _check_columns(table: pa.Table, schema: pa.Schema) -> None:
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise InvalidRecord(f"the table lacks the columns {', '.join(missing)}; it was not written by this version")
