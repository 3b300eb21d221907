import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from noria.contracts.errors import PolicyUnavailable
from noria.services.policy.engine import Engine
from noria.services.policy.row import Progress, Row
from noria.services.policy.sampling import Settings
from noria.services.policy.versions import Version


class Counts:
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.seconds = 0.0
        self.sampled = 0

    def batch(self, rows: int) -> None:
        self.batches.append(rows)

    def busy(self, seconds: float) -> None:
        self.seconds += seconds

    def tokens(self, completion: int) -> None:
        self.sampled += completion


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def engine(counts: Counts) -> Iterator[Engine]:
    engine = Engine(max_batch=16, batch_wait_ms=20, observer=counts)
    yield engine
    engine.close()


class Ear:
    """Collects what a row says and waits for its end."""

    def __init__(self) -> None:
        self.heard: list[Progress] = []
        self._ended = threading.Event()

    def __call__(self, progress: Progress) -> None:
        self.heard.append(progress)
        if progress.finish_reason or progress.error:
            self._ended.set()

    def end(self) -> Progress:
        assert self._ended.wait(60)
        return self.heard[-1]


def answers(engine: Engine, version: Version, asked: Sequence[tuple[list[int], Settings]]) -> list[Progress]:
    ears = [Ear() for _ in asked]
    engine.submit([Row(version, prompt, how, ear) for (prompt, how), ear in zip(asked, ears, strict=True)])
    return [ear.end() for ear in ears]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths, 1 to 90 tokens."""
    stream = random.Random(seed)
    return [[stream.randrange(3, 400) for _ in range(stream.choice([1, 3, 17, 40, 90]))] for _ in range(count)]


def recomputed(version: Version, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """Logprobs as a trainer computes them: one pass over prompt and completion, no cache, no padding."""
    with torch.no_grad():
        logits = version.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    whole = (logits / temperature).log_softmax(-1)
    return [float(whole[i, token]) for i, token in enumerate(completion)]


def test_logprobs_agree_with_a_forward_pass_of_the_trainer(engine: Engine, counts: Counts, version: Version) -> None:
    asked = [
        (prompt, Settings(max_tokens=5 + 3 * i, temperature=(1.0, 0.7)[i % 2], seed=i))
        for i, prompt in enumerate(prompts(16))
    ]
    for (prompt, how), answer in zip(asked, answers(engine, version, asked), strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) >= 1
        assert answer.logprobs == pytest.approx(
            recomputed(version, prompt, answer.token_ids, how.temperature), abs=1e-4
        )
    assert counts.batches == [16]


def test_greedy_answers_are_those_of_generate(engine: Engine, version: Version) -> None:
    asked = [(prompt, Settings(max_tokens=20, temperature=0.0)) for prompt in prompts(12, seed=1)]
    for (prompt, _), answer in zip(asked, answers(engine, version, asked), strict=True):
        ids = torch.tensor([prompt])
        expected = version.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert answer.token_ids == expected
        assert answer.logprobs == pytest.approx(recomputed(version, prompt, expected, 1.0), abs=1e-4)


def test_sampled_tokens_follow_the_model(version: Version) -> None:
    engine = Engine(max_batch=256, batch_wait_ms=20)
    prompt = prompts(1, seed=3)[0]
    count = 8_000
    got = answers(engine, version, [(prompt, Settings(max_tokens=1, seed=seed)) for seed in range(count)])
    engine.close()
    with torch.no_grad():
        expected = version.model(input_ids=torch.tensor([prompt])).logits[0, -1].double().softmax(0) * count
    seen = torch.bincount(torch.tensor([answer.token_ids[0] for answer in got]), minlength=len(expected)).double()
    rare = expected < 8  # chi-square wants cells that are not nearly empty
    seen = torch.cat([seen[~rare], seen[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    assert len(expected) > 20
    assert chisquare(seen.numpy(), expected.numpy()).pvalue > 0.001


def test_the_end_token_is_in_the_ids_and_not_in_the_text(engine: Engine, version: Version) -> None:
    eos = version.tokenizer.eos_token_id
    asked = [(prompt, Settings(max_tokens=64, seed=i)) for i, prompt in enumerate(prompts(64, seed=4))]
    got = answers(engine, version, asked)
    ended = [answer for answer in got if answer.finish_reason == "stop"]
    assert ended
    assert len(ended) < len(got)
    for answer in ended:
        assert answer.token_ids[-1] == eos
        assert eos not in answer.token_ids[:-1]
        assert answer.text == version.decode(answer.token_ids[:-1])
        assert "<|im_end|>" not in answer.text
    assert all(len(a.token_ids) == 64 and eos not in a.token_ids for a in got if a.finish_reason == "length")


def test_a_stop_string_ends_an_answer(engine: Engine, version: Version) -> None:
    prompt = prompts(1)[0]
    free = answers(engine, version, [(prompt, Settings(max_tokens=40, seed=1))])[0]
    stop = free.text[5:7]
    stopped = answers(engine, version, [(prompt, Settings(max_tokens=40, seed=1, stop=("nowhere", stop)))])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.find(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < len(free.token_ids)


def test_a_stream_tells_each_token(engine: Engine, version: Version) -> None:
    how = Settings(max_tokens=30, seed=2, top_logprobs=2)
    prompt = prompts(1)[0]
    ear = Ear()
    engine.submit([Row(version, prompt, how, ear, stream=True)])
    ear.end()
    whole = answers(engine, version, [(prompt, how)])[0]
    assert [progress.token_ids for progress in ear.heard] == [[token] for token in whole.token_ids]
    assert [logprob for progress in ear.heard for logprob in progress.logprobs] == whole.logprobs
    assert [top for progress in ear.heard for top in progress.top_logprobs] == whole.top_logprobs
    assert "".join(progress.text for progress in ear.heard) == whole.text


def test_equal_prompts_differ_by_seed_only(engine: Engine, version: Version) -> None:
    prompt = prompts(1)[0]
    asked = [(prompt, Settings(max_tokens=12, seed=seed % 4)) for seed in range(8)]
    got = answers(engine, version, [*asked, (prompts(2)[1], Settings(max_tokens=12, seed=0))])[:8]
    assert [a.token_ids for a in got[:4]] == [a.token_ids for a in got[4:]]
    assert len({tuple(a.token_ids) for a in got}) == 4
    for answer in got:
        assert answer.logprobs == pytest.approx(recomputed(version, prompt, answer.token_ids, 1.0), abs=1e-4)


def test_a_deterministic_answer_is_the_same_alone_and_in_a_crowd(
    engine: Engine, counts: Counts, version: Version
) -> None:
    prompt = prompts(1)[0]
    how = Settings(max_tokens=40, seed=11, deterministic=True)
    alone = answers(engine, version, [(prompt, how)])[0]
    counts.batches.clear()
    crowd = [(other, Settings(max_tokens=30, seed=i)) for i, other in enumerate(prompts(30, seed=6))]
    for place in (0, 7, 30):
        again = answers(engine, version, [*crowd[:place], (prompt, how), *crowd[place:]])[place]
        assert again == alone  # ids, and logprobs bit for bit
    assert 1 in counts.batches
    assert 16 in counts.batches


def test_an_error_fails_its_batch_and_no_other(
    engine: Engine, version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = answers(engine, version, [([399, 5_000], Settings(max_tokens=4)), ([5], Settings(max_tokens=4))])
    assert isinstance(bad.error, PolicyUnavailable)
    assert isinstance(good.error, PolicyUnavailable)
    assert "IndexError" in str(bad.error)
    assert "IndexError" in caplog.text
    assert engine.alive
    assert answers(engine, version, [([5], Settings(max_tokens=4))])[0].error is None


def test_a_listener_that_raises_harms_nobody_else(engine: Engine, version: Version) -> None:
    def broken(_: Progress) -> None:
        raise RuntimeError("nobody listens")

    ear = Ear()
    engine.submit([Row(version, [5], Settings(max_tokens=3), broken), Row(version, [5], Settings(max_tokens=3), ear)])
    assert ear.end().error is None
    assert engine.alive


def test_broken_weights_are_named(engine: Engine, model_dir: Path) -> None:
    broken = Version(model_dir)
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    answer = answers(engine, broken, [([5, 6], Settings(max_tokens=4))])[0]
    assert "not numbers" in str(answer.error)
    assert engine.alive


def test_versions_are_not_mixed_in_a_batch(engine: Engine, counts: Counts, version: Version, other_dir: Path) -> None:
    other = Version(other_dir)
    ears = [Ear() for _ in range(8)]
    how = Settings(max_tokens=10, seed=1)
    engine.submit([Row((version, other)[i % 2], [7, 8, 9], how, ear) for i, ear in enumerate(ears)])
    got = [ear.end().token_ids for ear in ears]
    assert sorted(counts.batches) == [4, 4]
    assert len({tuple(ids) for ids in got[::2]}) == len({tuple(ids) for ids in got[1::2]}) == 1
    assert got[0] != got[1]


def test_a_cancelled_row_leaves_its_batch(engine: Engine, counts: Counts, version: Version) -> None:
    first, gone, other = Ear(), Ear(), Ear()
    how = Settings(max_tokens=2_000, seed=1, stop=("never",))
    rows = [Row(version, [5], how, first, stream=True), Row(version, [6], how, gone, stream=True)]
    waiting = Row(version, [7], Settings(max_tokens=5, deterministic=True), other)
    engine.submit([*rows, waiting])
    while len(gone.heard) < 3:
        time.sleep(0.001)
    for row in [*rows, waiting]:
        row.cancel()
    assert answers(engine, version, [([5], Settings(max_tokens=2))])[0].error is None
    assert counts.batches == [2, 1]  # the one that waited was never begun
    assert other.heard == []
    assert counts.sampled < 2_000
    assert all(progress.finish_reason is None for progress in first.heard + gone.heard)


def test_closing_fails_what_is_running_and_waiting(version: Version) -> None:
    engine = Engine(batch_wait_ms=0)
    running, waiting = Ear(), Ear()
    how = Settings(max_tokens=2_000, seed=1, deterministic=True)
    engine.submit([Row(version, [5], how, running, stream=True), Row(version, [5], how, waiting)])
    while not running.heard:
        time.sleep(0.001)
    engine.close()
    assert "shutting down" in str(running.end().error)
    assert "shutting down" in str(waiting.end().error)
    assert not engine.alive
    with pytest.raises(PolicyUnavailable, match="shutting down"):
        engine.submit([Row(version, [5], how, Ear())])


def test_busy_seconds_are_those_of_computing(engine: Engine, counts: Counts, version: Version) -> None:
    answers(engine, version, [([5], Settings(max_tokens=2, seed=1))])  # warm
    before, begin = counts.seconds, time.monotonic()
    for _ in range(5):
        answers(engine, version, [([5, 6, 7], Settings(max_tokens=40, seed=1, deterministic=True))])
    elapsed = time.monotonic() - begin
    assert 0.5 * elapsed < counts.seconds - before <= elapsed


@pytest.mark.parametrize(("asked", "taken"), [(None, 1), (2, 2)])
def test_a_small_model_takes_one_thread_unless_told(version: Version, asked: int | None, taken: int) -> None:
    seen: queue.Queue[int] = queue.Queue()
    engine = Engine(threads=asked)
    # Sinks are called in the worker thread here, and threads are counted for the thread that asks.
    engine.submit([Row(version, [5], Settings(max_tokens=1), lambda _: seen.put(torch.get_num_threads()))])
    assert seen.get(timeout=60) == taken
    engine.close()


def test_an_idle_engine_costs_no_processor_time(engine: Engine, version: Version) -> None:
    answers(engine, version, [([5], Settings(max_tokens=2))])
    time.sleep(0.2)  # torch's threads spin for a while after work
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_the_engine_needs_neither_server_nor_transformers() -> None:
    code = (
        "import sys, noria.services.policy.engine; "
        "print([m for m in ('aiohttp', 'transformers', 'pydantic', 'dagster') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
