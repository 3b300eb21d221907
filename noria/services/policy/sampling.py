"""From logits to sampled tokens: all rows of a batch in one pass, each by its own settings and random stream.

A row is drawn by inverting the cumulative distribution at one uniform number of its own stream, so what it draws
depends on its logits and its seed, never on how many rows stand beside it. The uniforms come from the standard
library's Mersenne Twister seeded with the decimal text of the seed (through SHA-512): all 64 bits of a seed count and
neighbouring seeds are unrelated, where `torch.Generator` on a CPU keeps 32 bits of it.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-5
"""A temperature below this is 0, as in vLLM: dividing logits by it would overflow."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one answer is sampled. Ranges are checked where requests are read (`wire.py`)."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int | None = None
    """None draws a random one."""
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    """How many of the most probable tokens are returned beside each sampled one."""
    deterministic: bool = False
    """Whether the row is computed alone, so that nothing but request, seed and weights decides the answer."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < GREEDY_BELOW

    def stream(self) -> random.Random:
        """The row's own stream of uniform numbers."""
        return random.Random(str(secrets.randbits(63) if self.seed is None else self.seed))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token for each row of a batch."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural logarithm of each token's probability under the distribution that it was drawn from; for temperature 0
    under that of temperature 1. NaN where the logits hold a NaN."""
    top: list[list[tuple[int, float]]]
    """The most probable tokens of each row with their logprobs, as many as its settings ask for."""


class Sampler:
    """The settings of the rows of one batch as tensors; made anew when rows leave."""

    def __init__(self, rows: Sequence[Settings], device: torch.device) -> None:
        # A greedy row reports the logprobs of temperature 1, whole vocabulary.
        temperatures = [1.0 if row.greedy else row.temperature for row in rows]
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=device).unsqueeze(1)
        self._tempered = any(temperature != 1.0 for temperature in temperatures)
        self._greedy = torch.tensor([row.greedy for row in rows], dtype=torch.bool, device=device)
        self._any_greedy = any(row.greedy for row in rows)
        cut = [i for i, row in enumerate(rows) if not row.greedy and (row.top_k > 0 or row.top_p < 1.0)]
        self._cut = torch.tensor(cut, dtype=torch.long, device=device) if cut else None
        self._top_k = torch.tensor([rows[i].top_k for i in cut], dtype=torch.long, device=device)
        self._top_p = torch.tensor([rows[i].top_p for i in cut], dtype=torch.float64, device=device)
        self._top = [row.top_logprobs for row in rows]

    def draw(self, logits: torch.Tensor, uniforms: Sequence[float]) -> Drawn:
        """Sample one token for each row.

        `logits`: (rows, vocabulary), any floating type; `uniforms`: one number in [0, 1) a row.
        """
        scaled = logits.to(torch.float32)
        if self._tempered:
            scaled = scaled / self._temperature
        if self._cut is not None:
            scaled = scaled.index_copy(0, self._cut, cut_tail(scaled[self._cut], self._top_k, self._top_p))
        logprobs = scaled.log_softmax(-1)
        cumulative = logprobs.exp().to(torch.float64).cumsum_(-1)
        total = cumulative[:, -1:]
        # Below the total even where a uniform just under 1 rounds up to it: then the token found has probability > 0.
        point = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1) * total
        point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
        drawn = torch.searchsorted(cumulative, point, right=True)
        drawn.clamp_(max=logits.shape[-1] - 1)  # only a NaN leads beyond the vocabulary
        if self._any_greedy:
            drawn = torch.where(self._greedy.unsqueeze(1), scaled.argmax(-1, keepdim=True), drawn)
        chosen = logprobs.gather(1, drawn)
        return Drawn(drawn.squeeze(1).tolist(), chosen.squeeze(1).tolist(), self._most_probable(logprobs))

    def _most_probable(self, logprobs: torch.Tensor) -> list[list[tuple[int, float]]]:
        widest = min(max(self._top), logprobs.shape[-1])
        if widest == 0:
            return [[] for _ in self._top]
        values, ids = logprobs.topk(widest, dim=-1)
        pairs = (list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
        # Tokens that top-k or top-p cut off have no finite logprob.
        return [[pair for pair in row[:n] if pair[1] > -torch.inf] for row, n in zip(pairs, self._top, strict=True)]


def cut_tail(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set the logits outside top-k and top-p to minus infinity; the most probable token always stays.

    `scaled`: (rows, vocabulary), already divided by the temperature; `top_k`: (rows,), 0 for the whole vocabulary;
    `top_p`: (rows,). Top-k is applied first and top-p to what it leaves, as in vLLM and transformers; among equal
    logits the lower token id stays. Nucleus sampling is of Holtzman et al. 2020.
    """
    vocabulary = scaled.shape[-1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocabulary).unsqueeze(1)
    rank = torch.arange(vocabulary, device=scaled.device).unsqueeze(0)
    ordered = ordered.masked_fill(rank >= k, -torch.inf)
    probabilities = ordered.to(torch.float64).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    drop = (before >= top_p.unsqueeze(1)) & (rank > 0)
    return torch.empty_like(scaled).scatter_(1, order, ordered.masked_fill(drop, -torch.inf))
