from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import CallTokens
from noria.contracts.errors import InvalidRecord
from noria.contracts.trajectory import Step, Trajectory
from noria.rollout.prefix_tree import parents, paths
from noria.rollout.sequences import sequences


def step(tokens: CallTokens | None, sampled: bool = True, node: str = "router") -> Step:
    return Step(node, "uid", "[]", "", "x", "", sampled, None if sampled else "exact", "v", "stop", tokens)


def trajectory(turns: Sequence[CallTokens], error: str | None = None) -> Trajectory:
    return Trajectory(
        round="shop.router.r00001",
        sample_id=1,
        group=2,
        member=3,
        trace_id="c" * 32,
        origin_trace_id="d" * 32,
        policy_version="shop.router.r00000",
        origin_request="",
        origin_response="",
        steps=(*map(step, turns), step(None, sampled=False, node="reply")),
        seed=4,
        error=error,
    )


def tokens(prompt: Sequence[int], completion: Sequence[int]) -> CallTokens:
    return CallTokens(tuple(prompt), tuple(completion), tuple(-0.1 * (k + 1) for k in range(len(completion))))


def test_turns_that_continue_each_other_become_one_sequence() -> None:
    made = sequences(
        trajectory([tokens([1, 2], [3, 4]), tokens([1, 2, 3, 4, 5, 6], [7])]), 1.0, 0.5, {"right": 1.0}, weight=2.0
    )
    (row,) = made
    assert row.prompt_ids == (1, 2)
    assert row.completion_ids == (3, 4, 5, 6, 7)
    assert row.loss_mask == (1, 1, 0, 0, 1)
    assert row.logprobs == (-0.1, -0.2, 0.0, 0.0, -0.1)
    assert row.advantages == (0.5, 0.5, 0.0, 0.0, 0.5)
    assert (row.reward, row.weight, row.components) == (1.0, 2.0, {"right": 1.0})
    assert (row.sample_id, row.group, row.member, row.trace_id) == (1, 2, 3, "c" * 32)


def test_turns_that_begin_anew_stay_apart() -> None:
    made = sequences(trajectory([tokens([1, 2], [3]), tokens([1, 2, 9], [4]), tokens([7], [8])]), 0.0, -1.0, {})
    assert [(row.prompt_ids, row.completion_ids) for row in made] == [((1, 2), (3,)), ((1, 2, 9), (4,)), ((7,), (8,))]


def test_a_branch_trains_no_token_twice() -> None:
    turns = [tokens([1], [2]), tokens([1, 2, 3], [4]), tokens([1, 2, 5], [6])]
    assert parents(turns) == (None, 0, 0)
    assert paths(turns) == ((0, 1), (2,))
    first, second = sequences(trajectory(turns), 1.0, 1.0, {})
    assert first.completion_ids == (2, 3, 4)
    assert (second.prompt_ids, second.completion_ids, second.loss_mask) == ((1, 2, 5), (6,), (1,))


def test_equal_turns_are_each_their_own_sequence() -> None:
    assert len(sequences(trajectory([tokens([1], [2]), tokens([1], [2])]), 1.0, 1.0, {})) == 2


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (trajectory([tokens([1], [2])], error="the agent is down"), "the agent is down"),
        (trajectory([]), "no sampled tokens"),
        (trajectory([CallTokens((1,), (2, 3), (-0.1,))]), "1 logprobs for 2 sampled tokens"),
    ],
)
def test_what_must_not_be_learned_from_is_refused(made: Trajectory, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said):
        sequences(made, 1.0, 1.0, {})


@st.composite
def _conversations(draw: st.DrawFn) -> list[CallTokens]:
    """Turns of an agent that goes on from any earlier point, or begins anew; with few ids prefixes meet by chance."""
    ids = st.lists(st.integers(0, 2), max_size=4)
    turns: list[CallTokens] = []
    for _ in range(draw(st.integers(1, 7))):
        before: tuple[int, ...] = ()
        if turns and draw(st.booleans()):
            earlier = draw(st.sampled_from(turns))
            before = earlier.prompt_token_ids + earlier.completion_token_ids
        completion = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        logprobs = draw(st.lists(st.floats(-9, -0.01), min_size=len(completion), max_size=len(completion)))
        turns.append(CallTokens((*before, *draw(ids)) or (0,), tuple(completion), tuple(logprobs)))
    return turns


@settings(deadline=None)
@given(_conversations(), st.floats(-3, 3))
def test_every_sampled_token_is_trained_on_exactly_once(turns: list[CallTokens], advantage: float) -> None:
    rows = sequences(trajectory(turns), 1.0, advantage, {})
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(turn.completion_token_ids) for turn in turns)
    trained = sorted(lp for row in rows for lp, mask in zip(row.logprobs, row.loss_mask, strict=True) if mask)
    assert trained == sorted(lp for turn in turns for lp in turn.logprobs)
    for row in rows:
        sizes = {len(row.completion_ids), len(row.loss_mask), len(row.logprobs), len(row.advantages)}
        assert len(sizes) == 1
        assert all(a == (advantage if mask else 0.0) for a, mask in zip(row.advantages, row.loss_mask, strict=True))
        assert all(mask or logprob == 0.0 for logprob, mask in zip(row.logprobs, row.loss_mask, strict=True))


@settings(deadline=None)
@given(_conversations())
def test_the_turns_can_be_cut_out_of_the_sequences_again(turns: list[CallTokens]) -> None:
    rows = sequences(trajectory(turns), 1.0, 1.0, {})
    for path, row in zip(paths(turns), rows, strict=True):
        whole = row.prompt_ids + row.completion_ids
        mask = (0,) * len(row.prompt_ids) + row.loss_mask
        logprobs = (0.0,) * len(row.prompt_ids) + row.logprobs
        for index in path:
            turn = turns[index]
            start = len(turn.prompt_token_ids)
            end = start + len(turn.completion_token_ids)
            assert whole[:start] == turn.prompt_token_ids, "the policy saw exactly this"
            assert whole[start:end] == turn.completion_token_ids
            assert logprobs[start:end] == turn.logprobs
            assert set(mask[start:end]) == {1}
        assert len(whole) == end


@settings(deadline=None)
@given(_conversations())
def test_each_turn_stands_in_one_path_and_after_its_parent(turns: list[CallTokens]) -> None:
    cut = paths(turns)
    assert sorted(index for path in cut for index in path) == list(range(len(turns)))
    assert all(list(path) == sorted(path) for path in cut)
