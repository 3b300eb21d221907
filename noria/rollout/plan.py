"""What a round asks of the agent: one plan per rollout."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

_SEED_BYTES = 6
"""48 bits: seed + k stays below 2**53, so that every JSON reader hands it on unchanged."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout to be made: where it belongs, the request that the agent gets, and the seed of the policy's answers.

    round            round key that the rollout belongs to
    sample_id        id of the recorded call that the train set names
    group, member    rollouts of one group share the sample and differ in their seed
    origin_trace_id  the trace whose recording answers every node but the target
    origin_request   the whole task's request, opaque
    reference        what later feedback said about the origin trace: {score name: {"value": …, "explanation": …}}
    """

    round: str
    sample_id: int
    group: int
    member: int
    origin_trace_id: str
    origin_request: str
    reference: Mapping[str, object]
    seed: int


def rollout_seed(run_seed: int, round_key: str, sample_id: int, member: int) -> int:
    """Seed of one rollout, in [0, 2**48): a hash of where it belongs, so that a repeated round samples alike."""
    text = f"{run_seed}/{round_key}/{sample_id}/{member}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_SEED_BYTES], "big")
