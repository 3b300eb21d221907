"""From `RewardedSequence` rows to the tensors of one forward pass, addressed by step, rank and micro step.

Which rows a forward pass sees is a function of (rows, seed, step, rank, micro step) alone, so a trainer that was killed
and one that was not see the same.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.contracts.errors import IntegrityError, TrainingFailed


@dataclass(frozen=True, slots=True)
class Row:
    """What the loss needs of one `RewardedSequence`; the lists of the completion have one length.

    advantages are already multiplied by the row's weight.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    advantages: list[float]
    reward: float


@dataclass(frozen=True, slots=True)
class RewardedRows:
    """The rows that are trained on, and how many were left out because of their length or for want of a token."""

    rows: list[Row]
    too_long: int
    untrainable: int


def read_rows(path: str | Path, *, max_sequence_tokens: int) -> RewardedRows:
    """Read the parquet file of a rewarded batch.

    Rows longer than `max_sequence_tokens` (prompt and completion) and rows without a token of the policy's own are left
    out. Raises `IntegrityError` for a row whose lists differ in length or hold a number that is not finite, and
    `TrainingFailed` if nothing is left.
    """
    import pyarrow.parquet as pq

    names = ["prompt_ids", "completion_ids", "loss_mask", "logprobs", "advantages", "reward", "weight"]
    try:
        table = pq.read_table(path, columns=names)
    except (OSError, ValueError) as error:
        raise TrainingFailed(f"cannot read the rewarded batch {path}: {error}; materialize rewarded_batch") from error
    rows: list[Row] = []
    too_long = untrainable = 0
    for number, record in enumerate(table.to_pylist()):
        row = _row(record, f"row {number} of {path}")
        if len(row.prompt_ids) + len(row.completion_ids) > max_sequence_tokens:
            too_long += 1
        elif not any(row.loss_mask):
            untrainable += 1
        else:
            rows.append(row)
    if not rows:
        raise TrainingFailed(
            f"the batch {path} has {table.num_rows} rows and none to train on ({too_long} longer than "
            f"training.max_sequence_tokens = {max_sequence_tokens}, {untrainable} without a sampled token); "
            "raise targets.*.samples_per_round or look at the trajectories' errors"
        )
    return RewardedRows(rows, too_long, untrainable)


def _row(record: dict[str, Any], where: str) -> Row:
    lengths = {name: len(record[name]) for name in ("completion_ids", "loss_mask", "logprobs", "advantages")}
    if len(set(lengths.values())) != 1 or not record["prompt_ids"]:
        raise IntegrityError(
            f"{where}: {lengths} must have one length and prompt_ids ({len(record['prompt_ids'])}) must not be empty; "
            "materialize rewarded_batch again"
        )
    weight = record["weight"]
    advantages = [weight * value for value in record["advantages"]]
    if not all(math.isfinite(value) for value in (*record["logprobs"], *advantages)):
        raise IntegrityError(f"{where}: a logprob or an advantage is not finite; materialize rewarded_batch again")
    return Row(
        prompt_ids=record["prompt_ids"],
        completion_ids=record["completion_ids"],
        loss_mask=record["loss_mask"],
        logprobs=record["logprobs"],
        advantages=advantages,
        reward=record["reward"],
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which rows each forward pass sees.

    Each epoch deals all rows, in a seeded order, over `ceil(rows / batch_size)` optimizer steps as evenly as it goes:
    no row is dropped, no step is more than twice as large as another, none exceeds `batch_size`. Within a step, row i
    goes to rank i mod ranks. All forward passes of a round have the same number of slots, so that their means count
    alike; a slot without a row is empty.

    rows, epochs, batch_size, ranks   counts
    micro_batch_size                  most slots of one forward pass
    seed                              of the orders
    """

    rows: int
    batch_size: int
    micro_batch_size: int
    ranks: int = 1
    epochs: int = 1
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the rows."""
        return math.ceil(self.rows / self.batch_size)

    @property
    def steps(self) -> int:
        """Optimizer steps of the round."""
        return self.steps_per_epoch * self.epochs

    @property
    def _per_rank(self) -> int:
        return math.ceil(math.ceil(self.rows / self.steps_per_epoch) / self.ranks)

    @property
    def accumulation(self) -> int:
        """Forward passes of one optimizer step on one rank."""
        return math.ceil(self._per_rank / self.micro_batch_size)

    @property
    def slots(self) -> int:
        """Slots of one forward pass; even, because TRL wants at least two generations of a prompt in a batch."""
        return 2 * math.ceil(self._per_rank / self.accumulation / 2)

    def rows_of(self, step: int) -> list[int]:
        """The rows of optimizer step `step` (from 0), over all ranks."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = list(range(self.rows))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order[place * self.rows // self.steps_per_epoch : (place + 1) * self.rows // self.steps_per_epoch]

    def micro_batch(self, step: int, rank: int, micro: int) -> list[int | None]:
        """The row in each slot of one forward pass, None where the slot is empty."""
        mine: list[int | None] = list(self.rows_of(step)[rank :: self.ranks])
        mine += [None] * (self.slots * self.accumulation - len(mine))
        return mine[micro * self.slots : (micro + 1) * self.slots]


def collate(rows: Sequence[Row | None], *, pad_id: int) -> dict[str, Any]:
    """The tensors that TRL's `GRPOTrainer` computes its loss from; an empty slot has no token that counts.

    prompt_ids, prompt_mask           (B, P) int64, padded on the left
    completion_ids, completion_mask   (B, T) int64, padded on the right
    tool_mask                         (B, T) float32, 1 on the policy's own tokens
    advantages, old_per_token_logps   (B, T) float32
    """
    import torch

    filled = [row if row is not None else _empty(pad_id) for row in rows]
    prompts = max(len(row.prompt_ids) for row in filled)
    completions = max(len(row.completion_ids) for row in filled)

    def left(values: list[int], fill: int) -> list[int]:
        return [fill] * (prompts - len(values)) + list(values)

    def right(values: Sequence[float], fill: float) -> list[float]:
        return list(values) + [fill] * (completions - len(values))

    return {
        "prompt_ids": torch.tensor([left(row.prompt_ids, pad_id) for row in filled]),
        "prompt_mask": torch.tensor([left([1] * len(row.prompt_ids), 0) for row in filled]),
        "completion_ids": torch.tensor([right(row.completion_ids, pad_id) for row in filled]),
        "completion_mask": torch.tensor([right([1] * len(row.completion_ids), 0) for row in filled]),
        "tool_mask": torch.tensor([right(row.loss_mask, 0.0) for row in filled], dtype=torch.float32),
        "advantages": torch.tensor([right(row.advantages, 0.0) for row in filled], dtype=torch.float32),
        "old_per_token_logps": torch.tensor([right(row.logprobs, 0.0) for row in filled], dtype=torch.float32),
    }


def _empty(pad_id: int) -> Row:
    # One token on each side, attended to: a row that attends to nothing would make softmax return NaN.
    return Row([pad_id], [pad_id], [0], [0.0], [0.0], 0.0)
