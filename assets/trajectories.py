"""Station 4: controlled rollouts of the real agent on recorded requests."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import dagster as dg

from assets.partitions import round_of, rounds
from assets.pictures import table
from assets.sets import set_path
from noria.config import TargetConfig
from noria.contracts.errors import StationFailed
from noria.contracts.round import Round
from noria.contracts.trajectory import Trajectory
from noria.release.chain import RoundPlan, read_plan
from noria.rollout.driver import RolloutPlan, rollout_seed
from noria.rollout.trajectory_table import (
    latest_trajectories,
    table_to_trajectories,
    trajectories_to_table,
    trajectory_to_record,
)
from noria.stores.artifacts import Artifacts
from noria.stores.origins import Origin, look_up_origins
from resources.agent import Agent
from resources.policy import Policy
from resources.stores import Stores

LOG = "rollouts.jsonl"
"""Every rollout is appended here as it ends; the round resumes from it."""


def trajectories_path(artifacts: Artifacts, round_: Round) -> str:
    """Where the round's trajectories stand once the station is done."""
    return f"{artifacts.round_dir(round_.key)}/trajectories.parquet"


def load_trajectories(artifacts: Artifacts, round_: Round) -> list[Trajectory]:
    """All trajectories of a finished station, failed ones included."""
    return table_to_trajectories(artifacts.read_parquet(trajectories_path(artifacts, round_)))


def plan_rollouts(plan: RoundPlan, origins: Sequence[Origin], group_size: int) -> list[RolloutPlan]:
    """`group_size` rollouts of each sample; the group's number is the sample's place in the set."""
    return [
        RolloutPlan(
            round=plan.round,
            sample_id=origin.sample_id,
            group=group,
            member=member,
            origin_trace_id=origin.trace_id,
            origin_request=origin.request,
            reference=origin.reference,
            seed=rollout_seed(plan.seed, plan.round, origin.sample_id, member),
        )
        for group, origin in enumerate(origins)
        for member in range(group_size)
    ]


def roll_out(
    artifacts: Artifacts,
    round_: Round,
    plans: Sequence[RolloutPlan],
    drive: Callable[[Sequence[RolloutPlan], Callable[[Trajectory], None]], None],
) -> list[Trajectory]:
    """Every planned rollout that has no whole trajectory on disk yet is made, and appended to disk as it ends.

    Returns the newest trajectory of each plan, in the order of the plans. A rollout that ended in an error is tried
    again when the station is materialized again; `drive` may raise, and what ended before stays.
    """
    log = f"{artifacts.round_dir(round_.key)}/{LOG}"
    done = {
        (trajectory.sample_id, trajectory.member): trajectory
        for trajectory in latest_trajectories(artifacts.read_jsonl(log))
        if trajectory.error is None
    }

    def keep(trajectory: Trajectory) -> None:
        artifacts.append_jsonl(log, trajectory_to_record(trajectory))
        done[trajectory.sample_id, trajectory.member] = trajectory

    missing = [plan for plan in plans if (plan.sample_id, plan.member) not in done]
    if missing:
        drive(missing, keep)
    return [done[plan.sample_id, plan.member] for plan in plans if (plan.sample_id, plan.member) in done]


def require_enough(trajectories: Sequence[Trajectory], planned: int, settings: TargetConfig) -> None:
    """Raises `StationFailed` with the most frequent reason when too few rollouts ended whole."""
    whole = sum(trajectory.error is None for trajectory in trajectories)
    if whole >= settings.min_whole_share * planned:
        return
    reasons = Counter(trajectory.error for trajectory in trajectories if trajectory.error)
    most = reasons.most_common(1)[0] if reasons else ("no rollout ended", planned)
    raise StationFailed(
        f"only {whole} of {planned} rollouts ended whole, {settings.min_whole_share:.0%} are required "
        f"(min_whole_share); most frequent reason ({most[1]}x): {most[0]}. Mend it and materialize trajectories again: "
        "the whole ones stay"
    )


