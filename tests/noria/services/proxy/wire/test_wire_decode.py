import gzip
import os
import time
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.services.proxy.wire.decode import DecodedTooLarge, decode_body, decode_so_far

LIMIT = 1 << 24


def raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


def zstd_in_frames(data: bytes) -> bytes:
    half = len(data) // 2
    encoder = zstandard.ZstdCompressor()
    return encoder.compress(data[:half]) + encoder.compress(data[half:])


CODINGS = [
    ("gzip", gzip.compress),
    ("X-GZIP", gzip.compress),
    ("gzip", lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("br", lambda data: brotli.compress(data, quality=1)),
    ("zstd", zstandard.ZstdCompressor().compress),
    ("zstd", zstd_in_frames),
    ("gzip, br", lambda data: brotli.compress(gzip.compress(data))),
    (" identity , GZIP ", gzip.compress),
    ("", lambda data: data),
]
BODIES = [b"x", b'{"a": 1}' * 100, os.urandom(300_000), bytes(3_000_000), b"ab" * (1 << 19) + b"c"]


@pytest.mark.parametrize(("encoding", "encode"), CODINGS)
@pytest.mark.parametrize("body", BODIES, ids=len)
def test_what_was_encoded_is_decoded(encoding: str, encode: object, body: bytes) -> None:
    encoded = encode(body)  # type: ignore[operator]
    assert decode_body(encoded, encoding, LIMIT) == body
    assert decode_so_far(encoded, encoding, LIMIT) == body
    assert decode_body(encoded, encoding, len(encoded) if encoding == "" else max(len(body), len(encoded))) == body


@pytest.mark.parametrize(("encoding", "encode"), [pair for pair in CODINGS if pair[0] not in ("", "gzip, br")])
def test_a_bomb_stops_at_the_limit(encoding: str, encode: object) -> None:
    bomb = encode(bytes(1 << 26))  # type: ignore[operator]
    with pytest.raises(DecodedTooLarge, match="over 1000000 bytes"):
        decode_body(bomb, encoding, 1_000_000)


@pytest.mark.parametrize(("encoding", "encode"), [pair for pair in CODINGS if pair[0] not in ("", "gzip, br")])
def test_a_body_that_was_cut_off_is_read_so_far(encoding: str, encode: object) -> None:
    body = b"".join(b"%d," % number for number in range(100_000))
    encoded = encode(body)  # type: ignore[operator]
    cut = encoded[: len(encoded) * 3 // 4]
    with pytest.raises(ValueError, match="in the middle"):
        decode_body(cut, encoding, LIMIT)
    so_far = decode_so_far(cut, encoding, LIMIT)
    assert len(so_far) > len(body) // 3
    assert body.startswith(so_far)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_garbage_is_refused(encoding: str) -> None:
    with pytest.raises(ValueError, match=f"not {encoding}"):
        decode_body(b"this is not compressed at all, not in any way", encoding, LIMIT)


@pytest.mark.parametrize(
    ("encoding", "part"), [("gzip", gzip.compress(b"")), ("zstd", zstandard.ZstdCompressor().compress(b""))]
)
def test_a_body_of_countless_empty_parts_is_refused(encoding: str, part: bytes) -> None:
    assert decode_body(part * 100, encoding, LIMIT) == b""
    began = time.process_time()
    with pytest.raises(ValueError, match="over 10000"):
        decode_body(part * 200_000, encoding, LIMIT)
    assert time.process_time() - began < 5  # it is refused after 10,000, however many follow


def test_unknown_and_too_many_codings_are_refused() -> None:
    with pytest.raises(ValueError, match="'compress' is not known; known are br, deflate"):
        decode_body(b"x", "compress", LIMIT)
    with pytest.raises(ValueError, match="5 content codings"):
        decode_body(b"x", "gzip,gzip,gzip,gzip,gzip", LIMIT)


@settings(deadline=None)
@given(st.binary(), st.sampled_from(["gzip", "deflate", "br", "zstd", "gzip, br"]), st.booleans())
def test_no_bytes_raise_anything_else(body: bytes, encoding: str, with_mark: bool) -> None:
    marks = {"gzip": b"\x1f\x8b\x08\x00", "zstd": b"\x28\xb5\x2f\xfd", "deflate": b"\x78\x9c"}
    data = (marks.get(encoding, b"") if with_mark else b"") + body
    for decode in (decode_body, decode_so_far):
        try:
            decoded = decode(data, encoding, LIMIT)
        except ValueError:
            continue
        assert len(decoded) <= LIMIT
