"""One model call as bytes on the wire: what the spool keeps, and what `wire.to_call` makes a `Call` of.

The process that serves calls copies bytes and reads no more of them than routing needs. Assembling streams, token
counts and finish reasons happens later, off the calls' path, from what is kept here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from noria.contracts.call import Arm


class Kind(StrEnum):
    """Which API a call speaks; the value is recorded as `Call.attributes["endpoint"]`."""

    CHAT = "chat.completions"
    COMPLETION = "completions"
    """The legacy text completions of OpenAI."""
    RESPONSE = "responses"
    EMBEDDING = "embeddings"
    MESSAGE = "messages"
    """Anthropic's messages."""


KINDS: Mapping[str, Kind] = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/completions": Kind.COMPLETION,
    "/v1/responses": Kind.RESPONSE,
    "/v1/embeddings": Kind.EMBEDDING,
    "/v1/messages": Kind.MESSAGE,
}
"""The paths whose calls are recorded. Every other path below `/v1/` passes through unrecorded."""


class Ending(StrEnum):
    """How an exchange ended on the wire; whether its content was whole is for `wire.to_call` to see."""

    WHOLE = "whole"
    """The answer ended as HTTP says it should, or a stream's last event has been seen."""
    CLIENT_LEFT = "client_left"
    UPSTREAM_DIED = "upstream_died"
    """In the middle of its answer."""
    NO_ANSWER = "no_answer"
    """No upstream gave an answer."""
    REFUSED = "refused"
    """The proxy refused the call before any upstream saw it; `response` is what it answered."""


@dataclass(frozen=True, slots=True)
class Wants:
    """The proxy asked the upstream for token ids and logprobs: which of them the caller had asked for itself."""

    token_ids: bool
    logprobs: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """The bytes of one call and what the proxy knows about them.

    request, response    the bodies as they crossed the wire between proxy and upstream, compressed where they were
    request_encoding, content_encoding    their HTTP `Content-Encoding`, "" for none
    content_type         of the response, "" where there is none
    http_status          of the response, None where no upstream answered
    error_type           what the proxy itself knows to be wrong: `upstream_timeout`, `client_left`, a refusal's code
    wants                None where the proxy did not ask for tokens itself
    request_time, response_time    aware UTC; duration_ms is monotonic
    first_byte_ms        from the caller's request to the first byte of the answer, None where there was none
    """

    uid: str
    kind: Kind
    ending: Ending
    tenant: str
    app: str
    process_node: str
    trace_id: str
    request_time: datetime
    response_time: datetime
    duration_ms: float
    request: bytes
    response: bytes = b""
    arm: Arm = Arm.LIVE
    policy_version: str | None = None
    http_status: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    request_encoding: str = ""
    error_type: str | None = None
    first_byte_ms: float | None = None
    wants: Wants | None = None
    agent_version: str | None = None
    subject: str | None = None
    consent: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
