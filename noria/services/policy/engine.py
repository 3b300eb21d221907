"""The decode loop: one worker thread that answers requests in micro-batches, one version of the model at a time.

Requests for the same version that arrive within `batch_wait_ms` of each other are decoded together, up to `max_batch`
rows: prompts padded on the left, one KV cache, one forward pass a token. Equal prompts (a rollout group) are prefilled
once. A row that ends leaves the batch at once; a new one waits for the next batch, which keeps batches full when many
short answers are asked for at the same time. For long answers to many users use vLLM, which speaks the same wire.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from noria.contracts.errors import PolicyUnavailable
from noria.services.policy.row import Progress, Row, Weights
from noria.services.policy.sampling import Sampler

log = logging.getLogger(__name__)

SMALL_MODEL = 50_000_000
"""Below so many parameters a second thread gains little, and loses much where cores are shared: its barriers wait for
whichever was descheduled. Forward passes of a 2M model at batch 16 on two quiet cores: 4,100 and 4,800 tokens/s with
one and two threads; the whole engine beside five busy processes: 2,100 and 390."""

_CLOSING = "the policy server is shutting down; ask again when it is back"
_DEAD = "the engine's worker thread has died; the log says why, restart the policy server"


class Observer(Protocol):
    """What is counted while the engine runs; called in the worker thread."""

    def batch(self, rows: int) -> None:
        """A batch of so many rows begins."""
        ...

    def busy(self, seconds: float) -> None:
        """The model was computing for so long."""
        ...

    def tokens(self, completion: int) -> None:
        """So many tokens were sampled."""
        ...


class Engine:
    """Answers rows on one worker thread; see the module's docstring.

    `post` runs a callback where sinks may be called, such as an event loop's `call_soon_threadsafe`; by default the
    worker thread itself. `threads` is torch's number of threads, for the whole process; None takes one for models below
    `SMALL_MODEL` parameters and torch's default for others.
    """

    def __init__(
        self,
        *,
        max_batch: int = 16,
        batch_wait_ms: float = 4.0,
        threads: int | None = None,
        observer: Observer | None = None,
        post: Callable[[Callable[[], None]], object] = lambda callback: callback(),
    ) -> None:
        self._max_batch = max_batch
        self._wait = batch_wait_ms / 1000
        self._threads = threads
        self._observer = observer
        self._post = post
        self._queue: deque[Row] = deque()
        self._arrived = threading.Condition()
        self._closing = False
        self._ending = _CLOSING
        self._worker = threading.Thread(target=self._work, name="noria-policy-engine", daemon=True)
        self._worker.start()

    @property
    def alive(self) -> bool:
        """Whether the worker thread runs."""
        return self._worker.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        """How many rows wait for a batch."""
        return len(self._queue)

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue rows. Raises `PolicyUnavailable` once the engine is closed."""
        with self._arrived:
            if not self.alive:
                raise PolicyUnavailable(self._ending)
            self._queue.extend(rows)
            self._arrived.notify()

    def close(self) -> None:
        """End the worker after its current token; rows still waiting or running fail. Waits for the thread."""
        with self._arrived:
            self._closing = True
            self._arrived.notify()
        self._worker.join()

    def _work(self) -> None:
        try:
            default = torch.get_num_threads()
            while batch := self._next_batch():
                small = batch[0].version.parameters < SMALL_MODEL
                threads = self._threads or (1 if small else default)
                if torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)
                self._answer(batch)
                batch.clear()  # or an evicted version would stay in memory for as long as nothing is asked
        except BaseException:
            self._ending = _DEAD
            log.critical(_DEAD, exc_info=True)
        with self._arrived:
            self._closing = True
            left = list(self._queue)
            self._queue.clear()
        self._tell([(row, row.fail(PolicyUnavailable(self._ending))) for row in left])

    def _next_batch(self) -> list[Row]:
        """Wait for rows that can be decoded together; the oldest decides the version. Empty when closing."""
        with self._arrived:
            while True:
                while not self._queue and not self._closing:
                    self._arrived.wait()
                if self._closing:
                    return []
                first = self._queue[0]
                deadline = time.monotonic() + self._wait
                while not _alone(first) and not self._closing:
                    left = deadline - time.monotonic()
                    if left <= 0 or sum(_fits(row, first) for row in self._queue) >= self._max_batch:
                        break
                    self._arrived.wait(left)
                batch: list[Row] = []
                rest: deque[Row] = deque()
                for row in self._queue:
                    if row.cancelled:
                        continue
                    taken = row is first or (len(batch) < self._max_batch and _fits(row, first))
                    (batch if taken else rest).append(row)
                self._queue = rest
                if batch:
                    return batch

    def _answer(self, rows: list[Row]) -> None:
        """Decode one batch to its end. An error fails these rows and no others."""
        if self._observer is not None:
            self._observer.batch(len(rows))
        try:
            with torch.inference_mode():
                self._decode(rows)
        except BaseException as error:
            log.exception("a batch of %d rows of %s has failed", len(rows), rows[0].version.path)
            reason = f"{type(error).__name__}: {error}"
            failure = PolicyUnavailable(
                f"the model failed on this batch ({reason}); the server's log has the traceback"
            )
            self._tell([(row, row.fail(failure)) for row in rows if not row.ended])
            if rows[0].version.device.type == "cuda":
                torch.cuda.empty_cache()  # after running out of memory the next batch needs what this one had cached

    def _decode(self, rows: list[Row]) -> None:
        clock = time.monotonic()
        version = rows[0].version
        cache = version.new_cache()
        logits, mask = _prefill(version, rows, cache)
        length = int(mask.shape[1])
        padded = bool((mask == 0).any())
        # Ones for the tokens to come, so that each step's mask is a view of this one.
        longest = max(row.settings.max_tokens for row in rows)
        mask = torch.cat([mask, mask.new_ones((len(rows), longest))], dim=1)
        positions = mask[:, :length].sum(1, keepdim=True)
        sampler = Sampler([row.settings for row in rows], version.device)
        while True:
            drawn = sampler.draw(logits, [row.uniform() for row in rows])
            news: list[tuple[Row, Progress]] = []
            for row, token, logprob, top in zip(rows, drawn.token_ids, drawn.logprobs, drawn.top, strict=True):
                if not row.cancelled and (progress := row.take(token, logprob, top)) is not None:
                    news.append((row, progress))
            self._tell(news)
            keep = [i for i, row in enumerate(rows) if not row.ended and not row.cancelled]
            now = time.monotonic()
            if self._observer is not None:
                self._observer.busy(now - clock)
                self._observer.tokens(len(rows))
            clock = now
            if not keep:
                return
            if self._closing:
                self._tell([(rows[i], rows[i].fail(PolicyUnavailable(_CLOSING))) for i in keep])
                return
            if len(keep) < len(rows):
                index = torch.tensor(keep, device=version.device)
                cache.batch_select_indices(index)
                mask, positions = mask[index], positions[index]
                rows[:] = [rows[i] for i in keep]
                sampler = Sampler([row.settings for row in rows], version.device)
            length += 1
            ids = torch.tensor([[drawn.token_ids[i]] for i in keep], device=version.device)
            logits = version.forward(ids, mask[:, :length] if padded else None, positions, cache)
            positions = positions + 1

    def _tell(self, news: list[tuple[Row, Progress]]) -> None:
        if not news:
            return

        def deliver() -> None:
            for row, progress in news:
                try:
                    row.deliver(progress)
                except Exception:
                    log.exception("a listener failed; its answer is given up")
                    row.cancel()

        try:
            self._post(deliver)
        except RuntimeError:
            log.exception("progress of %d rows could not be delivered", len(news))  # the event loop has ended


def _alone(row: Row) -> bool:
    return row.settings.deterministic or not row.version.batchable


def _fits(row: Row, first: Row) -> bool:
    """Whether a row can be decoded in one batch with the oldest one."""
    return row.version is first.version and not _alone(row) and not _alone(first) and not row.cancelled


def _prefill(version: Weights, rows: Sequence[Row], cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the prompts; returns the next token's logits, (rows, vocabulary), and the padding mask, (rows, length)."""
    distinct: dict[tuple[int, ...], int] = {}
    index = [distinct.setdefault(row.prompt_ids, len(distinct)) for row in rows]
    length = max(len(prompt) for prompt in distinct)
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in distinct], device=version.device)
    mask = torch.tensor(
        [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in distinct], device=version.device
    )
    positions = (mask.cumsum(1) - 1).clamp_(min=0)
    whole = all(len(prompt) == length for prompt in distinct)
    logits = version.forward(ids, None if whole else mask, positions, cache)
    if len(distinct) < len(rows):
        where = torch.tensor(index, device=version.device)
        cache.batch_select_indices(where)
        logits, mask = logits[where], mask[where]
    return logits, mask
