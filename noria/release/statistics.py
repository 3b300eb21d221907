"""Intervals for the gate: how sure the evidence makes us.

Scores of two versions on the same items are paired, and the interval is that of the mean difference, so that what makes
an item hard for both does not widen it. Intervals come from the bootstrap (BCa, Efron 1987), shares of right answers
from Wilson's score interval (Wilson 1927).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria.contracts.errors import InvalidRecord
from noria.contracts.report import Interval

RIGHT = 1.0
"""The score from which an answer counts as right."""

_BATCH_NUMBERS = 4_000_000
"""Numbers held in memory by one batch of resamples (32 MB)."""


def paired_difference(
    candidate: Sequence[float], baseline: Sequence[float], *, confidence: float, resamples: int, seed: int
) -> Interval:
    """Mean of candidate minus baseline over the same items, with its bootstrap interval.

    Raises `InvalidRecord` for different lengths, no items, or a score that is not finite.
    """
    if len(candidate) != len(baseline):
        raise InvalidRecord(
            f"{len(candidate)} candidate scores for {len(baseline)} baseline scores; they must be paired"
        )
    differences = _finite(candidate, "candidate") - _finite(baseline, "baseline")
    return _bootstrap_mean(differences, confidence, resamples, seed)


def mean_interval(scores: Sequence[float], *, confidence: float, resamples: int, seed: int) -> Interval:
    """Mean score with its bootstrap interval. Raises `InvalidRecord` for no items or a score that is not finite."""
    return _bootstrap_mean(_finite(scores, "score"), confidence, resamples, seed)


def accuracy_interval(scores: Sequence[float], *, confidence: float) -> Interval:
    """Share of right answers (score of at least `RIGHT`) with Wilson's interval, which holds near 0 and 1 too.

    Raises `InvalidRecord` for no items or a score that is not finite.
    """
    from scipy.stats import norm

    right = _finite(scores, "score") >= RIGHT
    n, share = len(right), float(right.mean())
    z = float(norm.ppf(0.5 + confidence / 2))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), confidence)


def fewest_differences(confidence: float) -> int:
    """On how many items two versions must differ before any outcome could be significant.

    With fewer, even differences of one sign come about by chance more often than 1 - confidence (sign test, two-sided).
    The bootstrap is too sure of itself there: with 3 to 5 differing items of equal chance it calls a candidate better
    in 5 % of the cases where it should in 2.5 %.
    """
    return 1 + math.ceil(-math.log2(1 - confidence) - 1e-9)


def _finite(scores: Sequence[float], what: str) -> npt.NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise InvalidRecord(f"there is no {what} to take a mean of; the suite has no items")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise InvalidRecord(f"{what} {int(bad[0])} is {values[bad[0]]}; a score must be a finite number")
    return values


def _bootstrap_mean(values: npt.NDArray[np.float64], confidence: float, resamples: int, seed: int) -> Interval:
    mean = float(values.mean())
    if np.ptp(values) == 0.0:  # every resample is the same
        return Interval(float(values[0]), float(values[0]), float(values[0]), confidence)
    # Loading scipy.stats takes most of a second, which every process that only imports the gate would pay.
    from scipy.stats import bootstrap

    low = high = math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        for method in ("BCa", "percentile"):
            if method == "BCa" and not _bca_is_defined(values):
                continue
            result = bootstrap(
                (values,),
                np.mean,
                n_resamples=resamples,
                batch=max(1, _BATCH_NUMBERS // len(values)),
                confidence_level=confidence,
                method=method,
                rng=np.random.default_rng(seed),
            )
            low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
            if math.isfinite(low) and math.isfinite(high):
                break
    return Interval(mean, min(low, mean), max(high, mean), confidence)


def _bca_is_defined(values: npt.NDArray[np.float64]) -> bool:
    """BCa divides by the cubed spread of the jackknife means, which underflows for differences near rounding."""
    return float(np.ptp(values)) > 1e-9 * max(1.0, float(np.abs(values).max()))
