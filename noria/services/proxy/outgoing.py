"""The request body as it goes to an upstream: the caller's own bytes, unless the route changes something in it."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from noria.contracts.errors import InvalidRecord
from noria.services.proxy.exchange import Kind, Wants
from noria.services.proxy.pending import Pending
from noria.services.proxy.routing import Route
from noria.services.proxy.wire.decode import decode_body

_ANY_SIZE = 1 << 40
"""The body has been decoded within its limit before."""

_SPACE = re.compile(r"[ \t\r\n]*")
_value_at: Callable[[str, int], tuple[Any, int]] = cast(Any, json.JSONDecoder()).scan_once

_ASKS: dict[Kind, dict[str, Any]] = {
    Kind.CHAT: {"return_token_ids": True, "logprobs": True},
    Kind.COMPLETION: {"return_token_ids": True, "logprobs": 0},
}
"""How vLLM and the policy server are asked for token ids and the log-probability of each sampled token."""


def outgoing(pending: Pending, route: Route, wants: Wants | None) -> tuple[bytes, bool]:
    """The body, and whether it is another one than the caller's. Raises `InvalidRecord` if it cannot be edited."""
    changes: dict[str, Any] = dict(route.overrides)
    if route.model is not None:
        changes["model"] = route.model
    if wants is not None:
        asks = _ASKS[pending.kind]
        # A caller who asks for several alternatives a token gets them; the sampled one is always among them.
        changes |= {name: value for name, value in asks.items() if not (name == "logprobs" and wants.logprobs)}
    drop = route.drop & pending.body.keys()
    if not changes and not drop:
        return pending.raw, False
    try:
        return _edited(pending, changes, drop), True
    except RecursionError as error:
        raise InvalidRecord("the request body is nested too deeply to be edited; send it flatter") from error


def _edited(pending: Pending, changes: dict[str, Any], drop: frozenset[str]) -> bytes:
    """The object's text with members taken out and others put at its end; what stays is not written anew.

    A parser and writer of JSON would change what it does not know: the digits of a number, the order of the members.
    """
    text = decode_body(pending.raw, pending.request_encoding, _ANY_SIZE).decode()
    members = [member for name, member in _members(text) if name not in changes and name not in drop]
    members += [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in changes.items()]
    return f"{{{','.join(members)}}}".encode()


def _members(text: str) -> Iterator[tuple[str, str]]:
    """The members of a JSON object that is known to be whole: each name, and the text of name and value."""
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, end = _value_at(text, at)
        colon = _skip(text, end)
        _, end = _value_at(text, _skip(text, colon + 1))
        yield name, text[at:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