@dg.asset(
    deps=["train_set", "cold_start"],
    partitions_def=rounds,
    group_name="rollouts",
    kinds={"parquet"},
    description=(
        "**What your real agent does when the model in training answers.** Each sample's original request is sent to "
        "the agent's rollout endpoint `group_size` times. The proxy answers the target's calls from the version in "
        "training and every other node from the recording, so that a difference in reward has one cause."
    ),
)
def trajectories(
    context: dg.AssetExecutionContext, stores: Stores, agent: Agent, policy: Policy
) -> dg.MaterializeResult:
    """Roll out what is missing; each trajectory is on disk as it ends."""
    round_ = round_of(context)
    artifacts = stores.artifacts
    path = trajectories_path(artifacts, round_)
    plan = read_plan(artifacts, round_)
    started = time.monotonic()
    if artifacts.exists(path):
        return _result(artifacts, path, load_trajectories(artifacts, round_), plan, {"already_there": True})
    settings = stores.settings.config.target(str(round_.target))
    samples = artifacts.read_parquet(set_path(artifacts, round_, "train"))
    origins = look_up_origins(stores.online, samples.column("id").to_pylist())
    plans = plan_rollouts(plan, origins, settings.group_size)
    policy.preload(plan.parent)
    busy_before = policy.busy_seconds()

    def drive(missing: Sequence[RolloutPlan], keep: Callable[[Trajectory], None]) -> None:
        context.log.info(f"{len(missing)} of {len(plans)} rollouts to make, from {plan.parent}")
        agent.roll_out(
            missing,
            target=str(round_.target),
            policy_version=plan.parent,
            on_trajectory=keep,
            progress=_progress(context),
        )

    made = roll_out(artifacts, round_, plans, drive)
    require_enough(made, len(plans), settings)
    artifacts.write_parquet(path, trajectories_to_table(made), {"round": round_.key, "policy_version": plan.parent})
    seconds = time.monotonic() - started
    return _result(
        artifacts,
        path,
        made,
        plan,
        {
            "already_there": False,
            "seconds": seconds,
            "rollouts_per_second": len(plans) / seconds,
            "model_seconds": policy.busy_seconds() - busy_before,
        },
    )


def _progress(context: dg.AssetExecutionContext) -> Callable[[int, int], None]:
    """Log every tenth of the way."""
    said = -1

    def progress(done: int, total: int) -> None:
        nonlocal said
        tenth = 10 * done // total
        if tenth > said:
            said = tenth
            context.log.info(f"rollouts: {done} of {total} ({done / total:.0%})")

    return progress


def _result(
    artifacts: Artifacts, path: str, made: Sequence[Trajectory], plan: RoundPlan, more: Mapping[str, object]
) -> dg.MaterializeResult:
    errors = Counter(trajectory.error for trajectory in made if trajectory.error)
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": len(made),
            "whole": sum(trajectory.error is None for trajectory in made),
            "failed": sum(errors.values()),
            "truncated": sum(trajectory.truncated for trajectory in made),
            "pinned_misses": sum(trajectory.pinned_misses for trajectory in made),
            "policy_version": plan.parent,
            "file": dg.MetadataValue.url(artifacts.url(path)),
            "first": table([_row(trajectory) for trajectory in made[:5]]),
            "errors": table([{"error": error, "rollouts": count} for error, count in errors.most_common(5)]),
            **more,
        }
    )


def _row(trajectory: Trajectory) -> dict[str, object]:
    sampled = [step for step in trajectory.steps if step.sampled]
    return {
        "sample": trajectory.sample_id,
        "member": trajectory.member,
        "request": trajectory.origin_request,
        "action": sampled[-1].action if sampled else "",
        "response": trajectory.origin_response,
        "error": trajectory.error or "",
    }


@dg.asset_check(
    asset=trajectories,
    blocking=True,
    description="Every whole trajectory was sampled by the version in training, and every other node was pinned.",
)
def trajectories_are_controlled(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """Only one cause for a difference in reward: the policy."""
    round_ = round_of(context)
    plan = read_plan(stores.artifacts, round_)
    return controlled_result(load_trajectories(stores.artifacts, round_), plan.parent, round_.target.node)


def controlled_result(made: Sequence[Trajectory], version: str, node: str) -> dg.AssetCheckResult:
    """Failed when a whole trajectory has a target step of another version, or another node that was not pinned."""
    wrong_version, loose = [], []
    for trajectory in made:
        if trajectory.error is not None:
            continue
        for step in trajectory.steps:
            if step.node == node and step.pinned is None and step.policy_version != version:
                wrong_version.append(trajectory.trace_id)
            if step.node != node and step.pinned is None:
                loose.append(trajectory.trace_id)
    return dg.AssetCheckResult(
        passed=not wrong_version and not loose,
        description=(
            f"{len(made)} trajectories, all by {version} with every other node pinned"
            if not wrong_version and not loose
            else f"{len(wrong_version)} steps by another version than {version}, {len(loose)} steps of other nodes "
            f"that were not pinned; traces {(wrong_version + loose)[:10]}"
        ),
        metadata={"wrong_version": len(wrong_version), "not_pinned": len(loose)},
    )
