"""Content codings of HTTP (RFC 9110, 8.4.1) undone, with a bound on what comes out."""

import zlib
from collections.abc import Callable

import brotli
import zstandard

_STEP = 1 << 20
_SLICE = 1 << 10
"""Decoders take this much at a time: what one call of zstd can make of it is bounded (256 blocks of 128 KiB), and what
a decoder hands back behind the end of a part is short, so that many parts take linear time."""
_WINDOW = 1 << 27
_MAX_CODINGS = 4
_MAX_PARTS = 10_000
"""Members of gzip or frames of zstd in one body; each costs far more to begin than its bytes."""


class DecodedTooLarge(ValueError):
    """The decoded body is larger than the limit: a bomb, or a limit that is too low."""


def decode_body(data: bytes, encoding: str, limit: int) -> bytes:
    """The body without its content codings: gzip, x-gzip, deflate, br, zstd, identity, and lists of them.

    Raises `DecodedTooLarge` as soon as more than `limit` bytes come out of any coding, `ValueError` for an unknown
    coding, for bytes that are not in it, and for a body that is cut off.
    """
    return _decode(data, encoding, limit, whole=True)


def decode_so_far(data: bytes, encoding: str, limit: int) -> bytes:
    """As `decode_body`, for a body that may be cut off: what its beginning says."""
    return _decode(data, encoding, limit, whole=False)


def _decode(data: bytes, encoding: str, limit: int, *, whole: bool) -> bytes:
    names = [name.strip().lower() for name in encoding.split(",")]
    names = [name for name in names if name and name != "identity"]
    if len(names) > _MAX_CODINGS:
        raise ValueError(f"{len(names)} content codings; at most {_MAX_CODINGS} are undone")
    for name in reversed(names):
        coding = _CODINGS.get(name)
        if coding is None:
            known = ", ".join(sorted(_CODINGS))
            raise ValueError(f"content coding {name[:40]!r} is not known; known are {known}")
        if not data:
            return data
        try:
            data, ended = coding(data, limit)
        except (zlib.error, brotli.error, zstandard.ZstdError) as error:
            raise ValueError(f"the body is not {name}, as its Content-Encoding says: {error}") from error
        if whole and not ended:
            raise ValueError(f"the body ends in the middle of its {name} coding")
    return data


def _inflate(data: bytes, limit: int, window: int) -> tuple[bytes, bool]:
    """One deflate stream; of gzip several, one after the other."""
    out = bytearray()
    rest = memoryview(data)
    for _ in range(_MAX_PARTS):
        decoder = zlib.decompressobj(window)
        while rest and not decoder.eof:
            given: bytes | memoryview = rest[:_SLICE]
            rest = rest[_SLICE:]
            while given:
                out += _bounded(decoder.decompress(given, _STEP), len(out), limit)
                given = decoder.unconsumed_tail
        if not decoder.eof:
            out += _bounded(decoder.flush(), len(out), limit)  # what a full step has left inside
        rest = memoryview(data)[len(data) - len(rest) - len(decoder.unused_data) :]
        if window != _GZIP or bytes(rest[:2]) != b"\x1f\x8b":
            return bytes(out), decoder.eof
    raise ValueError(f"the body has over {_MAX_PARTS} gzip members")


def _gzip(data: bytes, limit: int) -> tuple[bytes, bool]:
    return _inflate(data, limit, _GZIP)


def _deflate(data: bytes, limit: int) -> tuple[bytes, bool]:
    """With a zlib header as the standard says, or without as some servers send it."""
    try:
        return _inflate(data, limit, zlib.MAX_WBITS)
    except zlib.error:
        return _inflate(data, limit, -zlib.MAX_WBITS)


def _br(data: bytes, limit: int) -> tuple[bytes, bool]:
    decoder = brotli.Decompressor()
    out = bytearray()
    given = data
    while True:
        piece = decoder.process(given, output_buffer_limit=_STEP)
        out += _bounded(piece, len(out), limit)
        given = b""
        if decoder.is_finished() or (not piece and decoder.can_accept_more_data()):
            return bytes(out), decoder.is_finished()


def _zstd(data: bytes, limit: int) -> tuple[bytes, bool]:
    """One or more frames."""
    out = bytearray()
    rest = memoryview(data)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    for _ in range(_MAX_PARTS):
        frame = decompressor.decompressobj()
        while rest and not frame.eof:
            out += _bounded(frame.decompress(rest[:_SLICE]), len(out), limit)
            rest = rest[_SLICE:]
        rest = memoryview(data)[len(data) - len(rest) - len(frame.unused_data) :]
        if not rest:
            return bytes(out), frame.eof
    raise ValueError(f"the body has over {_MAX_PARTS} zstd frames")


def _bounded(piece: bytes, so_far: int, limit: int) -> bytes:
    if so_far + len(piece) > limit:
        raise DecodedTooLarge(f"the body is over {limit} bytes when it is decoded")
    return piece


_GZIP = zlib.MAX_WBITS | 16
_CODINGS: dict[str, Callable[[bytes, int], tuple[bytes, bool]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _br,
    "zstd": _zstd,
}
