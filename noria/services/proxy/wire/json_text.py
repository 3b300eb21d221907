"""JSON as it may come from anywhere: read strictly and never too deep, written so that every store can take it."""

import json
from typing import Any, NoReturn

import orjson

MAX_DEPTH = 254
"""Arrays and objects within each other. Deeper text stays text, so that no later reader runs out of stack."""

_FEW = 250
_DIGITS = bytes(ord("0") if chr(byte).isdigit() else ord(" ") for byte in range(128)) + b" " * 128
_LONG_NUMBER = b"0" * 19
_MAX_NAME = 200


def parse(text: bytes) -> Any:
    """The value of one JSON text in UTF-8, every number exact as Python has it.

    Raises `ValueError` for what is no JSON (NaN, Infinity and numbers that would become them included), for what is
    deeper than `MAX_DEPTH`, and for integers of more digits than Python converts.
    """
    if has_long_number(text):
        return parse_exact(text)
    try:
        value = orjson.loads(text)
    except ValueError:
        return parse_exact(text)  # orjson refuses half a surrogate pair, which JSON allows
    if text.count(b"[") + text.count(b"{") > _FEW:
        try:
            orjson.dumps(value)  # its own limit is MAX_DEPTH, and nothing else of what it has read can fail
        except TypeError as error:
            raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels") from error
    return value


def parse_exact(text: bytes) -> Any:
    """As `parse`, several times slower, for texts with integers that do not fit into 64 bits."""
    try:
        value = json.loads(text.decode(), parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels") from error
    _check_depth(value)
    return value


def has_long_number(text: bytes) -> bool:
    """Whether `text` may hold an integer that orjson would round to a double."""
    return _LONG_NUMBER in text.translate(_DIGITS)


def to_text(value: Any) -> str:
    """Compact JSON text that every store can take; half a surrogate pair, which JSON allows, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def plain(text: str) -> str:
    """A short text for a column of its own: without NUL and lone surrogates, which PostgreSQL refuses."""
    return text[:_MAX_NAME].replace("\x00", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is over the range of a double")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]
        if not level:
            return
    raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels")


def _parts(whole: dict[str, Any] | list[Any]) -> list[Any]:
    return list(whole.values()) if isinstance(whole, dict) else whole
