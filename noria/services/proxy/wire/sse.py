"""Server-sent events: a stream of bytes cut into events, and what an event says.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import re
from typing import Final

DONE: Final = b"[DONE]"
"""What the OpenAI APIs send in place of JSON when a stream is over."""

# Atomic groups: without them "\r\n" alone would match as two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r|$)")
_MARK = b"\xef\xbb\xbf"
"""A byte order mark, which a stream may begin with."""


class EventSplitter:
    r"""Cuts a stream of bytes, however it arrives, into whole events; concatenated they are the stream again.

    An event is given out with the blank line that ends it. Where that is `\r\n\r\n` and its last byte has not come
    yet, the byte follows as a piece of its own: nothing is held back that can already be read.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._after_return = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes. All calls together take time linear in the bytes fed."""
        events: list[bytes] = []
        if self._after_return and chunk:
            if chunk.startswith(b"\n"):
                events.append(b"\n")
                chunk = chunk[1:]
            self._after_return = False
        if self._rest:
            searched = max(0, len(self._rest) - 3)  # a blank line may be cut between two chunks
            self._rest += chunk
            end = _cut(self._rest, searched, events)
            del self._rest[:end]
        else:
            end = _cut(chunk, 0, events)
            self._rest += chunk[end:]
        if end and not self._rest:
            self._after_return = events[-1].endswith(b"\r")
        return events

    def rest(self) -> bytes:
        """What came after the last whole event."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


def _cut(data: bytes | bytearray, searched: int, events: list[bytes]) -> int:
    """Append the events that end after `searched`; returns where the last of them ends."""
    start = 0
    if data.find(b"\r", searched) < 0:  # plain "\n" as nearly every server sends it, found several times faster
        while (found := data.find(b"\n\n", max(start, searched))) >= 0:
            events.append(bytes(data[start : found + 2]))
            start = found + 2
        return start
    while match := _BLANK_LINE.search(data, max(start, searched)):
        events.append(bytes(data[start : match.end()]))
        start = match.end()
    return start


def read_event(event: bytes) -> tuple[bytes, bytes]:
    """The name (its last `event` line) and the payload (its `data` lines joined by newlines); empty where missing."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and event.endswith(b"\n\n") and b"\r" not in event:
        return b"", event[6:-2]
    name = b""
    data = []
    for match in _LINE.finditer(event.removeprefix(_MARK)):
        field, _, value = match[1].partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return name, b"\n".join(data)


def data_of(event: bytes) -> bytes:
    """The payload of an event; empty for a comment."""
    return read_event(event)[1]


def with_data(event: bytes, payload: bytes) -> bytes:
    """The event with another payload in place of its `data` lines; all its other bytes stay."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and event.endswith(b"\n\n") and b"\r" not in event:
        return b"data: " + payload + b"\n\n"
    out = []
    written = False
    mark = _MARK if event.startswith(_MARK) else b""
    for match in _LINE.finditer(event, len(mark)):
        field, _, value = match[1].partition(b":")
        if field != b"data":
            out.append(match[0])
        elif not written:
            written = True
            prefix = b"data: " if value.startswith(b" ") else b"data:"
            out += [prefix + line + (match[2] or b"\n") for line in payload.split(b"\n")]
    return mark + b"".join(out)
