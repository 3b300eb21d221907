"""Station 7: the evidence, item by item, and the gate's verdict."""

import time
from collections.abc import Sequence

import dagster as dg

from assets.partitions import round_of, rounds
from assets.pictures import picture, table
from assets.sets import set_path
from noria.contracts.errors import IntegrityError, NotFound
from noria.contracts.evaluation import EvaluationRequest, EvaluationResult
from noria.contracts.report import EvalReport, Guardrail
from noria.contracts.round import Round
from noria.loading import load_function
from noria.release.chain import REPORT, read_plan
from noria.release.gate import decide, report_from_json, report_to_json, valid_share, validation_not_worse
from noria.release.report_page import interval_png, report_html
from noria.release.suite import Suite, freeze, load_suite
from noria.stores.artifacts import Artifacts
from noria.stores.origins import look_up_origins
from resources.judge import Judge
from resources.policy import Policy
from resources.registry import Releases
from resources.stores import Stores


def report_path(artifacts: Artifacts, round_: Round) -> str:
    """Where the round's report stands."""
    return f"{artifacts.round_dir(round_.key)}/{REPORT}"


def page_path(artifacts: Artifacts, round_: Round) -> str:
    """Where the report stands as a page for people."""
    return f"{artifacts.round_dir(round_.key)}/report.html"


def load_report(artifacts: Artifacts, round_: Round) -> EvalReport:
    """The report of a finished station."""
    return report_from_json(artifacts.read_bytes(report_path(artifacts, round_)).decode())


def goal_suite(stores: Stores, target: str) -> Suite:
    """The target's held-out suite, frozen at its first use."""
    config = stores.settings.config
    items = load_function(config.target(target).suite, config.root).function()
    return freeze(items, stores.artifacts, target)


def validation_suite(stores: Stores, round_: Round) -> Suite | None:
    """The round's validation set as a suite; None when the set is empty."""
    rows = stores.artifacts.read_parquet(set_path(stores.artifacts, round_, "val")).to_pylist()
    origins = look_up_origins(stores.online, [row["id"] for row in rows])
    items = [
        {"item": str(row["id"]), "input": row["input"], "reference": origin.reference}
        for row, origin in zip(rows, origins, strict=True)
    ]
    return freeze(items, stores.artifacts, str(round_.target)) if items else None


@dg.asset(
    deps=["checkpoint", "val_set"],
    partitions_def=rounds,
    group_name="release",
    kinds={"json"},
    description=(
        "**Is it better than what your users have now?** The judge asks candidate and live version the same held-out "
        "questions. The gate looks at the paired differences: it passes only when their confidence interval lies above "
        "the margin and no guardrail is broken."
    ),
)
def eval_report(
    context: dg.AssetExecutionContext, stores: Stores, judge: Judge, releases: Releases, policy: Policy
) -> dg.MaterializeResult:
    """Score both versions on the goal suite and the round's validation set, and decide."""
    round_ = round_of(context)
    artifacts = stores.artifacts
    started, busy_before = time.monotonic(), policy.busy_seconds()
    reused = artifacts.exists(report_path(artifacts, round_))
    if not reused:
        report = _evaluate(stores, judge, releases, round_)
        artifacts.write_bytes(page_path(artifacts, round_), report_html(report).encode())
        artifacts.write_bytes(report_path(artifacts, round_), report_to_json(report).encode())
    report = load_report(artifacts, round_)
    return dg.MaterializeResult(
        metadata={
            "verdict": report.verdict.value,
            "reason": report.reason,
            "score": report.candidate_score.mean,
            "live_score": report.baseline_score.mean,
            "accuracy": fully_right([pair.candidate for pair in report.pairs]),
            "live_accuracy": fully_right([pair.baseline for pair in report.pairs]),
            "difference": report.difference.mean,
            "difference_low": report.difference.low,
            "difference_high": report.difference.high,
            "interval": picture(interval_png(report), "paired difference with its interval"),
            "guardrails": table([_guardrail_row(guardrail) for guardrail in report.guardrails]),
            "flipped": table(_flipped(report), limit=8),
            "candidate": report.candidate,
            "baseline": report.baseline,
            "suite": f"{report.suite} ({len(report.pairs)} items, sha256 {report.suite_sha256[:12]})",
            "page": dg.MetadataValue.url(artifacts.url(page_path(artifacts, round_))),
            "seconds": time.monotonic() - started,
            "model_seconds": policy.busy_seconds() - busy_before,
            "already_there": reused,
        }
    )


