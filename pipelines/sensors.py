"""What turns the wheel by itself. Each sensor decides in a plain function; the cursor only ever grows."""

import json
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum

import dagster as dg

from assets.partitions import rounds
from noria.config import SensorConfig
from noria.contracts.round import Round, Target
from pipelines.execute import reason
from pipelines.jobs import ingest, turn
from pipelines.partitions import PARTITION_TAG, TARGET_TAG, UNFINISHED, next_round, rounds_of, runs_of_round
from resources.stores import Stores

MINIMUM_INTERVAL_SECONDS = 5


@dataclass(frozen=True, slots=True)
class IngestCursor:
    """The highest id that an ingest was requested for, and when (seconds since the epoch)."""

    call_id: int = 0
    score_id: int = 0
    at: float = 0.0

    @classmethod
    def parse(cls, text: str | None) -> "IngestCursor":
        """Read a stored cursor; none yet is the beginning."""
        return cls(**json.loads(text)) if text else cls()


def ingest_due(cursor: IngestCursor, call_id: int, score_id: int, now: float, settings: SensorConfig) -> str | None:
    """Why nothing is ingested now, or None when an ingest is due."""
    new_calls, new_scores = call_id - cursor.call_id, score_id - cursor.score_id
    if new_calls <= 0 and new_scores <= 0:
        return "nothing has landed since the last ingest"
    if new_calls >= settings.min_new_calls:
        return None
    waited = now - cursor.at
    if waited >= settings.max_ingest_seconds:
        return None
    return (
        f"{new_calls} of {settings.min_new_calls} calls have landed; the next ingest is at that number, "
        f"or in {settings.max_ingest_seconds - waited:.0f} s"
    )


@dg.sensor(
    job=ingest,
    minimum_interval_seconds=MINIMUM_INTERVAL_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="New calls or feedback have landed in the online store: take them over into the warehouse.",
)
def traffic_landed(context: dg.SensorEvaluationContext, stores: Stores) -> dg.SensorResult | dg.SkipReason:
    """Follow the online store by its highest ids."""
    cursor = IngestCursor.parse(context.cursor)
    call_id, score_id = stores.online.last_call_id(), stores.online.last_score_id()
    now = time.time()
    wait = ingest_due(cursor, call_id, score_id, now, stores.settings.config.sensors)
    if wait is not None:
        return dg.SkipReason(wait)
    if context.instance.get_runs_count(dg.RunsFilter(job_name=ingest.name, statuses=list(UNFINISHED))):
        return dg.SkipReason("an ingest is running")
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=f"ingest-{call_id}-{score_id}")],
        cursor=json.dumps(asdict(IngestCursor(max(call_id, cursor.call_id), max(score_id, cursor.score_id), now))),
    )


class LastRound(StrEnum):
    """What became of the target's newest round."""

    NONE = "none"
    TURNING = "turning"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Standing:
    """All that the decision about one target depends on.

    new_trajectories   live traces of the target since its cursor
    ended_seconds_ago  since the newest round's last run ended; infinite when there was none
    attempts           runs that the newest round has had
    """

    last: LastRound
    new_trajectories: int
    ended_seconds_ago: float
    attempts: int


class Decision(StrEnum):
    """What the sensor does for one target."""

    WAIT = "wait"
    BEGIN = "begin"
    RESUME = "resume"


def decide(standing: Standing, settings: SensorConfig) -> tuple[Decision, str]:
    """Whether the target begins a round, resumes its failed one, or waits; and why, for the reader."""
    if standing.last is LastRound.TURNING:
        return Decision.WAIT, "its round is turning"
    if standing.ended_seconds_ago < settings.min_pause_seconds:
        rest = settings.min_pause_seconds - standing.ended_seconds_ago
        return Decision.WAIT, f"its last round has just ended; at least {rest:.0f} s of pause are left"
    if standing.last is LastRound.FAILED and standing.attempts < settings.max_attempts:
        return Decision.RESUME, f"its last round failed; attempt {standing.attempts + 1} of {settings.max_attempts}"
    if standing.new_trajectories < settings.min_new_trajectories:
        return (
            Decision.WAIT,
            f"{standing.new_trajectories} of {settings.min_new_trajectories} new trajectories have landed",
        )
    return Decision.BEGIN, f"{standing.new_trajectories} new trajectories have landed"


