"""Station 5: rewards with provenance, advantages, and the token sequences that the trainer consumes."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg
import pyarrow as pa

from assets.partitions import round_of, rounds
from assets.pictures import table
from assets.quality import check_result
from assets.trajectories import load_trajectories
from noria.contracts.call import Score, ScoreSource
from noria.contracts.errors import StationFailed
from noria.contracts.round import Round
from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Trajectory
from noria.release.chain import read_plan
from noria.rewards.advantage import group_advantages
from noria.rewards.reward import Attempt, Reward, Rewarded, load_reward
from noria.rollout.integrity import Violation, check_sequences, select_for_batch
from noria.rollout.sequences import sequences
from noria.rollout.trajectory_table import sequences_to_table, table_to_sequences
from noria.stores.artifacts import Artifacts
from noria.stores.quality import Rule, validate
from resources.stores import Stores

RULES = (
    Rule("expect_table_row_count_to_be_between", "the batch is not empty", {"min_value": 1}),
    Rule("expect_column_values_to_not_be_null", "every sequence has a reward", {"column": "reward"}),
    Rule(
        "expect_column_values_to_be_between",
        "every sequence has a token that the policy sampled",
        {"column": "trained_tokens", "min_value": 1},
    ),
    Rule(
        "expect_column_pair_values_to_be_equal",
        "as many log-probabilities as completion tokens",
        {"column_A": "completion_tokens", "column_B": "logprobs"},
    ),
    Rule("expect_column_values_to_be_between", "log-probabilities are <= 0", {"column": "max_logprob", "max_value": 0}),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A round's sequences, with what was left out and why."""

    rows: list[RewardedSequence]
    rewarded: list[tuple[Trajectory, Rewarded]]
    dropped: Counter[str]


def batch_path(artifacts: Artifacts, round_: Round) -> str:
    """Where the round's rewarded batch stands."""
    return f"{artifacts.round_dir(round_.key)}/rewarded.parquet"


def load_batch(artifacts: Artifacts, round_: Round) -> list[RewardedSequence]:
    """The sequences of a finished station."""
    return table_to_sequences(artifacts.read_parquet(batch_path(artifacts, round_)))


def attempt_of(trajectory: Trajectory, node: str) -> Attempt:
    """What the reward sees: the target's last step with its input, the agent's answer, and the origin's feedback."""
    step = [step for step in trajectory.steps if step.node == node][-1]
    return Attempt(
        node=node,
        input=json.dumps({"messages": json.loads(step.observation)}),
        output=step.action,
        response=trajectory.origin_response,
        reference=trajectory.reference,
    )


def reward_batch(made: Sequence[Trajectory], reward: Reward, node: str, min_group_size: int) -> Batch:
    """Score every trajectory that a batch may hold; advantages are relative to the group's mean.

    Raises `StationFailed` when nothing is left.
    """
    selection = select_for_batch(made, min_group_size)
    dropped = Counter(reason for _, reason in selection.dropped)
    if not selection.kept:
        raise StationFailed(f"no trajectory may enter the batch: {dict(dropped)}")
    rewarded = [(trajectory, reward(attempt_of(trajectory, node))) for trajectory in selection.kept]
    advantages = group_advantages(
        [result.total for _, result in rewarded], [trajectory.group for trajectory, _ in rewarded]
    )
    rows = [
        row
        for (trajectory, result), advantage in zip(rewarded, advantages, strict=True)
        for row in sequences(trajectory, result.total, advantage, result.components)
    ]
    return Batch(rows, rewarded, dropped)


def scores_of(batch: Batch, reward: Reward, at: datetime) -> list[Score]:
    """The rewards as scores of the rollouts' traces: who said so, in which version."""
    return [
        Score(
            target_kind="trace",
            target_id=trajectory.trace_id,
            name="reward",
            value=result.total,
            source=ScoreSource.RULE,
            scorer=reward.name,
            scorer_version=reward.version,
            at=at,
        )
        for trajectory, result in batch.rewarded
    ]


