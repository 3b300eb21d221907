"""What every API's file offers: to fold a stream into the answer, to unfold an answer, and to say how it ended."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from noria.services.proxy.wire.json_text import to_text

Answer = dict[str, Any]


class Assembler(Protocol):
    """Folds the events of one stream into the object that an unstreamed call would have returned."""

    def add(self, name: str, chunk: dict[str, Any]) -> None:
        """Take the event `name` ("" where it has none) with its parsed data in.

        Raises `TypeError`, `ValueError`, `AttributeError` or `KeyError` for data in the wrong shape.
        """

    def answer(self) -> Answer:
        """The answer so far."""

    @property
    def error(self) -> str | None:
        """The type of the error that the upstream reported in mid-stream, None if it did not."""

    @property
    def ended(self) -> bool:
        """Whether the content says that it is whole, even if no terminal event came."""

    @property
    def over(self) -> bool:
        """Whether the terminal event came, after which a client stops reading."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    assembler        from the parsed request body to a new assembler of its answer; None where nothing is streamed
    unfold           the events that stream an answer, for a request body; None where nothing is streamed
    fault            why an answer with status 200 is not one to learn from, None if it is
    finish_reasons   why each choice ended, in order
    usage            the token counts as the upstream gave them
    """

    assembler: Callable[[Mapping[str, Any]], Assembler] | None
    unfold: Callable[[Answer, Mapping[str, Any]], Iterator[bytes]] | None
    fault: Callable[[Mapping[str, Any]], str | None]
    finish_reasons: Callable[[Mapping[str, Any]], tuple[str, ...]]
    usage: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]


def error_type_of(error: Any, otherwise: str) -> str:
    """The type of an error object, else its code, else `otherwise`; a code that is an HTTP status reads `http_…`."""
    if isinstance(error, Mapping):
        for key in ("type", "code"):
            said = error.get(key)
            if isinstance(said, str) and said and said != "error" and not said.isdigit():
                return said
            if str(said).isdigit():
                return f"http_{said}" if len(str(said)) == 3 else str(said)
    return otherwise


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {to_text(data)}\n\n".encode()
