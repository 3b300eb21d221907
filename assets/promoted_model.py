"""Station 8: the release, by the evidence of the report alone."""

from collections.abc import Sequence

import dagster as dg

from assets.checkpoint import checkpoint_dir, health_result
from assets.eval_report import fully_right, load_report, report_path, report_result
from assets.partitions import round_of, rounds
from assets.pictures import figure, picture, png_of, table
from noria.contracts.errors import IntegrityError
from noria.contracts.report import EvalReport, Verdict
from noria.contracts.round import Round
from noria.release.chain import CHECKPOINT, round_numbers
from noria.release.registry import Registry
from noria.stores.artifacts import Artifacts
from resources.policy import Policy
from resources.registry import Releases
from resources.stores import Stores
from training.spec import MODEL_DIR


def is_due(artifacts: Artifacts, registry: Registry, round_: Round) -> bool:
    """Whether the round's report asks for a release that has not been made by this very report yet."""
    report = load_report(artifacts, round_)
    report_sha256 = artifacts.sha256(report_path(artifacts, round_))
    made = any(
        event.version == report.candidate and event.report_sha256 == report_sha256
        for event in registry.events(report.target)
    )
    return report.verdict is Verdict.PASS and not made


def release_by_report(artifacts: Artifacts, registry: Registry, round_: Round) -> EvalReport:
    """Promote the round's checkpoint if its report says so; read again here, because checks block only their own run.

    Idempotent. Raises `IntegrityError` when report or weights do not match what was recorded about them, and
    `ReleaseConflict` when another version went live since the report was made.
    """
    report = load_report(artifacts, round_)
    if not is_due(artifacts, registry, round_):
        return report
    report_sha256 = artifacts.sha256(report_path(artifacts, round_))
    for result in (
        report_result(artifacts, report),
        health_result(artifacts, checkpoint_dir(artifacts, round_)),
    ):
        if not result.passed:
            raise IntegrityError(f"{round_.key} is not released: {result.description}")
    registry.promote(
        report.target,
        report.candidate,
        f"{artifacts.round_dir(round_.key)}/{CHECKPOINT}/{MODEL_DIR}",
        by="promoted_model",
        why=report.reason,
        report_sha256=report_sha256,
        expected_parent=report.baseline,
    )
    return report


def reports_until(artifacts: Artifacts, round_: Round) -> list[EvalReport]:
    """The reports of the target's rounds up to this one, ascending; rounds without one are left out."""
    earlier = [Round(round_.target, number) for number in round_numbers(artifacts, round_.target)]
    return [
        load_report(artifacts, one)
        for one in earlier
        if one.number <= round_.number and artifacts.exists(report_path(artifacts, one))
    ]


def over_rounds(reports: Sequence[EvalReport]) -> bytes:
    """Held-out accuracy of each round's checkpoint and of what was live, as a PNG; promotions are filled."""
    numbers = [Round.parse(report.round).number for report in reports]
    candidate = [fully_right([pair.candidate for pair in report.pairs]) for report in reports]
    live = [fully_right([pair.baseline for pair in report.pairs]) for report in reports]
    passed = [report.verdict is Verdict.PASS for report in reports]
    fig = figure()
    axis = fig.subplots()
    axis.step(numbers, live, where="mid", color="tab:grey", label="live, when the round was judged")
    axis.plot(numbers, candidate, color="tab:blue", marker="o", markerfacecolor="white", label="the round's checkpoint")
    axis.plot(
        [number for number, promoted in zip(numbers, passed, strict=True) if promoted],
        [value for value, promoted in zip(candidate, passed, strict=True) if promoted],
        linestyle="none",
        marker="o",
        color="tab:blue",
        label="promoted",
    )
    axis.set(xlabel="round", ylabel="fully right, held out", ylim=(0, 1), title=reports[-1].target)
    axis.set_xticks(numbers)
    axis.legend(loc="lower right", fontsize="small")
    return png_of(fig)


@dg.asset(
    deps=["eval_report"],
    partitions_def=rounds,
    group_name="release",
    kinds={"huggingface"},
    description=(
        "**What your users get.** A round that passed its gate goes live: the proxy follows within a second, without a "
        "restart. A round that did not changes nothing here; training goes on from its checkpoint."
    ),
)
def promoted_model(
    context: dg.AssetExecutionContext, stores: Stores, releases: Releases, policy: Policy
) -> dg.MaterializeResult:
    """Read the report again and act on it: release the checkpoint, or leave what is live."""
    round_ = round_of(context)
    target = str(round_.target)
    registry = releases.registry
    before = registry.current(target)
    if is_due(stores.artifacts, registry, round_):
        policy.preload(round_.key)
    report = release_by_report(stores.artifacts, registry, round_)
    live = registry.current(target)
    return dg.MaterializeResult(
        metadata={
            "verdict": report.verdict.value,
            "reason": report.reason,
            "live": live.version if live else "nothing",
            "live_before": before.version if before else "nothing",
            "promoted": 1 if report.verdict is Verdict.PASS else 0,
            "accuracy": fully_right([pair.candidate for pair in report.pairs]),
            "report_sha256": stores.artifacts.sha256(report_path(stores.artifacts, round_)),
            "over_rounds": picture(over_rounds(reports_until(stores.artifacts, round_)), "accuracy over the rounds"),
            "history": table(
                [
                    {"at": event.at.isoformat(), "version": event.version, "to": event.to_state.value, "why": event.why}
                    for event in reversed(registry.events(target))
                ],
                limit=10,
            ),
        }
    )
