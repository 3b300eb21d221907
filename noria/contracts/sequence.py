"""One row that the trainer consumes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardedSequence:
    """Token ids with the mask, the sampling log-probabilities and the advantage of each token.

    prompt_ids      (P,) tokens before the first one that the policy sampled
    completion_ids  (T,) everything after; with several turns it holds tool and user tokens too
    loss_mask       (T,) 1 on the policy's own sampled tokens, 0 on system, user and environment tokens
    logprobs        (T,) natural logarithms under the sampled distribution, <= 0; 0.0 where loss_mask is 0
    advantages      (T,) advantage of each token; 0.0 where loss_mask is 0
    """

    round: str
    sample_id: int
    group: int
    member: int
    trace_id: str
    policy_version: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    reward: float
    weight: float
    components: Mapping[str, float]
