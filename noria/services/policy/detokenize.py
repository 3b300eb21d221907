"""Text that grows token by token, handed out only as far as it can no longer change."""

from collections.abc import Callable

_REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""A UTF-8 character has at most four bytes, so at most three bytes of it can stand incomplete at the end."""


class TextStream:
    """Turns sampled tokens into text deltas and watches for stop strings.

    Characters whose bytes are still incomplete, and an ending that may yet become a stop string, are held back.
    `decode` maps token ids to text. Only the last few tokens are decoded each time, with their predecessors as context,
    as text-generation-inference and vLLM do.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self._start = 0  # where the decoded window begins
        self._read = 0  # up to where its tokens have become text
        self._sent = 0  # how many characters of the window have become text
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; returns the text that is now certain, and whether a stop string was reached (and cut off)."""
        self._ids.append(token)
        window = self._decode(self._ids[self._start :])
        certain = len(window)
        while certain > 0 and len(window) - certain < _LONGEST_TAIL and window[certain - 1] == _REPLACEMENT:
            certain -= 1
        new = window[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(window):
            self._start, self._read = self._read, len(self._ids)
            self._sent = len(self._decode(self._ids[self._start : self._read]))
        return self._release(new)

    def finish(self) -> tuple[str, bool]:
        """End without a stop string so far; returns what was held back, and whether a stop string stood in it."""
        text, stopped = self._release(self._decode(self._ids[self._start :])[self._sent :])
        if not stopped:
            text += self._held
        return text, stopped

    def _release(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
