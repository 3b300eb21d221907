import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.services.policy.detokenize import TextStream
from noria.services.policy.versions import Version


def follow(version: Version, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(version.decode, stops)
    deltas = []
    for token in ids:
        text, stopped = stream.push(token)
        deltas.append(text)
        if stopped:
            return deltas, True
    text, stopped = stream.finish()
    return [*deltas, text], stopped


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_deltas_make_the_text_and_never_half_a_character(version: Version, text: str) -> None:
    ids = version.tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = version.decode(ids)
    deltas, _ = follow(version, ids)
    assert "".join(deltas) == whole
    assert all("\ufffd" not in delta for delta in deltas if "\ufffd" not in whole)


@given(ids=st.lists(st.integers(3, 399), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_tokens_give_the_text_of_all_of_them(version: Version, ids: list[int]) -> None:
    deltas, _ = follow(version, ids)
    assert "".join(deltas) == version.decode(ids)


@given(
    ids=st.lists(st.integers(3, 399), max_size=40),
    stops=st.lists(st.text("abeht \ufffd", min_size=1, max_size=3), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_a_stop_string_ends_the_text_before_it(version: Version, ids: list[int], stops: list[str]) -> None:
    whole = version.decode(ids)
    deltas, stopped = follow(version, ids, tuple(stops))
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert stopped == bool(found)
    assert "".join(deltas) == (whole[: min(found)] if found else whole)


def test_a_character_waits_for_its_last_byte(version: Version) -> None:
    ids = version.tokenizer("a€😀", add_special_tokens=False)["input_ids"]
    assert len(ids) == 8
    assert follow(version, ids)[0] == ["a", "", "", "€", "", "", "", "😀", ""]
    assert follow(version, ids[:6])[0] == ["a", "", "", "€", "", "", "\ufffd"]


@pytest.mark.parametrize(("stop", "expected"), [("ab", "xa"), ("aab", "x"), ("zz", "xaabxz")])
def test_an_ending_that_may_become_a_stop_string_is_held_back(stop: str, expected: str) -> None:
    deltas, stopped = [], False
    stream = TextStream(lambda ids: "".join(map(chr, ids)), (stop,))
    for letter in "xaabxz":
        text, stopped = stream.push(ord(letter))
        deltas.append(text)
        if stopped:
            break
    else:
        deltas.append(stream.finish()[0])
    assert stopped == (stop != "zz")
    assert "".join(deltas) == expected


def test_pieces_have_exact_bytes(version: Version) -> None:
    ids = version.tokenizer("the €", add_special_tokens=False)["input_ids"]
    assert b"".join(version.piece(token)[1] for token in ids) == "the €".encode()
    assert version.piece(version.tokenizer.eos_token_id) == ("<|im_end|>", b"<|im_end|>")
    assert version.piece(10_000) == ("", b"")
