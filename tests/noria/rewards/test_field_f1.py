import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.rewards.field_f1 import field_f1, is_accepted

texts = st.text("aAb .,'\"", max_size=4)
values = st.one_of(texts, st.integers(-3, 3), st.booleans(), st.lists(texts, max_size=2))
answers = st.dictionaries(st.sampled_from("abcdef"), values)
accepted = st.dictionaries(st.sampled_from("abcdef"), st.lists(values, min_size=1, max_size=3))


@settings(deadline=None)  # other processes share the machine
@given(answers, accepted)
def test_it_lies_between_0_and_1(answer, right):
    assert 0.0 <= field_f1(answer, right) <= 1.0


@settings(deadline=None)
@given(accepted)
def test_the_first_accepted_values_are_fully_right(right):
    assert field_f1({name: options[0] for name, options in right.items()}, right) == 1.0


@settings(deadline=None)
@given(answers, accepted)
def test_a_field_too_many_never_helps(answer, right):
    assert field_f1({**answer, "other": 1}, right) <= field_f1(answer, right)


def test_precision_and_recall_are_weighed():
    right = {"city": ["Austin, TX", "Austin"], "date": ["2023-04-15"], "kind": ["rock", ""]}
    assert field_f1({"city": "austin", "date": "2023-04-15"}, right) == 1.0
    assert field_f1({"city": "austin", "date": "2023-04-15", "kind": "jazz"}, right) == pytest.approx(4 / 6)
    assert field_f1({"city": "austin"}, right) == pytest.approx(2 / 3)
    assert field_f1({}, right) == 0.0
    assert field_f1({}, {"kind": ["", "rock"]}) == 1.0


@pytest.mark.parametrize(
    ("value", "options", "right"),
    [
        ("April 1, 2024", ["april 1 2024"], True),
        ("it's", ['it"s'], True),
        ("", ["rock"], False),
        ("", ["rock", ""], True),
        (" ", [""], False),
        (3, [3.0], True),
        (1, [True], False),
        (True, [True], True),
        ("1", [1], False),
        (["a b", "C"], [["AB", "c"]], True),
        (["a"], [["a", "b"]], False),
        ({"size": "Large"}, [{"size": ["large"], "milk": ["coconut", ""]}], True),
        ({"milk": "coconut"}, [{"size": ["large"], "milk": ["coconut", ""]}], False),
        ({"size": "large", "more": 1}, [{"size": ["large"]}], False),
        ([{"k": 1}, {"k": 2}], [[{"k": [1]}, {"k": [2, 3]}]], True),
    ],
)
def test_values_compare_as_in_the_leaderboard(value, options, right):
    assert is_accepted(value, options) is right
