"""Opening rounds: which number comes next for a target, and what became of its last one."""

from collections.abc import Sequence

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from noria.contracts.round import Round, Target

TARGET_TAG = "noria/target"
"""Runs that carry this tag with one target's name never run at the same time (dagster.yaml)."""
PARTITION_TAG = "dagster/partition"

UNFINISHED = (
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.MANAGED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
)


def rounds_of(instance: DagsterInstance, target: Target) -> list[Round]:
    """The rounds of a target that have been opened, ascending."""
    keys = instance.get_dynamic_partitions("rounds")
    return sorted(round_ for round_ in map(Round.parse, keys) if round_.target == target)


def next_round(opened: Sequence[Round], target: Target) -> Round:
    """The round after the last one that was opened; numbers begin at 1 and are never used again."""
    return Round(target, max((round_.number for round_ in opened), default=0) + 1)


def runs_of_round(instance: DagsterInstance, round_: Round) -> list[RunRecord]:
    """Every run of the round, newest first, whoever launched it."""
    return list(instance.get_run_records(RunsFilter(tags={PARTITION_TAG: round_.key})))
