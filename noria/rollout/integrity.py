"""What may enter a batch, and whether a finished batch is what the trainer may trust."""

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Trajectory
from noria.rollout.assemble import same_weights

_MEAN_TOLERANCE = 1e-3
"""Of a group's mean advantage, relative to its largest; advantages are stored as float32."""


class DropReason(StrEnum):
    """Why a trajectory is left out of a batch; the trajectory itself holds the particulars."""

    ERROR = "error"
    """The rollout failed."""
    DIVERGED = "diverged"
    """It made calls that the origin trace has no recording for, so that more than the policy differs."""
    NOTHING_SAMPLED = "nothing sampled"
    """No token of it comes from the policy under training."""
    TRUNCATED = "truncated"
    """An answer ended by length, and such are not wanted."""
    REPEATED = "repeated"
    """The same member of the same group is there already."""
    SMALL_GROUP = "group too small"
    """Too few of its group are left to compare with."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which trajectories make the batch, and why each other one was left out, both in the order given."""

    kept: tuple[Trajectory, ...]
    dropped: tuple[tuple[Trajectory, DropReason], ...]


def select_for_batch(
    trajectories: Sequence[Trajectory], min_group_size: int, *, keep_truncated: bool = True
) -> Selection:
    """Leave out what must not be learned from, then each group with fewer than `min_group_size` members left.

    Truncated answers are kept by default: a policy learns to stop only from the low reward of those that did not.
    """
    reasons: dict[int, DropReason] = {}
    seen: set[tuple[str, int, int]] = set()
    sizes: dict[tuple[str, int], int] = defaultdict(int)
    for index, trajectory in enumerate(trajectories):
        reason = _unfit(trajectory, keep_truncated)
        place = (trajectory.round, trajectory.group, trajectory.member)
        if reason is None and place in seen:
            reason = DropReason.REPEATED
        if reason is not None:
            reasons[index] = reason
            continue
        seen.add(place)
        sizes[trajectory.round, trajectory.group] += 1
    for index, trajectory in enumerate(trajectories):
        if index not in reasons and sizes[trajectory.round, trajectory.group] < min_group_size:
            reasons[index] = DropReason.SMALL_GROUP
    kept = tuple(t for index, t in enumerate(trajectories) if index not in reasons)
    return Selection(kept, tuple((trajectories[index], reasons[index]) for index in sorted(reasons)))


def _unfit(trajectory: Trajectory, keep_truncated: bool) -> DropReason | None:
    if trajectory.error is not None:
        return DropReason.ERROR
    if trajectory.diverged:
        return DropReason.DIVERGED
    if not any(step.sampled for step in trajectory.steps):
        return DropReason.NOTHING_SAMPLED
    if trajectory.truncated and not keep_truncated:
        return DropReason.TRUNCATED
    return None


class Rule(StrEnum):
    """What every row of a batch must fulfil."""

    LENGTHS = "lengths"
    """Completion, mask, logprobs and advantages have one length; prompt and completion are not empty."""
    MASK = "mask"
    """The mask holds 0 and 1 only."""
    TRAINED = "trained"
    """At least one token is trained on."""
    IDS = "ids"
    """Token ids lie in the vocabulary."""
    LOGPROBS = "logprobs"
    """Logprobs are finite and not above 0."""
    ADVANTAGES = "advantages"
    """Advantages, reward and weight are finite."""
    OUTSIDE_MASK = "outside_mask"
    """Where the mask is 0, so are logprob and advantage."""
    VERSION = "version"
    """The tokens were sampled from a policy version that this batch may hold."""
    DUPLICATE = "duplicate"
    """No row stands twice, and a member of a group is one rollout."""
    GROUP_MEAN = "group_mean"
    """Advantages of a group, one per member, have mean 0."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that one row breaks; `trace_id` is of the row, or of the group's first member."""

    trace_id: str
    rule: Rule
    detail: str


def check_sequences(
    rows: Sequence[RewardedSequence], *, allowed_versions: Set[str], vocabulary: int | None = None
) -> list[Violation]:
    """Every violation in the batch; empty when it may be trained on.

    `vocabulary` is the number of token ids that the model knows; None leaves ids without an upper bound.
    """
    found: list[Violation] = []
    whole: list[RewardedSequence] = []
    for row in rows:
        violations = _check_row(row, allowed_versions, vocabulary)
        found += violations
        if not violations:
            whole.append(row)
    found += _duplicates(rows)
    found += _group_means(whole)
    return found


