import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import ScoreSource
from noria.contracts.errors import InvalidRecord
from noria.rewards.fuse import Component, fuse
from noria.rewards.path import path_similarity
from noria.rewards.phrases import named, numbers
from noria.rewards.tool_calls import compare_tool_calls, parse_tool_calls

paths = st.lists(st.sampled_from("abc"), max_size=8)


@settings(deadline=None)  # other processes share the machine
@given(paths, paths)
def test_path_similarity_is_symmetric_and_bounded(a, b):
    assert 0.0 <= path_similarity(a, b) == path_similarity(b, a) <= 1.0
    assert (path_similarity(a, b) == 1.0) == (a == b)


def test_path_similarity_counts_common_steps_in_order():
    assert path_similarity(["look", "book", "pay"], ["look", "pay"]) == pytest.approx(4 / 5)
    assert path_similarity(["pay", "look"], ["look", "pay"]) == 0.5
    assert path_similarity([], ["look"]) == 0.0


def test_every_known_form_of_a_tool_call_is_read():
    plain = {"name": "find", "arguments": {"city": "Austin"}}
    openai = [{"type": "function", "id": "1", "function": {"name": "find", "arguments": '{"city": "Austin"}'}}]
    for form in (plain, [plain], openai, {"tool_calls": openai}):
        (call,) = parse_tool_calls(json.dumps(form)) or []
        assert (call.name, call.arguments) == ("find", {"city": "Austin"})
    (bare,) = parse_tool_calls('{"name": "find"}') or []
    assert bare.arguments == {}


@pytest.mark.parametrize(
    "output", ["", "find", "3", '{"name": 3}', '{"name": "f", "arguments": "{"}', "[1]", "[" * 9999]
)
def test_what_is_no_tool_call_is_none(output):
    assert parse_tool_calls(output) is None
    assert compare_tool_calls(output, [("find", {})]) == {"valid": 0.0, "name": 0.0, "arguments": 0.0}


def test_tool_calls_compare_by_place():
    expected = [("find", {"city": ["Austin"]})]
    assert compare_tool_calls('{"name": "find", "arguments": {"city": "austin"}}', expected) == {
        "valid": 1.0,
        "name": 1.0,
        "arguments": 1.0,
    }
    assert compare_tool_calls('{"name": "book"}', expected) == {"valid": 1.0, "name": 0.0, "arguments": 0.0}
    twice = json.dumps([{"name": "find", "arguments": {"city": "Austin"}}] * 2)
    assert compare_tool_calls(twice, expected) == {"valid": 1.0, "name": 0.5, "arguments": 0.5}
    assert compare_tool_calls("[]", [])["arguments"] == 1.0


def test_phrases_are_whole_words():
    things = {"film": ("movie", "movies"), "song": ("song",)}
    assert named("I found 3 Movies.", things) == {"film"}
    assert named("A moviesque songbook", things) == set()
    assert numbers("Three of 12, not 7a") == {3, 12}
    assert numbers("9" * 5000) == set()


def component(name: str, value: float | None, weight: float) -> Component:
    return Component(name, value, weight, ScoreSource.RULE, "rules.py:f", "1")


def test_fusing_is_a_weighted_mean_with_its_provenance():
    fused = fuse([component("rule", 1.0, 3), component("judge", 0.0, 1), component("user", None, 5)])
    assert fused.total == 0.75
    assert fused.shares == {"rule": 0.75, "judge": 0.0}
    assert [part.name for part in fused.components] == ["rule", "judge"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "nothing can be fused"),
        ([component("a", None, 1)], "nothing can be fused"),
        ([component("a", 1.0, 0)], "nothing can be fused"),
        ([component("a", float("nan"), 1)], "'a' is nan"),
        ([component("a", 1.0, -1)], "weight -1"),
        ([component("a", 1.0, 1), component("a", 0.0, 1)], "stands twice"),
    ],
)
def test_what_cannot_be_fused_is_an_error(parts, message):
    with pytest.raises(InvalidRecord, match=message):
        fuse(parts)
