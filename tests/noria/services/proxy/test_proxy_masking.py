"""An upstream's key in the upstream's own words."""

import itertools
import json

from hypothesis import example, given
from hypothesis import strategies as st

from noria.services.proxy.masking import SecretMask, masked, masked_header

KEY = "sk-sk-abcab"
OTHER = 'pass"wörd/'


def run(pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    mask = SecretMask((KEY, OTHER))
    out = [mask.feed(piece) for piece in pieces]
    return b"".join(out) + mask.end(), out


@given(
    st.lists(st.sampled_from([KEY, "sk-", "sk-sk-", "abcab", "b", "é", " ", KEY[:-1]]), max_size=12),
    st.lists(st.integers(0, 120), max_size=12),
)
@example(["sk-sk-", KEY], [7])
def test_a_key_is_found_wherever_it_is_cut(words: list[str], cuts: list[int]) -> None:
    body = "".join(words).encode()
    ends = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    pieces = [body[a:b] for a, b in itertools.pairwise(ends)]
    whole, out = run(pieces)
    assert whole == body.replace(KEY.encode(), b"*" * len(KEY)) == masked(body, (KEY, OTHER))
    sent = 0
    for piece, passed in zip(pieces, out, strict=True):
        sent += len(piece) - len(passed)
        assert 0 <= sent < len(KEY), "no more is held back than may become a key"


def test_a_secret_is_known_in_a_json_string_too() -> None:
    for body in (OTHER.encode(), json.dumps(OTHER).encode(), json.dumps(OTHER, ensure_ascii=False).encode()):
        assert b"rd/" not in masked(body, (OTHER,))
        assert len(masked(body, (OTHER,))) == len(body)


def test_short_words_are_no_secrets() -> None:
    assert masked(b"a password of one letter", ("a", "letter")) == b"a password of one letter"
    assert SecretMask(("a",)).feed(b"a") == b"a"


def test_headers_keep_whatever_bytes_they_have() -> None:
    value = "Bearer " + KEY + " \udcff é"
    assert masked_header(value, (KEY,)) == "Bearer " + "*" * len(KEY) + " \udcff é"