def _evaluate(stores: Stores, judge: Judge, releases: Releases, round_: Round) -> EvalReport:
    config = stores.settings.config
    target = str(round_.target)
    gate = config.target(target).gate
    live = releases.registry.current(target)
    baseline = live.version if live else Round(round_.target, 0).key
    seed = read_plan(stores.artifacts, round_).seed

    def score(suite: Suite) -> EvaluationResult:
        return judge.evaluate(
            EvaluationRequest(target=target, candidate=round_.key, baseline=baseline, suite=suite.path, seed=seed)
        )

    suite = goal_suite(stores, target)
    goal = score(suite)
    guardrails: list[Guardrail] = [valid_share(goal.pairs, gate=gate, seed=seed)]
    validation = validation_suite(stores, round_)
    if validation is not None:
        result = score(validation)
        guardrails.append(validation_not_worse(result.pairs, gate=gate, seed=seed))
    return decide(
        goal.pairs,
        round=round_.key,
        target=target,
        candidate=round_.key,
        baseline=baseline,
        suite=suite.path,
        suite_sha256=suite.sha256,
        scorer=goal.scorer,
        scorer_version=goal.scorer_version,
        gate=gate,
        guardrails=guardrails,
        seed=seed,
    )


def fully_right(scores: Sequence[float]) -> float:
    """Share of the items with the full score of 1."""
    return sum(score >= 1.0 for score in scores) / len(scores)


def _guardrail_row(guardrail: Guardrail) -> dict[str, object]:
    return {
        "guardrail": guardrail.name,
        "ok": guardrail.ok,
        "value": guardrail.value,
        "limit": guardrail.limit,
        "meaning": guardrail.explanation,
    }


def _flipped(report: EvalReport) -> Sequence[dict[str, object]]:
    """The items on which candidate and baseline differ most, losses first."""
    flipped = sorted(
        (pair for pair in report.pairs if pair.candidate != pair.baseline),
        key=lambda pair: pair.candidate - pair.baseline,
    )
    return [
        {
            "item": pair.item,
            "difference": pair.candidate - pair.baseline,
            "candidate": pair.candidate_answer,
            "live": pair.baseline_answer,
        }
        for pair in flipped
    ]


@dg.asset_check(asset=eval_report, blocking=True, description="The report is whole and its suite is the frozen one.")
def eval_report_is_whole(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """Every item of the suite was scored for both, and the suite is what its hash says."""
    return report_result(stores.artifacts, load_report(stores.artifacts, round_of(context)))


def report_result(artifacts: Artifacts, report: EvalReport) -> dg.AssetCheckResult:
    """Failed when items are missing, or the suite is not the frozen one that the report names."""
    try:
        suite = load_suite(artifacts, report.suite)
    except (IntegrityError, NotFound) as error:
        return dg.AssetCheckResult(passed=False, description=str(error))
    scored = {pair.item for pair in report.pairs}
    missing = [item.item for item in suite.items if item.item not in scored]
    passed = suite.sha256 == report.suite_sha256 and not missing
    return dg.AssetCheckResult(
        passed=passed,
        description=(
            f"{len(suite.items)} of {len(suite.items)} items scored"
            if passed
            else f"{len(missing)} of {len(suite.items)} items are not scored ({missing[:5]}); the suite has hash "
            f"{suite.sha256[:12]}, the report names {report.suite_sha256[:12]}"
        ),
    )
