"""What is good enough to ship: from paired scores to a verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from noria.config import GateConfig
from noria.contracts.errors import InvalidRecord
from noria.contracts.report import EvalReport, Guardrail, Interval, PairedScore, Verdict
from noria.release.statistics import fewest_differences, mean_interval, paired_difference
from noria.rollout.assemble import same_weights


def decide(
    pairs: Sequence[PairedScore],
    *,
    round: str,
    target: str,
    candidate: str,
    baseline: str,
    suite: str,
    suite_sha256: str,
    scorer: str,
    scorer_version: str,
    gate: GateConfig,
    guardrails: Sequence[Guardrail] = (),
    seed: int,
) -> EvalReport:
    """The gate's verdict on a candidate.

    pass          the interval of the paired difference lies above `gate.margin`, and no guardrail is broken
    fail          the interval lies below 0, or a guardrail is broken
    inconclusive  everything else: one and the same version, too few items that differ, or no clear evidence

    Raises `InvalidRecord` for no pairs, an item that stands twice, or a score that is not finite.
    """
    items = [pair.item for pair in pairs]
    if len(set(items)) != len(items):
        twice = next(item for item in items if items.count(item) > 1)
        raise InvalidRecord(f"item {twice!r} of suite {suite} is scored twice; each item counts once")
    settings: dict[str, Any] = {"confidence": gate.confidence, "resamples": gate.resamples, "seed": seed}
    candidate_scores = [pair.candidate for pair in pairs]
    baseline_scores = [pair.baseline for pair in pairs]
    difference = paired_difference(candidate_scores, baseline_scores, **settings)
    if same_weights(candidate, baseline):
        verdict, reason = Verdict.INCONCLUSIVE, f"{candidate} is what is live already, so there is nothing to compare."
    else:
        verdict, reason = _verdict(pairs, difference, gate, guardrails)
    return EvalReport(
        round=round,
        target=target,
        candidate=candidate,
        baseline=baseline,
        suite=suite,
        suite_sha256=suite_sha256,
        scorer=scorer,
        scorer_version=scorer_version,
        pairs=tuple(pairs),
        candidate_score=mean_interval(candidate_scores, **settings),
        baseline_score=mean_interval(baseline_scores, **settings),
        difference=difference,
        margin=gate.margin,
        guardrails=tuple(guardrails),
        verdict=verdict,
        reason=reason,
        seed=seed,
    )


def _verdict(
    pairs: Sequence[PairedScore], difference: Interval, gate: GateConfig, guardrails: Sequence[Guardrail]
) -> tuple[Verdict, str]:
    differing = sum(pair.candidate != pair.baseline for pair in pairs)
    broken = [guardrail for guardrail in guardrails if not guardrail.ok]
    numbers = (
        f"{difference.mean:+.3f} on {len(pairs)} items "
        f"({difference.confidence:.0%} interval {difference.low:+.3f} to {difference.high:+.3f})"
    )
    if broken:
        names = "; ".join(f"{guardrail.name}: {guardrail.explanation}" for guardrail in broken)
        return Verdict.FAIL, f"A guardrail is broken ({names}); the score differs by {numbers}."
    if differing < fewest_differences(gate.confidence):
        need = f"at {gate.confidence:.0%} confidence at least {fewest_differences(gate.confidence)} are needed"
        return Verdict.INCONCLUSIVE, f"Only {differing} items tell them apart: {numbers}; {need}."
    if difference.low > gate.margin:
        return Verdict.PASS, f"Better by {numbers}, above the margin of {gate.margin:g}."
    if difference.high < 0:
        return Verdict.FAIL, f"Worse by {numbers}, which lies below 0."
    return Verdict.INCONCLUSIVE, f"Not told apart: {numbers} does not lie above the margin of {gate.margin:g}."


def valid_share(pairs: Sequence[PairedScore], *, gate: GateConfig, seed: int) -> Guardrail:
    """Guardrail: answers that are worth anything (score above 0) must not become significantly fewer."""
    candidate = [float(pair.candidate > 0) for pair in pairs]
    baseline = [float(pair.baseline > 0) for pair in pairs]
    what = (
        f"{np.mean(candidate):.1%} of the candidate's answers score above 0, {np.mean(baseline):.1%} of the baseline's"
    )
    return _not_below("valid_share", candidate, baseline, 0.0, what, gate=gate, seed=seed)


def validation_not_worse(pairs: Sequence[PairedScore], *, gate: GateConfig, seed: int) -> Guardrail:
    """Guardrail: on the validation set the candidate must not fall by more than `gate.validation_tolerance`.

    Holds where the set is empty.
    """
    if not pairs:
        return Guardrail("validation", 0.0, -gate.validation_tolerance, True, "the round has no validation samples")
    candidate, baseline = [pair.candidate for pair in pairs], [pair.baseline for pair in pairs]
    what = f"{np.mean(candidate) - np.mean(baseline):+.3f} on {len(pairs)} validation samples"
    return _not_below("validation", candidate, baseline, -gate.validation_tolerance, what, gate=gate, seed=seed)


def _not_below(
    name: str,
    candidate: Sequence[float],
    baseline: Sequence[float],
    limit: float,
    what: str,
    *,
    gate: GateConfig,
    seed: int,
) -> Guardrail:
    """Broken when the whole interval of the paired difference lies below `limit`; its value is the upper end.

    A point estimate would fail good rounds by chance: on 30 samples its standard error is about 0.08. Fewer differing
    items than `fewest_differences` break nothing.
    """
    differing = sum(ours != theirs for ours, theirs in zip(candidate, baseline, strict=True))
    difference = paired_difference(candidate, baseline, confidence=gate.confidence, resamples=gate.resamples, seed=seed)
    return Guardrail(
        name=name,
        value=difference.high,
        limit=limit,
        ok=difference.high >= limit or differing < fewest_differences(gate.confidence),
        explanation=(
            f"{what}; the difference is at most {difference.high:+.3f} with {gate.confidence:.0%} confidence, "
            f"tolerated down to {limit:+.3f}"
        ),
    )


def report_to_json(report: EvalReport) -> str:
    """The report as indented JSON, lossless."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False)


def report_from_json(text: str) -> EvalReport:
    """Read what `report_to_json` wrote. Raises `InvalidRecord`."""
    try:
        tree = json.loads(text)
        return EvalReport(
            **{
                **tree,
                "pairs": tuple(PairedScore(**pair) for pair in tree["pairs"]),
                "guardrails": tuple(Guardrail(**guardrail) for guardrail in tree["guardrails"]),
                "candidate_score": Interval(**tree["candidate_score"]),
                "baseline_score": Interval(**tree["baseline_score"]),
                "difference": Interval(**tree["difference"]),
                "verdict": Verdict(tree["verdict"]),
            }
        )
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidRecord(f"this is no evaluation report: {error}: {text[:200]!r}") from error
