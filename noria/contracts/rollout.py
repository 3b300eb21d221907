"""The agent's rollout endpoint, and the directive that a rollout carries to the proxy."""

from dataclasses import dataclass

META_HEADER = "x-noria-meta"
"""The header in which an agent forwards `trainMeta` on each of its model calls."""

META_BAGGAGE = "noria.meta"
"""The W3C baggage key that may carry `trainMeta` instead."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Body of `POST /rollout`. Both strings are opaque to the rollout interface."""

    originRequest: str
    trainMeta: str


@dataclass(frozen=True, slots=True)
class RolloutResponse:
    """Answer of `POST /rollout`: what the agent would have sent to its user."""

    originResponse: str


@dataclass(frozen=True, slots=True)
class Directive:
    """What `trainMeta` says to the proxy: a controlled experiment on one trace.

    model        the policy version that answers the target node's calls (a round key)
    invariant    the origin trace whose recording answers every other node
    trace_id     the trace id under which the rollout's own calls are recorded
    round, sample_id, group, member   where the rollout belongs
    seed         seed of the target's sampled answers; call k of the rollout samples with seed + k
    temperature  temperature of the target's sampled answers; no top-p, no top-k
    """

    model: str
    invariant: str
    trace_id: str
    round: str
    sample_id: int
    group: int
    member: int
    seed: int
    temperature: float = 1.0
