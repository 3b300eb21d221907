"""One model call as it crossed the wire, its tokens, and what was said about it later."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

END2END = "end2end"
"""The node whose call holds the whole task's request and response."""


class CallStatus(StrEnum):
    """How a call ended. Only `OK` is ever trained on."""

    OK = "ok"
    """The upstream answered and the client received all of it."""
    UPSTREAM_ERROR = "upstream_error"
    """The upstream answered with an error, or died before its answer was whole."""
    CLIENT_DISCONNECT = "client_disconnect"
    """The client left before the answer was whole."""
    REFUSED = "refused"
    """The proxy refused the call before any upstream saw it."""


class Arm(StrEnum):
    """Which side of an experiment answered the call."""

    LIVE = "live"
    """The live release, or the default upstream where a target has none."""
    CANARY = "canary"
    """A release that is on trial with a share of the traffic."""
    ROLLOUT = "rollout"
    """A controlled rollout: never a user's traffic, never selected into a set."""


class ScoreSource(StrEnum):
    """Who said how good it was."""

    RULE = "rule"
    JUDGE = "judge"
    USER = "user"
    IMPLICIT = "implicit"
    BUSINESS = "business"


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Exact token ids of one call and the log-probabilities under the distribution that was sampled.

    `completion_token_ids` and `logprobs` have the same length; logprobs are natural logarithms, each <= 0.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One row of the online store. `id` is None until the store has minted it; `uid` makes a replayed write idempotent.

    `input` and `output` are the JSON texts of request and response as they crossed the wire; for a stream `output` is
    the assembled response object. Times are timezone-aware UTC; `duration_ms` is monotonic.
    """

    uid: str
    tenant: str
    app: str
    process_node: str
    trace_id: str
    model_name: str
    policy_version: str | None
    arm: Arm
    input: str
    output: str
    status: CallStatus
    request_time: datetime
    response_time: datetime
    duration_ms: float
    error_type: str | None = None
    finish_reasons: tuple[str, ...] = ()
    usage: Mapping[str, Any] | None = None
    agent_version: str | None = None
    subject: str | None = None
    consent: bool = True
    reward_score: float | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokens: CallTokens | None = None
    id: int | None = None

    @property
    def target(self) -> str:
        """`"{app}.{process_node}"`: what would be trained by this call."""
        return f"{self.app}.{self.process_node}"


@dataclass(frozen=True, slots=True)
class Score:
    """One statement about a trace or a call. Unique per (target_kind, target_id, name, scorer, scorer_version).

    `target_kind` is `"trace"` (target_id: the trace id) or `"call"` (target_id: the call's uid). `explanation` is free
    text or JSON; a rule reads its `reference` from it.
    """

    target_kind: str
    target_id: str
    name: str
    value: float
    source: ScoreSource
    scorer: str
    scorer_version: str
    at: datetime
    explanation: str | None = None
    id: int | None = None