def standing_of(
    context: dg.SensorEvaluationContext, opened: list[Round], new_trajectories: int, now: float
) -> Standing:
    """Where a target stands, by the runs of its newest round."""
    if not opened:
        return Standing(LastRound.NONE, new_trajectories, float("inf"), 0)
    runs = runs_of_round(context.instance, opened[-1])
    turns = [record for record in runs if record.dagster_run.job_name == turn.name]
    if any(record.dagster_run.status in UNFINISHED for record in runs):
        return Standing(LastRound.TURNING, new_trajectories, 0.0, len(turns))
    if not turns:  # opened by hand and left alone, or turned station by station: it binds nobody
        return Standing(LastRound.NONE, new_trajectories, float("inf"), 0)
    newest = turns[0]
    ended = newest.end_time or newest.update_timestamp.timestamp()
    done = newest.dagster_run.status is dg.DagsterRunStatus.SUCCESS
    return Standing(LastRound.DONE if done else LastRound.FAILED, new_trajectories, now - ended, len(turns))


@dg.sensor(
    job=turn,
    minimum_interval_seconds=MINIMUM_INTERVAL_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Enough live trajectories of a target have landed since its last round: turn the wheel for it. One turn per "
        "target at a time; targets do not wait for each other; a failed round is taken up again first."
    ),
)
def enough_trajectories(context: dg.SensorEvaluationContext, stores: Stores) -> dg.SensorResult | dg.SkipReason:
    """Decide for each enabled target; the cursor holds, per target, the highest call id that a round has begun with."""
    config = stores.settings.config
    cursor: dict[str, int] = json.loads(context.cursor) if context.cursor else {}
    requests: list[dg.RunRequest] = []
    opened_now: list[str] = []
    reasons: list[str] = []
    now = time.time()
    for name in config.enabled_targets:
        target = Target.parse(name)
        opened = rounds_of(context.instance, target)
        count, highest = stores.warehouse.count_traces_after(name, cursor.get(name, 0))
        standing = standing_of(context, opened, count, now)
        decision, why = decide(standing, config.sensors)
        reasons.append(f"{name}: {why}")
        if decision is Decision.WAIT:
            continue
        if decision is Decision.BEGIN:
            round_ = next_round(opened, target)
            opened_now.append(round_.key)
            cursor[name] = max(highest, cursor.get(name, 0))
        else:
            round_ = opened[-1]
        requests.append(
            dg.RunRequest(
                run_key=f"{round_.key}-{standing.attempts if decision is Decision.RESUME else 0}",
                partition_key=round_.key,
                tags={TARGET_TAG: name, "noria/why": why},
            )
        )
    context.log.info("; ".join(reasons) or "no target is enabled in noria.toml")
    if not requests:
        return dg.SkipReason("; ".join(reasons) or "no target is enabled in noria.toml")
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[rounds.build_add_request(opened_now)] if opened_now else None,
        cursor=json.dumps(cursor),
    )


@dg.run_failure_sensor(
    name="run_failed",
    monitored_jobs=[turn, ingest],
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="A run failed: write down at which station and why, for `noria status` and the reader of the round.",
)
def run_failed(context: dg.RunFailureSensorContext, stores: Stores) -> None:
    """Leave the reason beside the round's files; `enough_trajectories` takes the round up again."""
    failed = context.get_step_failure_events()
    stations = {event.step_key: reason(event) for event in failed}
    record = {
        "run": context.dagster_run.run_id,
        "job": context.dagster_run.job_name,
        "at": datetime.now(UTC).isoformat(),
        "stations": stations or {"run": context.failure_event.message},
    }
    key = context.dagster_run.tags.get(PARTITION_TAG)
    folder = stores.artifacts.round_dir(key) if key else "ingest"
    stores.artifacts.write_json(f"{folder}/failure.json", record)
    context.log.error(f"{key or 'ingest'} failed: {record['stations']}")
