import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.services.proxy.wire.json_text import MAX_DEPTH, parse, plain, to_text


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_every_value_is_read_exactly(value: object) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(to_text(value).encode()) == value


@settings(deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("\ud800\udfff\x00\ud83d\ude00")))
def test_text_for_a_store_has_no_nul_and_no_lone_surrogate(text: str) -> None:
    assert json.loads(to_text(text)) == text
    for written in (to_text(text), plain(text)):
        assert "\x00" not in written
        written.encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a":NaN}',
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"1" + b"0" * 5000,
        b"\xff",
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        '"a"'.encode("utf-16"),
        b'"a\x00"',
        b"{} {}",
        b"'a'",
        b"[" * 100_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b'{"a":' * 300 + b'"\\ud800"' + b"}" * 300,
        b"[" * 300 + b"12345678901234567890123" + b"]" * 300,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_strict_json_or_too_deep_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_as_deep_as_is_allowed() -> None:
    text = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(parse(text)).encode() == text
    assert parse(b"[" * 200 + b"12345678901234567890123" + b"]" * 200)
    assert parse(b"12345678901234567890123") == 12345678901234567890123


def test_plain_text_is_short() -> None:
    assert plain("a" * 1000) == "a" * 200
    assert plain("a\x00\ud800b") == "a\ufffd\ufffdb"
    assert plain("\ud83d\ude00") == "\U0001f600"
