import json
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.contracts.call import Arm, Call, CallStatus, CallTokens
from noria.contracts.call_json import call_from_json, call_to_json
from noria.contracts.errors import InvalidRecord

TEXT = st.text(max_size=20)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.dictionaries(TEXT, st.none() | st.booleans() | st.integers() | NUMBER | TEXT | st.lists(TEXT), max_size=3)
TIME = st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30))])).filter(
    lambda time: 1 < time.year < 9999
)
TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), NUMBER), max_size=4).map(
    lambda pairs: CallTokens((1, 2), tuple(i for i, _ in pairs), tuple(p for _, p in pairs))
)
CALLS = st.builds(
    Call,
    uid=TEXT,
    tenant=TEXT,
    app=TEXT,
    process_node=TEXT,
    trace_id=TEXT,
    model_name=TEXT,
    policy_version=st.none() | TEXT,
    arm=st.sampled_from(Arm),
    input=TEXT,
    output=TEXT,
    status=st.sampled_from(CallStatus),
    request_time=TIME,
    response_time=TIME,
    duration_ms=NUMBER,
    error_type=st.none() | TEXT,
    finish_reasons=st.lists(TEXT, max_size=2).map(tuple),
    usage=st.none() | JSON,
    agent_version=st.none() | TEXT,
    subject=st.none() | TEXT,
    consent=st.booleans(),
    reward_score=st.none() | NUMBER,
    attributes=JSON,
    tokens=st.none() | TOKENS,
    id=st.none() | st.integers(1, 2**63 - 1),
)


@given(CALLS)
def test_a_call_survives_json(call: Call) -> None:
    record = call_to_json(call)
    assert set(record) == {field.name for field in fields(Call)}
    assert call_from_json(json.loads(json.dumps(record))) == call


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uid": None}, "call None: uid is None: it must be str, not NoneType"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"arm": "left"}, "arm is 'left'"),
        ({"consent": 1}, "consent is 1: it must be bool, not int"),
        ({"duration_ms": True}, "duration_ms is True: it must be a number"),
        ({"request_time": "2026-01-01T00:00:00"}, "it must carry a timezone"),
        ({"finish_reasons": "stop"}, "it must be a list"),
        ({"tokens": {"prompt_token_ids": []}}, "its keys must be"),
        ({"tokens": {"prompt_token_ids": [], "completion_token_ids": [1], "logprobs": []}}, "1 .* have 0 logprobs"),
    ],
)
def test_a_record_that_breaks_the_contract_is_named(
    make_call: Callable[..., Call], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRecord, match=message):
        call_from_json({**call_to_json(make_call(0)), **change})


def test_a_missing_field_and_a_wrong_shape_are_named(make_call: Callable[..., Call]) -> None:
    record = call_to_json(make_call(0))
    del record["trace_id"]
    with pytest.raises(InvalidRecord, match="uid-00000000: field 'trace_id' is missing"):
        call_from_json(record)
    with pytest.raises(InvalidRecord, match="a JSON object"):
        call_from_json([])  # type: ignore[arg-type]
    with pytest.raises(InvalidRecord, match="has no timezone"):
        call_to_json(make_call(0, request_time=make_call(0).request_time.replace(tzinfo=None)))
