import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import END2END, Arm, Call, CallStatus, CallTokens
from noria.contracts.trajectory import Trajectory
from noria.rollout.assemble import assemble, policy_failure, same_weights
from noria.rollout.chat import action_of, content_of, first_message, messages_of, parse_object, thought_of
from noria.rollout.plan import RolloutPlan

VERSION = "shop.router.r00002"
PLAN = RolloutPlan(
    round="shop.router.r00003",
    sample_id=5,
    group=1,
    member=2,
    origin_trace_id="a" * 32,
    origin_request="where is my parcel",
    reference={"ok": {"value": 1.0, "explanation": None}},
    seed=9,
)
START = datetime(2025, 1, 1, tzinfo=UTC)


def call(k: int, node: str, messages: list[dict[str, Any]], message: dict[str, Any], **changes: Any) -> Call:
    own = node == "router"
    values: dict[str, Any] = {
        "uid": f"uid-{k}",
        "id": k,
        "tenant": "default",
        "app": "shop",
        "process_node": node,
        "trace_id": "b" * 32,
        "model_name": "base",
        "policy_version": VERSION if own else None,
        "arm": Arm.ROLLOUT,
        "input": json.dumps({"messages": messages}),
        "output": json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}),
        "status": CallStatus.OK,
        "request_time": START + timedelta(seconds=k),
        "response_time": START + timedelta(seconds=k + 0.5),
        "duration_ms": 500.0,
        "tokens": CallTokens((1, 2), (3, 4), (-0.1, -0.2)) if own else None,
        "attributes": {} if own else {"pinned": "exact"},
    }
    return Call(**{**values, **changes})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


ROUTER = call(1, "router", [user("where is my parcel")], {"content": '{"name": "track"}'})
REPLY = call(2, "reply", [user('{"tool": "track", "found": 1}')], {"content": "It is near."})


def assembled(*calls: Call, **changes: Any) -> Trajectory:
    return assemble(PLAN, calls, trace_id="b" * 32, policy_version=VERSION, **changes)


def test_steps_stand_in_causal_order_with_what_each_saw_and_did() -> None:
    made = assembled(REPLY, ROUTER, origin_response="It is near.", duration_ms=12.0)
    router, reply = made.steps
    assert made.error is None
    assert (router.node, reply.node) == ("router", "reply")
    assert json.loads(router.observation) == [user("where is my parcel")]
    assert router.action == '{"name": "track"}'
    assert router.tool_result == '{"tool": "track", "found": 1}'
    assert router.sampled
    assert not reply.sampled
    assert (router.pinned, reply.pinned) == (None, "exact")
    assert reply.tool_result == ""
    assert made.reference == {"ok": {"value": 1.0, "explanation": None}}
    assert (made.sample_id, made.group, made.member, made.seed) == (5, 1, 2, 9)


def test_tool_calls_thought_and_tool_answers_are_read_from_the_openai_format() -> None:
    tool_calls = [{"id": "c1", "type": "function", "function": {"name": "track", "arguments": "{}"}}]
    first = call(
        1,
        "router",
        [user("where")],
        {"content": "I look it up.", "reasoning_content": "They ask for a parcel.", "tool_calls": tool_calls},
    )
    asked = {"role": "assistant", "content": "I look it up.", "tool_calls": tool_calls}
    answer = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "near"}]}
    second = call(2, "router", [user("where"), asked, answer], {"content": "It is near."})
    made = assembled(first, second)
    assert json.loads(made.steps[0].action) == tool_calls
    assert made.steps[0].thought == "They ask for a parcel.\nI look it up."
    assert made.steps[0].tool_result == "near"
    assert made.steps[1].action == "It is near."


def test_overlapping_calls_stand_in_the_order_in_which_they_began() -> None:
    slow = call(2, "reply", [user("x")], {"content": "slow"}, request_time=START)
    quick = call(1, "router", [user("y")], {"content": "quick"}, request_time=START + timedelta(milliseconds=1))
    assert [step.action for step in assembled(quick, slow).steps] == ["slow", "quick"]


def test_the_end2end_row_is_no_step() -> None:
    assert len(assembled(ROUTER, call(3, END2END, [], {}), REPLY).steps) == 2


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ((), "never called its node 'router'.*none at all"),
        ((REPLY,), "never called its node 'router'.*reply"),
        (
            (call(1, "router", [], {}, status=CallStatus.UPSTREAM_ERROR, error_type="http_500"),),
            "upstream_error .http_500",
        ),
        ((ROUTER, call(2, "reply", [], {}, status=CallStatus.REFUSED)), "'reply' ended with status refused"),
        ((call(1, "router", [], {"content": "x"}, tokens=None),), "no token ids"),
        ((call(1, "router", [], {"content": ""}, tokens=CallTokens((1,), (), ())),), "no token ids"),
        ((call(1, "router", [], {"content": "x"}, tokens=CallTokens((1,), (2,), (float("nan"),))),), "not finite"),
        ((call(1, "router", [], {"content": "x"}, policy_version="shop.router.r00001"),), "r00001.*not by.*r00002"),
        ((call(1, "router", [], {"content": "x"}, policy_version=None),), "answered by version None"),
    ],
)
def test_each_fault_of_the_records_is_told(calls: tuple[Call, ...], said: str) -> None:
    import re

    error = assembled(*calls).error
    assert error is not None
    assert re.search(said, error), error


def test_an_error_from_before_counts_first() -> None:
    assert assembled(error="the agent is down").error == "the agent is down"


def test_a_pinned_miss_means_divergence_and_length_means_truncation() -> None:
    miss = call(2, "reply", [user("x")], {"content": "y"}, attributes={"pinned": "miss"})
    made = assembled(ROUTER, miss, REPLY)
    assert (made.diverged, made.pinned_misses, made.truncated) == (True, 1, False)
    cut = call(1, "router", [user("x")], {"content": "y"}, finish_reasons=("length",))
    pinned_cut = call(2, "reply", [user("x")], {"content": "y"}, finish_reasons=("length",))
    assert assembled(cut).truncated
    assert not assembled(ROUTER, pinned_cut).truncated


def test_policy_failure_looks_at_the_target_only() -> None:
    failed = {"status": CallStatus.UPSTREAM_ERROR}
    assert policy_failure([ROUTER, call(2, "reply", [], {}, **failed)], "router") is None
    assert "upstream_error" in str(policy_failure([call(1, "router", [], {}, **failed)], "router"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("base", "base", True),
        ("base", "shop.router.r00000", True),
        ("shop.reply.r00000", "shop.router.r00000", True),
        ("shop.router.r00001", "shop.router.r00001", True),
        ("shop.router.r00001", "shop.router.r00000", False),
        ("base", "shop.router.r00001", False),
        (None, "base", False),
        ("gpt-4", "base", False),
    ],
)
def test_same_weights(one: str | None, other: str, same: bool) -> None:
    assert same_weights(one, other) is same
    assert same_weights(other, one) is same


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "choices", "message", "content", "tool_calls", "text", "role"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(_JSON)
def test_any_json_can_be_read_as_a_call(value: Any) -> None:
    text = json.dumps(value)
    record = parse_object(text)
    for message in (*messages_of(record), first_message(record)):
        for text_of in (content_of, action_of, thought_of):
            assert isinstance(text_of(message), str)
    made = assembled(ROUTER, call(2, "router", [], {}, input=text, output=text))
    assert len(made.steps) == 2
