"""How a stream of each API says that it failed: the event that an upstream that died could not send itself."""

from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire.json_text import to_text

_TYPE = "upstream_error"


def error_event(kind: Kind, message: str, code: str) -> bytes:
    """The event, blank line included, that the SDKs of this API raise as an error.

    Where the stream broke off inside an event (`TerminalWatch.mid_event`), a blank line has to go before it.
    """
    error = {"message": message, "type": _TYPE, "param": None, "code": code}
    if kind is Kind.MESSAGE:
        # https://platform.claude.com/docs/en/build-with-claude/streaming#error-events
        said = {"type": "error", "error": {"type": "api_error", "message": message, "code": code}}
        return b"event: error\ndata: " + to_text(said).encode() + b"\n\n"
    if kind is Kind.RESPONSE:
        # The fields of the API's own error event, and `error`, by which the SDKs raise instead of handing it over.
        flat = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0, "error": error}
        return b"event: error\ndata: " + to_text(flat).encode() + b"\n\n"
    return b"data: " + to_text({"error": error}).encode() + b"\n\n"
