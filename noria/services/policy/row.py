"""One answer while it is being sampled: its prompt, its tokens so far, and who hears of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from noria.contracts.errors import PolicyUnavailable
from noria.services.policy.detokenize import TextStream
from noria.services.policy.sampling import Settings


class Weights(Protocol):
    """What the engine needs of a loaded version (`versions.Version`)."""

    path: Path
    device: torch.device
    eos_ids: frozenset[int]
    batchable: bool
    parameters: int

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    def new_cache(self) -> Any:
        """An empty KV cache."""
        ...

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits of the last position, (rows, vocabulary); the cache grows by `ids`."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """What a row has gained: one token of a streamed row, or everything once a row has ended."""

    token_ids: list[int]
    """Sampled ids, the end-of-sequence token included."""
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    text: str
    """Their text, without the end-of-sequence token, a stop string and what follows it."""
    finish_reason: str | None = None
    """`stop` or `length`; None while the row goes on."""
    error: PolicyUnavailable | None = None
    """Why the row has failed. Nothing follows."""


class Row:
    """One answer: a prompt, how to sample, and where progress goes.

    `sink` is called through the engine's `post`. `stream` asks for progress token by token.
    """

    def __init__(
        self,
        version: Weights,
        prompt_ids: Sequence[int],
        settings: Settings,
        sink: Callable[[Progress], None],
        *,
        stream: bool = False,
    ) -> None:
        self.version = version
        self.prompt_ids = tuple(prompt_ids)
        self.settings = settings
        self.cancelled = False
        self.ended = False
        self._sink = sink
        self._stream = stream
        self._random = settings.stream()
        self._gained = Progress([], [], [], "")
        self._count = 0
        # Text is followed token by token only where someone needs it before the end.
        self._text = TextStream(version.decode, settings.stop) if stream or settings.stop else None
        self._shown = ""

    def cancel(self) -> None:
        """Give up the answer: it leaves its batch before the next token, and its sink hears nothing more."""
        self.cancelled = True

    def uniform(self) -> float:
        """The next number of the row's random stream."""
        return self._random.random()

    def take(self, token: int, logprob: float, top: list[tuple[int, float]]) -> Progress | None:
        """Add a sampled token; returns what the sink should hear, if anything. Sets `ended` with the last one."""
        if logprob != logprob:
            return self.fail(
                PolicyUnavailable(
                    f"the logits of {self.version.path} are not numbers, so its weights are broken; "
                    "ask for another version or train this one again"
                )
            )
        self._count += 1
        gained = self._gained
        gained.token_ids.append(token)
        gained.logprobs.append(logprob)
        gained.top_logprobs.append(top)
        stopped = token in self.version.eos_ids
        reason = "stop" if stopped else None
        if self._text is not None and not stopped:
            text, stopped = self._text.push(token)
            self._shown += text
            if stopped:
                return self._end("stop")
        if reason is None and self._count >= self.settings.max_tokens:
            reason = "length"
        if reason is not None:
            if self._text is not None:
                text, stopped = self._text.finish()
                self._shown += text
                reason = "stop" if stopped else reason
            return self._end(reason)
        return self._hand_over(None) if self._stream else None

    def fail(self, error: PolicyUnavailable) -> Progress:
        """End the row with an error."""
        self.ended = True
        return Progress([], [], [], "", error=error)

    def deliver(self, progress: Progress) -> None:
        """Hand progress to the sink, unless the answer was given up."""
        if not self.cancelled:
            self._sink(progress)

    def _end(self, reason: str) -> Progress:
        self.ended = True
        if self._text is None:
            ids = self._gained.token_ids
            self._shown = self.version.decode(ids[:-1] if ids[-1] in self.version.eos_ids else ids)
        return self._hand_over(reason)

    def _hand_over(self, reason: str | None) -> Progress:
        gained = self._gained
        out = Progress(gained.token_ids, gained.logprobs, gained.top_logprobs, self._shown, reason)
        self._gained, self._shown = Progress([], [], [], ""), ""
        return out
