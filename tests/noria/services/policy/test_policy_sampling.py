import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from noria.services.policy.sampling import Sampler, Settings

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 2.0])


def draws(how: Settings, count: int) -> tuple[torch.Tensor, list[float]]:
    """Token counts over `count` rows with seeds 0, 1, 2, …, and the logprobs."""
    rows = [Settings(1, how.temperature, how.top_p, how.top_k, seed=seed) for seed in range(count)]
    drawn = Sampler(rows, CPU).draw(LOGITS.expand(count, -1), [row.stream().random() for row in rows])
    return torch.bincount(torch.tensor(drawn.token_ids), minlength=len(LOGITS)), drawn.logprobs


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 2.0])
def test_tokens_come_as_often_as_softmax_says(temperature: float) -> None:
    count = 20_000
    seen, _ = draws(Settings(1, temperature), count)
    expected = (LOGITS.double() / temperature).softmax(0) * count
    assert chisquare(seen.numpy(), expected.numpy()).pvalue > 0.001


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (Settings(1, top_k=3), [0, 7, 1]),
        (Settings(1, top_k=1), [0]),  # of the two equal ones the lower id
        (Settings(1, top_p=0.69), [0, 7]),  # 0.349 + 0.349 reach 0.69
        (Settings(1, top_p=0.7), [0, 7, 1]),  # but not 0.7
        (Settings(1, top_p=1e-6), [0]),
        # The four kept ones have 0.424, 0.424, 0.102, 0.050 of what top-k leaves.
        (Settings(1, 0.7, top_p=0.9, top_k=4), [0, 7, 1]),
    ],
)
def test_top_k_and_top_p_cut_and_renormalize(how: Settings, kept: list[int]) -> None:
    probabilities = (LOGITS.double() / how.temperature).softmax(0)
    seen, logprobs = draws(how, 5_000)
    expected = torch.zeros(len(LOGITS), dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert set(torch.nonzero(seen).flatten().tolist()) == set(kept)
    if len(kept) > 1:
        assert chisquare(seen[kept].numpy(), (expected[kept] * 5_000).numpy()).pvalue > 0.001
    assert {round(logprob, 4) for logprob in logprobs} == {round(float(expected[i].log()), 4) for i in kept}


def test_each_row_has_its_own_settings() -> None:
    rows = [Settings(1, 0.0, top_k=1), Settings(1, 1.0), Settings(1, 0.5, top_k=2), Settings(1, 1.0, top_logprobs=3)]
    uniforms = [0.99, 0.99, 0.99, 0.99]
    together = Sampler(rows, CPU).draw(LOGITS.expand(4, -1), uniforms)
    alone = [Sampler([row], CPU).draw(LOGITS.unsqueeze(0), [0.99]) for row in rows]
    assert together.token_ids == [one.token_ids[0] for one in alone] == [0, 7, 7, 7]
    assert together.logprobs == [one.logprobs[0] for one in alone]
    assert [len(top) for top in together.top] == [0, 0, 0, 3]
    whole = LOGITS.log_softmax(0)
    # Greedy: the logprob of the temperature-1 distribution, whatever top-k says.
    assert together.logprobs[0] == pytest.approx(float(whole[0]), abs=1e-6)
    assert dict(together.top[3]) == {i: pytest.approx(float(whole[i]), abs=1e-6) for i in (0, 7, 1)}


@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1e-9, 0.2, 0.9, 1.0]),
    top_k=st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_a_drawn_token_is_always_possible(
    logits: list[float], uniform: float, temperature: float, top_p: float, top_k: int
) -> None:
    how = Settings(1, temperature, top_p, top_k, top_logprobs=20)
    drawn = Sampler([how], CPU).draw(torch.tensor([logits]), [uniform])
    assert 0 <= drawn.token_ids[0] < len(logits)
    assert -100_000 < drawn.logprobs[0] <= 1e-6
    assert len(drawn.top[0]) <= (top_k or 50)


def test_a_number_just_below_one_takes_no_impossible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -float("inf"), -float("inf")]])
    drawn = Sampler([Settings(1)], CPU).draw(logits, [1 - 2**-53])
    assert drawn.token_ids == [1]


def test_seeds_are_reproducible_and_unrelated() -> None:
    assert Settings(1, seed=5).stream().random() == Settings(9, 0.3, seed=5).stream().random()
    assert Settings(1, seed=5).stream().random() != Settings(1, seed=5 + 2**32).stream().random()
    assert Settings(1, seed=5).stream().random() != Settings(1, seed=-5).stream().random()
    assert Settings(1).stream().random() != Settings(1).stream().random()
    first = torch.tensor([Settings(1, seed=seed).stream().random() for seed in range(10_000)])
    lagged = torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1]
    assert abs(float(lagged)) < 0.04
    assert chisquare(torch.histc(first, 20, 0, 1).numpy()).pvalue > 0.001


def test_the_streams_do_not_change_with_python() -> None:
    # A stored round is sampled again with the same seeds years later: Python promises this sequence.
    assert Settings(1, seed=0).stream().random() == random.Random("0").random() == 0.3616904771377427


def test_nan_shows_as_nan() -> None:
    logits = torch.stack([torch.full((8,), float("nan")), LOGITS])
    drawn = Sampler([Settings(1, seed=1), Settings(1, seed=2)], CPU).draw(logits, [0.5, 0.5])
    assert drawn.logprobs[0] != drawn.logprobs[0]
    assert drawn.logprobs[1] == drawn.logprobs[1]
