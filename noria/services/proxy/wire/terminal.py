"""When a stream is over: a call is recorded before the bytes pass at which its client stops reading."""

import re

from noria.services.proxy.exchange import Kind

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_AT_BLANK_LINE = re.compile(_BLANK_LINE.pattern + rb"\Z")
_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]")
_LAST_EVENT = {
    Kind.RESPONSE: re.compile(rb"[\r\n]event: ?(?:response\.(?:completed|failed|incomplete)|error)(?=[\r\n])"),
    Kind.MESSAGE: re.compile(rb"[\r\n]event: ?(?:message_stop|error)(?=[\r\n])"),
}
_HINTS = {
    Kind.RESPONSE: (b"response.completed", b"response.failed", b"response.incomplete", b"error"),
    Kind.MESSAGE: (b"message_stop", b"error"),
}
_TAIL = 32
"""Longer than the longest line that is looked for, with the line end before and after it."""


class TerminalWatch:
    """Looks for the end of a stream in the chunks that go by, without holding or parsing them.

    Chat and text completions end with the line `data: [DONE]`. Responses and messages end with an event of a certain
    name; its data comes after the name, so they are over with the blank line that ends this event. Some servers end
    those with `[DONE]` as well, which then counts too.
    """

    __slots__ = ("_hints", "_in_last", "_last_event", "_over", "_tail")

    def __init__(self, kind: Kind) -> None:
        self._last_event = _LAST_EVENT.get(kind)
        self._hints = _HINTS.get(kind, ())
        self._tail = b"\n"  # the start of a stream is the start of a line
        self._in_last = False
        self._over = False

    def feed(self, chunk: bytes) -> bool:
        """Whether the stream is over with this chunk, or was before."""
        if self._over:
            return True
        data = self._tail + chunk
        if b"[DONE]" in data and _DONE.search(data):
            self._over = True
            return True
        start = 0
        if not self._in_last and self._last_event is not None and any(hint in data for hint in self._hints):
            found = self._last_event.search(data)
            if found:
                self._in_last = True
                start = found.end()
        if self._in_last:
            ended = _BLANK_LINE.search(data, start)
            self._over = ended is not None
            start = max(start, len(data) - 3)
            self._tail = data[start:]
        else:
            self._tail = data[-_TAIL:]
        return self._over

    @property
    def mid_event(self) -> bool:
        """Whether the last event that began has not ended yet, so that one more needs a blank line before it."""
        return self._tail != b"\n" and _AT_BLANK_LINE.search(self._tail) is None
