"""Which weights serve a target, and how they came to."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class ReleaseState(StrEnum):
    """Where a version stands on the serving chain."""

    CANDIDATE = "candidate"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True)
class Release:
    """One version of one target. At most one version of a target is live at any time.

    version      the round key whose checkpoint it is
    checkpoint   path of the weights, relative to the artifact root
    parent       the version that was live before it
    weight       share of the target's traffic, 0 to 1
    """

    target: str
    version: str
    checkpoint: str
    parent: str | None
    state: ReleaseState
    weight: float


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """One transition, append-only: who or what made it, and why."""

    target: str
    version: str
    from_state: ReleaseState | None
    to_state: ReleaseState
    weight: float
    by: str
    why: str
    report_sha256: str | None
    at: datetime
    id: int | None = None
