"""Token ids and logprobs in an answer: which the caller wants, taking out the others, gathering them for the record.

Wire names are vLLM's: `prompt_token_ids` at the top of a response or of a stream's first chunk (in a text completion
also in the choice), `choices[i].token_ids`, `choices[i].logprobs`. They are cut out of the JSON text where they stand;
not a byte of anything else changes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from noria.contracts.call import CallTokens
from noria.services.proxy.exchange import Wants
from noria.services.proxy.wire.sse import EventSplitter, data_of, with_data

_SPACE = re.compile(r"[ \t\r\n]*")
_COLON = re.compile(r"[ \t\r\n]*:[ \t\r\n]*")
_COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
_IDS = ("prompt_token_ids", "token_ids")
_value_at: Callable[[str, int], tuple[Any, int]] = cast(Any, json.JSONDecoder()).scan_once
"""The value that begins at a place and where it ends, in C; raises StopIteration where none begins."""


def wants_of(body: Mapping[str, Any]) -> Wants:
    """Which of the token fields a request asks for itself."""
    logprobs = body.get("logprobs")  # a text completion asks by a number, and 0 asks too
    return Wants(bool(body.get("return_token_ids")), logprobs is not None and logprobs is not False)


def strip_body(body: bytes, wants: Wants) -> bytes:
    """A response or chunk without the token fields that were not asked for; what cannot be read stays as it is."""
    names = () if wants.token_ids else _IDS
    names = names if wants.logprobs else (*names, "logprobs")
    if not any(b'"' + name.encode() + b'"' in body for name in names):
        return body
    try:
        text = body.decode()
        cuts = _places(text, names)
    except (ValueError, IndexError, StopIteration, RecursionError):
        return body
    if not cuts:
        return body
    kept = []
    start = 0
    for begin, end in cuts:
        kept.append(text[start:begin])
        start = end
    return "".join([*kept, text[start:]]).encode()


class EventStripper:
    """Takes token fields out of a stream, event by event; events without them pass untouched."""

    def __init__(self, wants: Wants) -> None:
        self._wants = wants
        self._events = EventSplitter()

    def feed(self, chunk: bytes) -> bytes:
        """Take in what arrived; returns what goes to the client now: all whole events."""
        return b"".join([self._strip(event) for event in self._events.feed(chunk)])

    def end(self) -> bytes:
        """The stream has ended; returns what still goes to the client: a last event may lack its blank line."""
        return self._strip(self._events.rest())

    def _strip(self, event: bytes) -> bytes:
        payload = data_of(event)
        stripped = strip_body(payload, self._wants)
        return event if stripped is payload else with_data(event, stripped)


class TokenGatherer:
    """Collects the token fields of a response, or of a stream chunk by chunk, in the order in which they come."""

    def __init__(self) -> None:
        self._prompt: list[int] | None = None
        self._completion: list[int] | None = None
        self._logprobs: list[float] = []
        self._unusable = False

    def take(self, response: Mapping[str, Any]) -> None:
        """Read one response or chunk; fields in another shape than vLLM's make the tokens of the call unusable."""
        if self._unusable:
            return
        try:
            self._take(response)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
            self._unusable = True

    def tokens(self) -> CallTokens | None:
        """The tokens of a single-choice answer; None if any of them are missing."""
        if self._prompt is None or self._completion is None or self._unusable:
            return None
        if len(self._completion) != len(self._logprobs):
            return None
        return CallTokens(tuple(self._prompt), tuple(self._completion), tuple(self._logprobs))

    def _take(self, response: Mapping[str, Any]) -> None:
        if response.get("prompt_token_ids") is not None:
            self._prompt = _ids(response["prompt_token_ids"])
        for choice in response.get("choices") or ():
            if choice.get("index", 0) != 0:
                self._unusable = True
                return
            if choice.get("prompt_token_ids") is not None:
                self._prompt = _ids(choice["prompt_token_ids"])
            if choice.get("token_ids") is not None:
                self._completion = self._completion or []
                self._completion.extend(_ids(choice["token_ids"]))
            self._logprobs.extend(_logprobs(choice.get("logprobs") or {}))


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError("token ids are lists of small integers")
    return value


def _logprobs(logprobs: Mapping[str, Any]) -> Iterator[float]:
    """Of a chat completion (`content[].logprob`) or of a text completion (`token_logprobs`)."""
    chat = (token["logprob"] for token in logprobs.get("content") or ())
    for value in (*chat, *(logprobs.get("token_logprobs") or ())):
        # The contract says <= 0; in float32 the logarithm of a certain token can come out just above.
        yield min(float(value), 0.0)


def _places(text: str, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Where the named fields stand in a response object, at its top and in its choices, each with a comma."""
    cuts: list[tuple[int, int]] = []
    start = _after(_SPACE, text, 0)
    if text[start] != "{":
        return cuts
    end = _object(text, start, frozenset(names) & {"prompt_token_ids"}, frozenset(names), cuts)
    if _after(_SPACE, text, end) != len(text):
        raise ValueError("more than one JSON text")
    return sorted(cuts)


def _object(
    text: str, start: int, names: frozenset[str], in_choices: frozenset[str], cuts: list[tuple[int, int]]
) -> int:
    """Append the cuts that take `names` out of the object at `start`, `in_choices` out of its choices; its end."""
    members: list[tuple[int, int, bool]] = []
    at = _after(_SPACE, text, start + 1)
    more = text[at] != "}"
    while more:
        begin = at
        if text[at] != '"':
            raise ValueError(f"no field name at {at}")
        name, at = _value_at(text, at)
        at = _after(_COLON, text, at)
        if name == "choices" and in_choices and text[at] == "[":
            end = _choices(text, at, in_choices, cuts)
        else:
            _, end = _value_at(text, at)
        members.append((begin, end, name in names))
        more, at = _next(text, end, "}")
    kept = [place for place, member in enumerate(members) if not member[2]]
    last_kept = kept[-1] if kept else -1
    cuts += [(begin, members[place + 1][0]) for place, (begin, _, drop) in enumerate(members[:last_kept]) if drop]
    if last_kept + 1 < len(members):
        cuts.append((members[last_kept][1] if kept else members[0][0], members[-1][1]))
    return at if members else at + 1


def _choices(text: str, start: int, names: frozenset[str], cuts: list[tuple[int, int]]) -> int:
    at = _after(_SPACE, text, start + 1)
    if text[at] == "]":
        return at + 1
    more = True
    while more:
        if text[at] == "{":
            end = _object(text, at, names, frozenset(), cuts)
        else:
            _, end = _value_at(text, at)
        more, at = _next(text, end, "]")
    return at


def _next(text: str, at: int, close: str) -> tuple[bool, int]:
    """After a value: whether another follows, and where it begins, else where the object or array ends."""
    match = _COMMA.match(text, at)
    if match:
        return True, match.end()
    at = _after(_SPACE, text, at)
    if text[at] != close:
        raise ValueError(f"neither a comma nor {close!r} at {at}")
    return False, at + 1


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    if match is None:
        raise ValueError(f"no JSON at {at}")
    return match.end()
