"""From what goes by on the wire to the record of one call, and what of it the caller gets to see.

Wire names for tokens are vLLM's: `prompt_token_ids` at the top of a response or of a stream's first chunk,
`choices[i].token_ids`, `choices[i].logprobs.content[].logprob`. Where the proxy asked for them and the caller did not,
they are taken out of the answer; nothing else of it changes.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from uuid_utils import uuid7

from noria.contracts.call import Arm, Call, CallStatus, CallTokens
from noria.services.proxy.identity import Identity, attributes_of
from noria.services.proxy.sse import DONE, Assembler, EventSplitter, data_of, with_data

NOTHING = "null"
"""The `output` of a call that nothing came back for."""

_MISSING = object()


@dataclass(slots=True)
class Exchange:
    """One call in flight. `recorded` is false where its trace is not sampled; `sent` is what the proxy changed."""

    identity: Identity
    raw: str = NOTHING
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recorded: bool = True
    arm: Arm = Arm.LIVE
    policy_version: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    uid: str = field(default_factory=lambda: str(uuid7()))
    request_time: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: float = field(default_factory=time.perf_counter)
    capture: "StreamCapture | None" = None
    ended: bool = False
    """Whether its record has been made."""

    @property
    def model(self) -> str:
        """The model that the caller asked for."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    def call(
        self,
        status: CallStatus,
        output: str,
        *,
        error_type: str | None = None,
        completion: Mapping[str, Any] | None = None,
        tokens: CallTokens | None = None,
    ) -> Call:
        """The record of this call as it ended now."""
        identity = self.identity
        return Call(
            uid=self.uid,
            tenant=identity.tenant,
            app=identity.app,
            process_node=identity.node,
            trace_id=identity.trace_id,
            model_name=self.model,
            policy_version=self.policy_version,
            arm=self.arm,
            input=self.raw,
            output=output,
            status=status,
            request_time=self.request_time,
            response_time=datetime.now(UTC),
            duration_ms=(time.perf_counter() - self.started) * 1000,
            error_type=error_type,
            finish_reasons=finish_reasons(completion or {}),
            usage=usage_of(completion or {}, tokens),
            agent_version=identity.agent_version,
            subject=identity.subject,
            consent=identity.consent,
            attributes={**attributes_of(identity), **self.attributes},
            tokens=tokens,
        )

    def so_far(self, status: CallStatus, error_type: str | None) -> Call:
        """The record of a streamed call, or of one that nothing came back for, with what has arrived."""
        if self.capture is None:
            return self.call(status, NOTHING, error_type=error_type)
        completion = self.capture.completion()
        tokens = self.capture.tokens()
        return self.call(status, to_text(completion), error_type=error_type, completion=completion, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Wants:
    """Which of the token fields the caller asked for itself."""

    token_ids: bool
    logprobs: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Wants":
        """Read them from a request body."""
        return cls(bool(body.get("return_token_ids")), bool(body.get("logprobs")))


def strip(response: dict[str, Any], wants: Wants) -> bool:
    """Take the token fields that the caller did not ask for out of a response or chunk; whether there were any."""
    changed = False
    if not wants.token_ids:
        changed = response.pop("prompt_token_ids", _MISSING) is not _MISSING
    for choice in response.get("choices") or ():
        if not wants.token_ids:
            changed |= choice.pop("token_ids", _MISSING) is not _MISSING
        if not wants.logprobs:
            changed |= choice.pop("logprobs", _MISSING) is not _MISSING
    return changed


class TokenGatherer:
    """Collects the token fields of a response, or of a stream chunk by chunk, in the order in which they come."""

    def __init__(self) -> None:
        self._prompt: list[int] | None = None
        self._completion: list[int] | None = None
        self._logprobs: list[float] = []
        self._several = False

    def take(self, response: Mapping[str, Any]) -> None:
        """Read one response or chunk."""
        if response.get("prompt_token_ids") is not None:
            self._prompt = list(response["prompt_token_ids"])
        for choice in response.get("choices") or ():
            if choice.get("index", 0) != 0:
                self._several = True
                continue
            if choice.get("token_ids") is not None:
                self._completion = self._completion or []
                self._completion.extend(choice["token_ids"])
            for token in (choice.get("logprobs") or {}).get("content") or ():
                # The contract says <= 0; in float32 the logarithm of a certain token can come out just above.
                self._logprobs.append(min(float(token["logprob"]), 0.0))

    def tokens(self) -> CallTokens | None:
        """The tokens of a single-choice answer; None if any of them are missing."""
        if self._prompt is None or self._completion is None or self._several:
            return None
        if len(self._completion) != len(self._logprobs):
            return None
        return CallTokens(tuple(self._prompt), tuple(self._completion), tuple(self._logprobs))


def gather_tokens(completion: Mapping[str, Any]) -> CallTokens | None:
    """The tokens of an unstreamed response, None if they are missing or not in the shape of vLLM's."""
    gatherer = TokenGatherer()
    try:
        gatherer.take(completion)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None
    return gatherer.tokens()


class StreamCapture:
    """Reads a stream as it goes by: without `wants` every byte passes at once, unchanged; with it, event by event."""

    def __init__(self, wants: Wants | None) -> None:
        self._wants = wants
        self._events = EventSplitter()
        self._assembler = Assembler()
        self._gatherer = TokenGatherer()
        self.done = False
        """Whether `[DONE]` has been seen."""
        self._malformed = False

    def feed(self, chunk: bytes) -> bytes:
        """Take in what arrived; returns what goes to the client now."""
        events = [self._read(event) for event in self._events.feed(chunk)]
        return chunk if self._wants is None else b"".join(events)

    def end(self) -> bytes:
        """The stream has ended; returns what still goes to the client."""
        rest = self._events.rest()
        if not rest.strip():
            return b"" if self._wants is None else rest
        read = self._read(rest)  # an upstream may leave out the last blank line
        return b"" if self._wants is None else read

    @property
    def error_type(self) -> str | None:
        """What was wrong with the stream, None if it was whole."""
        error = self._assembler.error
        if error is not None:
            return str(error.get("type") or error.get("code") or "error_in_stream")
        if self._malformed:
            return "malformed_stream"
        return None if self.done or self._assembler.finished else "incomplete_stream"

    def completion(self) -> dict[str, Any]:
        """The response so far, as the caller saw it."""
        return self._assembler.completion()

    def tokens(self) -> CallTokens | None:
        """The tokens so far, None if the upstream sent none."""
        return self._gatherer.tokens()

    def _read(self, event: bytes) -> bytes:
        payload = data_of(event)
        if not payload:
            return event
        if payload.strip() == DONE:
            self.done = True
            return event
        try:
            chunk = json.loads(payload)
            self._gatherer.take(chunk)
            changed = self._wants is not None and strip(chunk, self._wants)
            self._assembler.add(chunk)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            self._malformed = True  # it is still the upstream's answer: it passes, and is not trained on
            return event
        return with_data(event, json.dumps(chunk, separators=(",", ":")).encode()) if changed else event


def to_text(value: Any) -> str:
    """Compact JSON text that every store can take; half a surrogate pair, which JSON allows, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def finish_reasons(completion: Mapping[str, Any]) -> tuple[str, ...]:
    """Why each choice ended, in the order of the choices."""
    choices = completion.get("choices") or ()
    return tuple(str(choice["finish_reason"]) for choice in choices if choice.get("finish_reason"))


def usage_of(completion: Mapping[str, Any], tokens: CallTokens | None) -> Mapping[str, Any] | None:
    """Token counts as the upstream said them, or counted where it sent the tokens alone."""
    usage = completion.get("usage")
    if isinstance(usage, dict):
        return usage
    if tokens is None:
        return None
    prompt, completed = len(tokens.prompt_token_ids), len(tokens.completion_token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}
