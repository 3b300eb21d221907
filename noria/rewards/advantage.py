"""Group-relative advantages, as in GRPO (Shao et al. 2024, section 4.1.2) and as TRL's `GRPOTrainer` computes them."""

import math
from collections.abc import Sequence

from noria.contracts.errors import InvalidRecord


def group_advantages(
    rewards: Sequence[float], groups: Sequence[int], *, scale: bool = True, epsilon: float = 1e-4
) -> list[float]:
    """How much better each rollout did than the others on the same sample.

    rewards   (N,) one finite reward per rollout
    groups    (N,) the group of each; members need not stand together, groups may differ in size
    scale     divides by the group's standard deviation (Bessel-corrected, as `torch.std`) plus `epsilon`; False gives
              the plain difference, without the bias toward easy and hard samples (Liu et al. 2025, Dr. GRPO)

    Returns (N,) advantages that sum to zero within each group. A group of one, or whose rewards are all equal, gives
    exactly 0. Raises `InvalidRecord` on different lengths or a reward that is not finite.
    """
    if len(rewards) != len(groups):
        raise InvalidRecord(f"{len(rewards)} rewards for {len(groups)} group numbers; each rollout needs one of both")
    members: dict[int, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise InvalidRecord(f"reward {index} of group {group} is {reward}; only finite rewards can be compared")
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = [rewards[index] for index in indices]
        if min(values) == max(values):  # exact, where a rounded mean would leave noise of 1e-17 / epsilon
            continue
        mean = math.fsum(values) / len(values)
        differences = [value - mean for value in values]
        divisor = 1.0
        if scale:
            divisor = math.sqrt(math.fsum(d * d for d in differences) / (len(values) - 1)) + epsilon
        for index, difference in zip(indices, differences, strict=True):
            advantages[index] = difference / divisor
    return advantages
