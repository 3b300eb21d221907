"""The training chain: which weights a round starts from, and the plan that pins everything it depends on.

Each round starts from the newest healthy checkpoint, promoted or not, so that small gains add up until the gate has
evidence. After a configured number of failed gates in a row the chain starts again from the live version.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from noria.contracts.errors import NotFound
from noria.contracts.report import Verdict
from noria.contracts.round import Round, Target
from noria.stores.artifacts import Artifacts

PLAN = "round.json"
REPORT = "report.json"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round depends on, written once when it begins: any station made again comes out the same.

    parent       the version whose weights the round samples from and trains
    parent_why   one sentence for the reader
    restarted    whether the chain started again from the live version here
    seed         seed of everything random in the round
    versions     Delta version of each warehouse table that its sets are selected from
    cursor       highest call id of the warehouse when the round began
    """

    round: str
    parent: str
    parent_why: str
    restarted: bool
    seed: int
    versions: dict[str, int]
    cursor: int
    created_at: str


def plan_round(
    artifacts: Artifacts,
    round_: Round,
    *,
    seed: int,
    versions: Mapping[str, int],
    cursor: int,
    live: str | None,
    failures_before_restart: int,
) -> RoundPlan:
    """The plan of a round: the one on disk if there is one, else a new one, written before it is returned."""
    try:
        return read_plan(artifacts, round_)
    except NotFound:
        pass
    parent, why, restarted = choose_parent(
        artifacts, round_, live=live, failures_before_restart=failures_before_restart
    )
    plan = RoundPlan(
        round=round_.key,
        parent=parent,
        parent_why=why,
        restarted=restarted,
        seed=seed,
        versions=dict(versions),
        cursor=cursor,
        created_at=datetime.now(UTC).isoformat(),
    )
    artifacts.write_json(f"{artifacts.round_dir(round_.key)}/{PLAN}", asdict(plan))
    return plan


def read_plan(artifacts: Artifacts, round_: Round) -> RoundPlan:
    """The plan that the round began with. Raises `NotFound` when it has not begun."""
    path = f"{artifacts.round_dir(round_.key)}/{PLAN}"
    if not artifacts.exists(path):
        raise NotFound(f"round {round_.key} has not begun: materialize its train_set first")
    return RoundPlan(**artifacts.read_json(path))


def choose_parent(
    artifacts: Artifacts, round_: Round, *, live: str | None, failures_before_restart: int
) -> tuple[str, str, bool]:
    """Version to start from, why, and whether the chain restarts. Needs only what is on disk and the live version."""
    failures = failed_gates_in_a_row(artifacts, round_)
    if failures >= failures_before_restart and live is not None:
        return live, f"{failures} failed gates in a row: the chain starts again from the live version", True
    for number in range(round_.number - 1, 0, -1):
        earlier = Round(round_.target, number)
        checkpoint = artifacts.completed(f"{artifacts.round_dir(earlier.key)}/{CHECKPOINT}")
        if checkpoint is not None and checkpoint.get("healthy"):
            return earlier.key, "the newest healthy checkpoint", False
    if live is not None:
        return live, "no healthy checkpoint yet: the live version", False
    return Round(round_.target, 0).key, "the cold start", False


def failed_gates_in_a_row(artifacts: Artifacts, round_: Round) -> int:
    """How many rounds right before this one failed their gate, back to the last restart of the chain."""
    failures = 0
    for number in range(round_.number - 1, 0, -1):
        earlier = Round(round_.target, number)
        report = read_report_summary(artifacts, earlier)
        if report is None or report["verdict"] != Verdict.FAIL:
            break
        failures += 1
        try:
            if read_plan(artifacts, earlier).restarted:
                break
        except NotFound:
            break
    return failures


def read_report_summary(artifacts: Artifacts, round_: Round) -> dict[str, Any] | None:
    """The report's JSON as written by the `eval_report` station, None when there is none."""
    path = f"{artifacts.round_dir(round_.key)}/{REPORT}"
    return dict(artifacts.read_json(path)) if artifacts.exists(path) else None


def round_numbers(artifacts: Artifacts, target: Target) -> list[int]:
    """Numbers of the rounds of a target that have begun, ascending."""
    numbers = [Round.parse(key).number for key in artifacts.list_dir("rounds") if key.startswith(f"{target}.r")]
    return sorted(numbers)
