"""Of answers that are put under one key at one time, one stays, and everyone is told that one."""

import threading
from collections.abc import Callable, Iterator

import pytest

from noria.stores.online import OnlineStore
from noria.stores.pinned_answers import PinnedAnswer, PinnedAnswers

Open = Callable[[], PinnedAnswers]


@pytest.fixture
def another(store_url: str) -> Iterator[Open]:
    """Opens the same store once more, as another process does."""
    stores = [OnlineStore(store_url)]
    stores[0].upgrade()

    def another() -> PinnedAnswers:
        stores.append(OnlineStore(store_url))
        return PinnedAnswers(stores[-1])

    yield another
    for store in stores:
        store.close()


def test_the_first_answer_under_a_key_stays(another: Open) -> None:
    one, two = another(), another()
    assert one.get("k") is None
    first = PinnedAnswer("u1", '{"é": "\\u0000 \\ud800"}', None)
    assert one.keep("k", first) == first
    assert two.keep("k", PinnedAnswer("u2", "{}", "v")) == first
    assert one.keep("k", first) == first
    assert two.get("k") == one.get("k") == first
    assert two.get("l") is None
    other = PinnedAnswer("u3", "x" * 200_000, "shop.reply.r00001")
    assert two.keep("l", other) == other


def test_writers_at_one_time_are_told_one_answer(another: Open) -> None:
    writers = [another() for _ in range(6)]
    start = threading.Barrier(len(writers))
    told: list[tuple[int, PinnedAnswer]] = []

    def write(number: int, answers: PinnedAnswers) -> None:
        for key in range(5):
            start.wait()
            told.append((key, answers.keep(f"k{key}", PinnedAnswer(f"u{number}", str(number), None))))

    threads = [threading.Thread(target=write, args=pair) for pair in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 5 * len(writers)
    for key in range(5):
        kept = writers[0].get(f"k{key}")
        assert {answer for of, answer in told if of == key} == {kept}
