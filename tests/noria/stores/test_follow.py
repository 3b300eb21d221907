import pytest

from bench.follow import follow

pytestmark = pytest.mark.postgres


def test_two_writers_and_one_that_commits_late_lose_no_row_to_a_reader(postgres_url: str) -> None:
    result = follow(postgres_url, 20_000)
    assert result.exact, result
    assert result.read == 20_000
    assert result.naive_missing == 0, "the order of the ids is the database's, whatever the reader does"


def test_the_same_notices_rows_that_become_visible_out_of_order(postgres_url: str) -> None:
    assert follow(postgres_url, 6000, ordered=False).naive_missing > 0