def _check_row(row: RewardedSequence, allowed_versions: Set[str], vocabulary: int | None) -> list[Violation]:
    found: list[Violation] = []

    def broken(rule: Rule, detail: str) -> None:
        found.append(Violation(row.trace_id, rule, detail))

    if not any(same_weights(row.policy_version, version) for version in allowed_versions):
        broken(Rule.VERSION, f"policy version {row.policy_version!r}, allowed: {', '.join(sorted(allowed_versions))}")
    sizes = (len(row.completion_ids), len(row.loss_mask), len(row.logprobs), len(row.advantages))
    if len(set(sizes)) != 1 or not row.prompt_ids or not row.completion_ids:
        names = "completion_ids {}, loss_mask {}, logprobs {}, advantages {}".format(*sizes)
        broken(Rule.LENGTHS, f"prompt_ids {len(row.prompt_ids)}, {names}")
        return found
    mask = np.asarray(row.loss_mask)
    logprobs = np.asarray(row.logprobs, dtype=np.float64)
    advantages = np.asarray(row.advantages, dtype=np.float64)
    ids = np.asarray(row.prompt_ids + row.completion_ids)
    if not ((mask == 0) | (mask == 1)).all():
        broken(Rule.MASK, f"values {sorted(set(row.loss_mask) - {0, 1})}")
    elif not mask.any():
        broken(Rule.TRAINED, "every token has mask 0")
    if ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary):
        broken(Rule.IDS, f"ids from {ids.min()} to {ids.max()}, vocabulary {vocabulary}")
    bad = ~(np.isfinite(logprobs) & (logprobs <= 0))
    if bad.any():
        broken(Rule.LOGPROBS, f"{_first(logprobs, bad)}, {int(bad.sum())} in all")
    bad = ~np.isfinite(advantages)
    if bad.any():
        broken(Rule.ADVANTAGES, f"advantage {_first(advantages, bad)}, {int(bad.sum())} in all")
    if not np.isfinite([row.reward, row.weight]).all():
        broken(Rule.ADVANTAGES, f"reward {row.reward}, weight {row.weight}")
    bad = (mask == 0) & ((logprobs != 0) | (advantages != 0))
    if bad.any():
        broken(Rule.OUTSIDE_MASK, f"logprob {_first(logprobs, bad)}, advantage {_first(advantages, bad)}")
    return found


def _first(values: npt.NDArray[np.float64], bad: npt.NDArray[np.bool_]) -> str:
    where = int(np.flatnonzero(bad)[0])
    return f"{values[where]} at {where}"


def _duplicates(rows: Sequence[RewardedSequence]) -> list[Violation]:
    found: list[Violation] = []
    seen: set[tuple[object, ...]] = set()
    trace_of: dict[tuple[str, int, int], str] = {}
    place_of: dict[str, tuple[str, int, int]] = {}
    for row in rows:
        place = (row.round, row.group, row.member)
        where = f"member {row.member} of group {row.group}"
        key = (row.trace_id, row.prompt_ids, row.completion_ids, row.logprobs)
        if key in seen:
            found.append(Violation(row.trace_id, Rule.DUPLICATE, f"{where} has this row twice"))
        seen.add(key)
        if trace_of.setdefault(place, row.trace_id) != row.trace_id:
            found.append(Violation(row.trace_id, Rule.DUPLICATE, f"{where} is also trace {trace_of[place]}"))
        if place_of.setdefault(row.trace_id, place) != place:
            found.append(Violation(row.trace_id, Rule.DUPLICATE, f"{where} has the trace of {place_of[row.trace_id]}"))
    return found


def _group_means(rows: Sequence[RewardedSequence]) -> list[Violation]:
    """A member's advantage is the mean over its trained tokens, however many rows they stand in."""
    groups: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    first_trace: dict[tuple[str, int], str] = {}
    for row in rows:
        trained = [a for a, mask in zip(row.advantages, row.loss_mask, strict=True) if mask]
        groups[row.round, row.group][row.member] += trained
        first_trace.setdefault((row.round, row.group), row.trace_id)
    found: list[Violation] = []
    for key, members in groups.items():
        advantages = np.array([np.mean(values) for values in members.values()])
        mean, largest = float(advantages.mean()), float(np.abs(advantages).max())
        if abs(mean) > _MEAN_TOLERANCE * max(largest, 1e-6):
            detail = f"group {key[1]}: mean advantage {mean:.6g} over {len(members)} members, largest {largest:.6g}"
            found.append(Violation(first_trace[key], Rule.GROUP_MEAN, detail))
    return found
