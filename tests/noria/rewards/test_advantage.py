import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.errors import InvalidRecord
from noria.rewards.advantage import group_advantages

# Multiples of 1/64 are exact in binary, so that shifting them loses no digits.
rewards = st.integers(-640, 640).map(lambda n: n / 64)
batches = st.lists(st.tuples(rewards, st.integers(0, 4)), max_size=40)


@settings(deadline=None)  # other processes share the machine
@given(batches, st.booleans())
def test_advantages_of_a_group_sum_to_zero(batch, scale):
    advantages = group_advantages([r for r, _ in batch], [g for _, g in batch], scale=scale)
    for group in {g for _, g in batch}:
        members = [a for a, (_, g) in zip(advantages, batch, strict=True) if g == group]
        assert math.fsum(members) == pytest.approx(0.0, abs=1e-8)


@settings(deadline=None)
@given(batches, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(batch, scale, rng: random.Random):
    order = list(range(len(batch)))
    rng.shuffle(order)
    plain = group_advantages([r for r, _ in batch], [g for _, g in batch], scale=scale)
    shuffled = group_advantages([batch[i][0] for i in order], [batch[i][1] for i in order], scale=scale)
    assert shuffled == pytest.approx([plain[i] for i in order])


@settings(deadline=None)
@given(batches, st.booleans(), st.integers(-100, 100))
def test_adding_a_constant_to_every_reward_changes_nothing(batch, scale, constant):
    groups = [g for _, g in batch]
    plain = group_advantages([r for r, _ in batch], groups, scale=scale)
    assert group_advantages([r + constant for r, _ in batch], groups, scale=scale) == pytest.approx(plain, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.booleans())
def test_a_uniform_group_gives_exactly_zero(values, scale):
    assert group_advantages([values[0]] * len(values), [3] * len(values), scale=scale) == [0.0] * len(values)


def test_it_is_the_definition_that_trl_uses():
    import torch

    values = torch.tensor([1.0, 0.1, 0.0, 0.1])
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert group_advantages([1.0, 0.1, 0.0, 0.1], [7] * 4) == pytest.approx(expected.tolist(), rel=1e-5)


def test_without_scaling_it_is_the_difference_to_the_mean():
    assert group_advantages([1.0, 0.0, 5.0], [0, 0, 1], scale=False) == [0.5, -0.5, 0.0]


def test_what_cannot_be_compared_is_an_error():
    with pytest.raises(InvalidRecord, match="2 rewards for 1 group"):
        group_advantages([1.0, 0.0], [0])
    with pytest.raises(InvalidRecord, match="reward 1 of group 4 is nan"):
        group_advantages([1.0, math.nan], [4, 4])
