"""From a trajectory with its reward to the rows that the trainer consumes."""

from collections.abc import Mapping, Sequence

from noria.contracts.call import CallTokens
from noria.contracts.errors import InvalidRecord
from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Trajectory
from noria.rollout.prefix_tree import paths


def sequences(
    trajectory: Trajectory,
    reward: float,
    advantage: float,
    components: Mapping[str, float],
    weight: float = 1.0,
) -> list[RewardedSequence]:
    """The trajectory's sampled tokens as rows: turns that continue each other in one row, others in rows of their own.

    Every token that the policy sampled stands in exactly one row under mask 1, with `advantage`; what stands between
    two turns of one row (tool and user tokens, template) has mask 0. `weight` goes to each row unchanged. Raises
    `InvalidRecord` for a trajectory with an error or without sampled tokens.
    """
    where = f"trajectory {trajectory.trace_id} (group {trajectory.group}, member {trajectory.member})"
    if trajectory.error is not None:
        raise InvalidRecord(f"{where} must not enter a batch: {trajectory.error}")
    turns = [step.tokens for step in trajectory.steps if step.sampled and step.tokens is not None]
    if not turns:
        raise InvalidRecord(f"{where} has no sampled tokens to train on")
    for turn in turns:
        if len(turn.logprobs) != len(turn.completion_token_ids):
            sizes = f"{len(turn.logprobs)} logprobs for {len(turn.completion_token_ids)} sampled tokens"
            raise InvalidRecord(f"{where} has {sizes}; each sampled token needs one")
    rows = []
    for path in paths(turns):
        prompt, completion, mask, logprobs = _merge([turns[index] for index in path])
        rows.append(
            RewardedSequence(
                round=trajectory.round,
                sample_id=trajectory.sample_id,
                group=trajectory.group,
                member=trajectory.member,
                trace_id=trajectory.trace_id,
                policy_version=trajectory.policy_version,
                prompt_ids=prompt,
                completion_ids=tuple(completion),
                loss_mask=tuple(mask),
                logprobs=tuple(logprobs),
                advantages=tuple(advantage if trained else 0.0 for trained in mask),
                reward=reward,
                weight=weight,
                components=dict(components),
            )
        )
    return rows


def _merge(path: Sequence[CallTokens]) -> tuple[tuple[int, ...], list[int], list[int], list[float]]:
    """Prompt of the first turn; then completion, mask and logprobs over everything after it."""
    prompt = path[0].prompt_token_ids
    completion: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for turn in path:
        between = turn.prompt_token_ids[len(prompt) + len(completion) :]
        completion += [*between, *turn.completion_token_ids]
        mask += [0] * len(between) + [1] * len(turn.completion_token_ids)
        logprobs += [0.0] * len(between) + list(turn.logprobs)
    return prompt, completion, mask, logprobs
