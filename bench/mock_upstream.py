"""The upstream of the benchmarks, a process of its own: `python -m bench.mock_upstream --port 9000`.

It answers `POST …` by the `model` of the body with the prepared bytes of `bench.calls`, each event of a stream in a
write of its own with a pause after the first, and counts the calls; `GET /calls` tells the counts as JSON. It
understands of HTTP/1.1 what clients of a benchmark use: keep-alive, Content-Length, chunked bodies. One event loop, one
core, no parsing of JSON: it must be much faster than what is measured in front of it.
"""

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import cast

import uvloop

from bench.calls import ECHO, JSON, KINDS, SSE, completion, echo_stream

_MODEL = re.compile(rb'"model":\s*"([a-z_]+)"')
_MARKER = re.compile(rb"marker-[0-9a-z-]+")
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_ENDS = 4096
"""The model's name stands at one end of a body that is long for its messages."""
_PAUSE_SECONDS = 0.002
"""After the first event of a stream. Without it the writes to come keep the core, which the reader shares, and the
reader would see the first event when the last is written: its time to first byte would be that of the whole."""


def whole(body: bytes, content_type: str = JSON, status: str = "200 OK") -> bytes:
    """An HTTP response with its body."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(pieces: Sequence[bytes]) -> list[bytes]:
    """An HTTP response as an event stream, in the writes that it is made of: one a piece, the head with the first."""
    writes = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    writes[0] = f"HTTP/1.1 200 OK\r\nContent-Type: {SSE}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + writes[0]
    writes[-1] += b"0\r\n\r\n"
    return writes


_PREPARED = {
    name.encode(): chunked(kind.pieces) if kind.streamed else [whole(kind.answer)] for name, kind in KINDS.items()
}
_UNKNOWN = [whole(b'{"error":{"message":"the mock upstream knows no such model"}}', status="404 Not Found")]


def _echo(model: bytes, marker: str) -> list[bytes]:
    if model == ECHO.encode():
        return [whole(completion(ECHO, marker))]
    return chunked(echo_stream(marker))


class Upstream(asyncio.Protocol):
    """One connection."""

    def __init__(self, counts: Counter[bytes]) -> None:
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._in = bytearray()
        self._needed = 0
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Answer when a request is whole; clients do not pipeline."""
        self._in += data
        if len(self._in) < self._needed:
            return
        end = self._in.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._in[:end])
        length = _LENGTH.search(head)
        if length:
            self._needed = end + 4 + int(length[1])
            if len(self._in) < self._needed:
                return
        elif _CHUNKED.search(head) and not self._in.endswith(b"0\r\n\r\n"):
            return
        body = self._in[end + 4 :]
        self._in = bytearray()
        self._needed = 0
        if head.startswith(b"POST"):
            self._answer(body)
        else:
            counts = {name.decode(): count for name, count in self._counts.items()}
            self._transport.write(whole(json.dumps(counts).encode()))

    def _answer(self, body: bytearray) -> None:
        found = _MODEL.search(body, 0, _ENDS) or _MODEL.search(body, max(0, len(body) - _ENDS))
        model = found[1] if found else b""
        self._counts[model] += 1
        writes = _PREPARED.get(model)
        if writes is None:
            marker = _MARKER.search(body)
            writes = _echo(model, marker[0].decode()) if marker else _UNKNOWN
        if len(writes) == 1:
            self._transport.write(writes[0])
        else:
            self._out = writes[:0:-1]
            self._transport.write(writes[0])
            self._loop.call_later(_PAUSE_SECONDS, self._write_next)

    def _write_next(self) -> None:
        # One write a turn of the loop: written at once, the events would reach the reader as one.
        if self._transport.is_closing():
            return
        self._transport.write(self._out.pop())
        if self._out:
            self._loop.call_soon(self._write_next)


async def serve(port: int) -> None:
    """Listen on loopback until the process is ended."""
    counts: Counter[bytes] = Counter()
    server = await asyncio.get_running_loop().create_server(lambda: Upstream(counts), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
