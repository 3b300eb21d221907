"""What makes two requests the same question, and which of a rollout's calls one is."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.services.proxy.exchange import Kind
from noria.services.proxy.occurrences import Occurrences
from noria.services.proxy.recording import OriginTrace, input_key


def ask(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "gpt-5", "messages": [{"role": "user", "content": content}], **more}


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _reversed(value[name]) for name in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


@given(_json, st.sampled_from(list(Kind)))
def test_neither_key_order_nor_sampling_changes_what_is_asked(content: Any, kind: Kind) -> None:
    asked = {"messages": [{"role": "user", "content": content}], "input": content, "prompt": content, "system": content}
    same = {**_reversed(asked), "temperature": 0.3, "stream": True, "stream_options": {}, "tools": [], "metadata": None}
    assert input_key(kind, asked) == input_key(kind, same)
    assert input_key(kind, asked) == input_key(kind, json.loads(json.dumps(same)))


@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [
        (Kind.CHAT, ask("x"), ask("y")),
        (Kind.CHAT, ask("x"), ask("x", tools=[{"type": "function", "function": {"name": "f"}}])),
        (Kind.CHAT, ask("x"), ask("x", response_format={"type": "json_object"})),
        (Kind.CHAT, ask("x"), ask("x ")),
        (Kind.CHAT, {"messages": [1, 2]}, {"messages": [2, 1]}),
        (Kind.COMPLETION, {"prompt": "x"}, {"prompt": "x", "suffix": "y"}),
        (Kind.RESPONSE, {"input": "x"}, {"input": "x", "instructions": "y"}),
        (Kind.RESPONSE, {"input": "x"}, {"input": "x", "previous_response_id": "r"}),
        (Kind.EMBEDDING, {"input": "x", "model": "a"}, {"input": "x", "model": "b"}),
        (Kind.EMBEDDING, {"input": ["x"]}, {"input": ["x", "x"]}),
        (Kind.MESSAGE, ask("x"), ask("x", system="y")),
    ],
)
def test_what_is_asked_tells_requests_apart(kind: Kind, one: dict[str, Any], two: dict[str, Any]) -> None:
    assert input_key(kind, one) != input_key(kind, two)


def test_a_null_member_is_none() -> None:
    said = {"role": "assistant", "content": "x"}
    assert input_key(Kind.CHAT, {"messages": [said]}) == input_key(
        Kind.CHAT, {"messages": [{**said, "refusal": None, "audio": None}], "tools": None, "functions": []}
    )


def test_a_recorded_input_that_is_no_object_answers_by_place_alone(make_call: Any) -> None:
    for text in ('"not json"', "[]", "null", '{"base64": "AA=="}'):
        trace = OriginTrace([make_call(input=text, output="{}")])
        assert trace.occurrence("n", Kind.CHAT, 0) is not None
        assert trace.same_input("n", Kind.CHAT, input_key(Kind.CHAT, ask("x")), 0) is None


@given(st.lists(st.integers(0, 4), max_size=30))
def test_numbers_in_use_are_distinct_and_the_lowest_free_one_is_next(steps: list[int]) -> None:
    counts = Occurrences()
    used: list[int] = []
    for step in steps:
        if step == 0 and used:
            counts.give_back("r", "k", used.pop(len(used) // 2))
        else:
            lowest = next(number for number in itertools.count() if number not in used)
            assert counts.take("r", "k") == lowest
            used.append(lowest)


def test_the_counts_of_the_longest_quiet_rollout_are_dropped_first() -> None:
    counts = Occurrences(rollouts=2)
    for rollout in ("one", "two", "one", "three"):
        counts.take(rollout, "k")
    counts.give_back("two", "k", 0)
    assert [counts.take(rollout, "k") for rollout in ("one", "three", "two")] == [2, 1, 0]
