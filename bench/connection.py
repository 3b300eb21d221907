"""One HTTP/1.1 connection of a benchmark's client: as little work for each answer as measuring it allows."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d)")
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:\s*close", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response. `first_byte` and `seconds` count from the writing of the request, in seconds.

    `first_byte` is the first byte of the body: a head alone tells a caller nothing.
    """

    status: int
    head: bytes
    body: bytes
    first_byte: float
    seconds: float

    def header(self, name: str) -> str | None:
        """The value of one header."""
        found = re.search(rb"\r\n%b:\s*([^\r]*)" % re.escape(name.encode()), self.head + b"\r\n", re.IGNORECASE)
        return found[1].decode() if found else None


def post(url: str, body: bytes, headers: str = "") -> bytes:
    """The bytes of a POST; `headers` are whole lines, each with its CRLF."""
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Sends one request at a time; each ends in one call of `on_answer`, with None if the connection broke before."""

    def __init__(self, on_answer: Callable[[Answer | None], None]) -> None:
        self._on_answer = on_answer
        self._in = bytearray()
        self._asked = False
        self._forget()

    def _forget(self) -> None:
        self._body_at = 0
        self._end = 0
        self._chunked = False
        self._first_byte = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def send(self, request: bytes) -> None:
        """Begin one call."""
        self._asked = True
        self._sent_at = perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Collect the answer, and tell when it is whole."""
        received = self._in
        received += data
        if not self._body_at:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(received[:end])
            if head.startswith(b"HTTP/1.1 1"):  # an interim response; the real one follows
                del received[: end + 4]
                if received:
                    self.data_received(b"")
                return
            self._body_at = end + 4
            length = _LENGTH.search(head)
            self._chunked = length is None and _CHUNKED.search(head) is not None
            self._end = self._body_at + (int(length[1]) if length else 0)
        if not self._first_byte and len(received) > self._body_at:
            self._first_byte = perf_counter() - self._sent_at
        if not self._chunked:
            if len(received) >= self._end:
                self._tell(bytes(received[self._body_at : self._end]))
        elif received.endswith(_LAST_CHUNK):
            body = dechunked(received, self._body_at)
            if body is not None:
                self._tell(body)

    def _tell(self, body: bytes) -> None:
        seconds = perf_counter() - self._sent_at
        head = bytes(self._in[: self._body_at - 4])
        status = _STATUS.match(head)
        answer = Answer(int(status[1]) if status else 0, head, body, self._first_byte or seconds, seconds)
        self._in = bytearray()
        self._asked = False
        self._forget()
        if _CLOSE.search(head):
            self._transport.close()
        self._on_answer(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that the call in flight, if any, has no answer."""
        if self._asked:
            self._asked = False
            self._on_answer(None)

    @property
    def open(self) -> bool:
        """Whether another request can be sent."""
        return not self._transport.is_closing()

    def close(self) -> None:
        """Close at once; a call in flight is told as broken."""
        self._transport.abort()


def dechunked(data: bytes | bytearray, start: int = 0) -> bytes | None:
    """The body in `Transfer-Encoding: chunked` from `start` on, or None if it is not whole."""
    pieces: list[bytes] = []
    while True:
        line = data.find(b"\r\n", start)
        if line < 0:
            return None
        size = int(data[start:line].split(b";")[0], 16)
        start = line + 2
        if size == 0:
            return b"".join(pieces) if data.startswith(b"\r\n", start) else None
        if len(data) < start + size + 2:
            return None
        pieces.append(bytes(data[start : start + size]))
        start += size + 2


async def connect(url: str, on_answer: Callable[[Answer | None], None]) -> Connection:
    """Open a connection to the server of `url`. Raises `OSError`."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _transport, connection = await loop.create_connection(lambda: Connection(on_answer), parts.hostname, parts.port)
    return connection
