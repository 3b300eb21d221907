"""The recordings as fixtures; where they cannot be had, a test is skipped on a desk and fails in CI."""

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.recordings.cassettes import Recorded, recorded_calls
from tests.recordings.download import NotDownloaded, download


@pytest.fixture(scope="session")
def recordings() -> list[Recorded]:
    """Every HTTP call of every cassette, those to other APIs included."""
    try:
        paths = download()
    except NotDownloaded as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    return list(recorded_calls(paths))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Counter[str]], None]:
    """Prints counts even where pytest captures what a test prints."""

    def show(title: str, counts: Counter[str]) -> None:
        with capsys.disabled():
            found = ", ".join(f"{name}: {count}" for name, count in counts.most_common() if count)
            print(f"\n  {title}: {found}", end="")  # noqa: T201

    return show
