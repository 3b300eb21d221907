import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.errors import InvalidRecord
from noria.release.statistics import accuracy_interval, fewest_differences, mean_interval, paired_difference

SETTINGS = {"confidence": 0.95, "resamples": 500, "seed": 3}

_scores = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]) | st.floats(0, 1), min_size=1, max_size=12)
_pairs = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12)


@settings(deadline=None)
@given(_pairs)
def test_the_interval_holds_the_mean_and_stays_within_the_differences(pairs: list[tuple[float, float]]) -> None:
    candidate, baseline = [c for c, _ in pairs], [b for _, b in pairs]
    found = paired_difference(candidate, baseline, **SETTINGS)
    differences = np.array(candidate) - np.array(baseline)
    assert found.mean == pytest.approx(differences.mean())
    assert found.low <= found.mean <= found.high
    assert differences.min() - 1e-12 <= found.low
    assert found.high <= differences.max() + 1e-12


@settings(deadline=None)
@given(_scores)
def test_a_version_against_itself_differs_by_exactly_nothing(scores: list[float]) -> None:
    found = paired_difference(scores, scores, **SETTINGS)
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


@settings(deadline=None)
@given(_scores, st.floats(0.5001, 0.9999))
def test_wilson_holds_the_share_and_stays_between_0_and_1(scores: list[float], confidence: float) -> None:
    found = accuracy_interval(scores, confidence=confidence)
    assert 0.0 <= found.low <= found.mean <= found.high <= 1.0
    assert found.low < found.high, "even none of n, or all of n, leave a doubt"


def test_equal_scores_give_an_interval_without_width_and_without_a_warning() -> None:
    found = mean_interval([0.5] * 10, **SETTINGS)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    assert mean_interval([1.0], **SETTINGS).low == 1.0


def test_differences_that_are_rounding_only_give_a_finite_interval() -> None:
    found = mean_interval([0.5, 0.5 + 1e-16, 0.5, 0.5 + 2e-16], **SETTINGS)
    assert math.isfinite(found.low)
    assert math.isfinite(found.high)


def test_the_seed_decides_the_interval() -> None:
    scores = list(np.random.default_rng(0).random(40))
    assert mean_interval(scores, **SETTINGS) == mean_interval(scores, **SETTINGS)
    assert mean_interval(scores, **SETTINGS) != mean_interval(scores, **{**SETTINGS, "seed": 4})


def test_pairing_narrows_the_interval() -> None:
    chance = np.random.default_rng(1)
    hardness = chance.random(100)
    candidate = np.clip(hardness + 0.05, 0, 1)
    paired = paired_difference(list(candidate), list(hardness), **SETTINGS)
    alone = mean_interval(list(candidate), **SETTINGS)
    assert paired.high - paired.low < 0.2 * (alone.high - alone.low)


def test_the_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(2)
    covered = 0
    for seed in range(200):
        found = mean_interval(list(chance.beta(2, 5, 60)), confidence=0.9, resamples=400, seed=seed)
        covered += found.low <= 2 / 7 <= found.high
    assert 0.83 < covered / 200 < 0.96


def test_wilson_agrees_with_the_published_example() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I: 81 of 263 gives 0.2553 to 0.3662.
    found = accuracy_interval([1.0] * 81 + [0.1] * 182, confidence=0.95)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize(("confidence", "fewest"), [(0.95, 6), (0.9, 5), (0.99, 8), (0.6, 3), (0.75, 3)])
def test_fewest_differences_is_where_the_sign_test_can_first_be_significant(confidence: float, fewest: int) -> None:
    assert fewest_differences(confidence) == fewest
    assert 2 * 0.5**fewest <= 1 - confidence + 1e-9
    assert 2 * 0.5 ** (fewest - 1) > 1 - confidence


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_told_with_its_place(bad: float) -> None:
    with pytest.raises(InvalidRecord, match="candidate 1 is"):
        paired_difference([0.0, bad], [0.0, 0.0], **SETTINGS)
    with pytest.raises(InvalidRecord, match="score 0 is"):
        accuracy_interval([bad], confidence=0.95)


def test_nothing_to_compare_is_told() -> None:
    with pytest.raises(InvalidRecord, match="no items"):
        mean_interval([], **SETTINGS)
    with pytest.raises(InvalidRecord, match="no items"):
        paired_difference([], [], **SETTINGS)
    with pytest.raises(InvalidRecord, match="2 candidate scores for 1"):
        paired_difference([0.0, 1.0], [0.0], **SETTINGS)
