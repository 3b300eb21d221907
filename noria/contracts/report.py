"""The evidence on which a release is decided."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the gate says about a candidate."""

    PASS = "pass"
    """Better than the baseline beyond the margin, and no guardrail broken: it is promoted."""
    FAIL = "fail"
    """Worse than the baseline, or a guardrail is broken."""
    INCONCLUSIVE = "inconclusive"
    """The evidence does not tell them apart: what is live stays, training goes on."""


@dataclass(frozen=True, slots=True)
class PairedScore:
    """Candidate and baseline on one item of a suite; scores in [0, 1], answers as text for reading."""

    item: str
    candidate: float
    baseline: float
    candidate_answer: str
    baseline_answer: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its two-sided confidence interval."""

    mean: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Guardrail:
    """One condition beside the goal that a candidate must not break."""

    name: str
    value: float
    limit: float
    ok: bool
    explanation: str


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Candidate against baseline on one suite, item by item, and the gate's verdict with its reason in one sentence."""

    round: str
    target: str
    candidate: str
    baseline: str
    suite: str
    suite_sha256: str
    scorer: str
    scorer_version: str
    pairs: tuple[PairedScore, ...]
    candidate_score: Interval
    baseline_score: Interval
    difference: Interval
    margin: float
    guardrails: tuple[Guardrail, ...]
    verdict: Verdict
    reason: str
    seed: int