@dg.asset(
    deps=["trajectories"],
    partitions_def=rounds,
    group_name="rollouts",
    kinds={"parquet"},
    description=(
        "**How good each attempt was, by your reward file.** Trajectories with an error never enter. Rewards become "
        "advantages relative to the attempts on the same request, and every token carries its mask and the "
        "log-probability with which it was sampled."
    ),
)
def rewarded_batch(context: dg.AssetExecutionContext, stores: Stores) -> dg.MaterializeResult:
    """Score, compare within the group, and lay out the tokens."""
    round_ = round_of(context)
    artifacts = stores.artifacts
    path = batch_path(artifacts, round_)
    config = stores.settings.config
    settings = config.target(str(round_.target))
    reward = load_reward(settings.reward, config.root)
    started = time.monotonic()
    reused = artifacts.exists(path)
    dropped: Counter[str] = Counter()
    if not reused:
        made = load_trajectories(artifacts, round_)
        batch = reward_batch(made, reward, round_.target.node, settings.min_group_size)
        dropped = batch.dropped
        stores.online.add_scores(scores_of(batch, reward, datetime.now(UTC)))
        artifacts.write_parquet(
            path,
            sequences_to_table(batch.rows),
            {"round": round_.key, "scorer": reward.name, "scorer_version": reward.version},
        )
    rows = load_batch(artifacts, round_)
    rewards = [row.reward for row in rows]
    informative = {row.group for row in rows if any(row.advantages)}
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": len(rows),
            "reward": sum(rewards) / len(rewards),
            "fully_right": sum(value >= 1.0 for value in rewards) / len(rewards),
            "groups": len({row.group for row in rows}),
            "groups_that_differ": len(informative),
            "trained_tokens": sum(sum(row.loss_mask) for row in rows),
            "dropped": dg.MetadataValue.json(dict(dropped)),
            "scorer": f"{reward.name} {reward.version}",
            "file": dg.MetadataValue.url(artifacts.url(path)),
            "first": table(
                [
                    {"sample": row.sample_id, "member": row.member, "reward": row.reward, **row.components}
                    for row in rows[:5]
                ]
            ),
            "seconds": time.monotonic() - started,
            "already_there": reused,
        }
    )


@dg.asset_check(
    asset=rewarded_batch,
    blocking=True,
    description="Token integrity: lengths agree, log-probabilities are finite and <= 0, one known policy version.",
)
def rewarded_batch_is_whole(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """Every token that is trained on is one that the policy sampled, and says so."""
    round_ = round_of(context)
    plan = read_plan(stores.artifacts, round_)
    return integrity_result(check_sequences(load_batch(stores.artifacts, round_), allowed_versions={plan.parent}))


@dg.asset_check(asset=rewarded_batch, blocking=True, description="The batch keeps its contract (Great Expectations).")
def rewarded_batch_is_sound(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """Validate the batch row by row."""
    return check_result(
        validate(batch_profile(load_batch(stores.artifacts, round_of(context))), RULES, id_column="trace_id")
    )


def batch_profile(rows: Sequence[RewardedSequence]) -> pa.Table:
    """One row a sequence with the lengths and extremes that the rules look at."""
    return pa.table(
        {
            "trace_id": [row.trace_id for row in rows],
            "reward": pa.array([row.reward for row in rows], pa.float64(), from_pandas=True),
            "completion_tokens": [len(row.completion_ids) for row in rows],
            "logprobs": [len(row.logprobs) for row in rows],
            "trained_tokens": [sum(row.loss_mask) for row in rows],
            "max_logprob": [max(row.logprobs, default=0.0) for row in rows],
        }
    )


def integrity_result(violations: Sequence[Violation]) -> dg.AssetCheckResult:
    """Failed when there is any violation; shows the first twenty."""
    rules = Counter(violation.rule for violation in violations)
    return dg.AssetCheckResult(
        passed=not violations,
        description=(
            "every trained token is one that the policy sampled"
            if not violations
            else ", ".join(f"{rule}: {count} sequences" for rule, count in rules.most_common())
        ),
        metadata={
            "violations": len(violations),
            "first": table(
                [{"trace": v.trace_id, "rule": v.rule, "detail": v.detail} for v in violations[:20]], limit=20
            ),
        },
    )
