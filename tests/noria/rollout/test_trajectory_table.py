import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import CallTokens
from noria.contracts.errors import InvalidRecord
from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Step, Trajectory
from noria.rollout.trajectory_table import (
    SEQUENCE_SCHEMA,
    TRAJECTORY_SCHEMA,
    latest_trajectories,
    sequences_to_table,
    table_to_sequences,
    table_to_trajectories,
    trajectories_to_table,
    trajectory_from_json,
    trajectory_from_record,
    trajectory_to_json,
    trajectory_to_record,
)

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_maybe = st.none() | _text
_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
_number = st.floats(width=32, allow_nan=False, allow_infinity=False)
_numbers = st.lists(_number, max_size=4).map(tuple)
_small = st.integers(0, 2**53)
_tokens = st.none() | st.builds(CallTokens, _ids, _ids, _numbers)
_steps = st.lists(
    st.builds(Step, _text, _text, _text, _text, _text, _text, st.booleans(), _maybe, _maybe, _maybe, _tokens),
    max_size=3,
).map(tuple)
_json = st.recursive(
    st.none() | st.booleans() | _small | _text, lambda inner: st.lists(inner, max_size=2), max_leaves=4
)
_trajectories = st.builds(
    Trajectory,
    round=_text,
    sample_id=_small,
    group=_small,
    member=_small,
    trace_id=_text,
    origin_trace_id=_text,
    policy_version=_text,
    origin_request=_text,
    origin_response=_text,
    steps=_steps,
    seed=_small,
    error=_maybe,
    diverged=st.booleans(),
    pinned_misses=_small,
    truncated=st.booleans(),
    agent_version=_maybe,
    duration_ms=_number,
    reference=st.dictionaries(_text, _json, max_size=2),
)
_sequences = st.builds(
    RewardedSequence,
    round=_text,
    sample_id=_small,
    group=_small,
    member=_small,
    trace_id=_text,
    policy_version=_text,
    prompt_ids=_ids,
    completion_ids=_ids,
    loss_mask=st.lists(st.integers(0, 1), max_size=4).map(tuple),
    logprobs=_numbers,
    advantages=_numbers,
    reward=_number,
    weight=_number,
    components=st.dictionaries(_text, _number, max_size=2),
)


def through_parquet(table: pa.Table) -> pa.Table:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return pq.read_table(io.BytesIO(buffer.getvalue()))


@settings(deadline=None)
@given(_trajectories)
def test_a_trajectory_survives_json(trajectory: Trajectory) -> None:
    line = trajectory_to_json(trajectory)
    assert "\n" not in line
    assert trajectory_from_json(line) == trajectory
    assert trajectory_from_record(trajectory_to_record(trajectory)) == trajectory


@settings(deadline=None)
@given(st.lists(_trajectories, max_size=3))
def test_trajectories_survive_parquet(trajectories: list[Trajectory]) -> None:
    table = trajectories_to_table(trajectories)
    assert table.schema == TRAJECTORY_SCHEMA
    assert table_to_trajectories(through_parquet(table)) == trajectories


@settings(deadline=None)
@given(st.lists(_sequences, max_size=3))
def test_sequences_survive_parquet(rows: list[RewardedSequence]) -> None:
    table = sequences_to_table(rows)
    assert table.schema == SEQUENCE_SCHEMA
    assert table_to_sequences(through_parquet(table)) == rows


def test_a_table_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="lacks the columns round"):
        table_to_sequences(pa.table({"x": [1]}))
    with pytest.raises(InvalidRecord, match="lacks the columns round"):
        table_to_trajectories(pa.table({"x": [1]}))


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"round": 1}', "null", '{"steps": [{"tokens": 3}]}'])
def test_a_line_that_is_no_trajectory_is_refused(line: str) -> None:
    with pytest.raises(InvalidRecord, match="is no"):
        trajectory_from_json(line)


def test_of_a_repeated_rollout_the_good_one_counts() -> None:
    def made(member: int, error: str | None, seed: int) -> dict[str, object]:
        trajectory = Trajectory("r", 1, 2, member, "t", "o", "v", "", "", (), seed, error)
        return json.loads(trajectory_to_json(trajectory))

    log = [
        made(0, "down", 1),
        made(1, None, 2),
        made(0, None, 3),
        made(1, "down", 4),
        made(2, "down", 5),
        made(2, "slow", 6),
    ]
    assert [(t.member, t.seed) for t in latest_trajectories(log)] == [(0, 3), (1, 2), (2, 6)]
