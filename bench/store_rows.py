"""How many calls the online store holds, asked with SQL of its own so that no reader of Noria's is trusted with it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

POLL_SECONDS = 0.02
QUIET_SECONDS = 1.0
"""A store that has enough rows and gets no more for this long has them all."""
PATIENCE_SECONDS = 60.0
"""A drain that has stored nothing for this long has failed."""


class RowsDiffer(RuntimeError):
    """The store holds other rows than calls were made."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the table `calls`, and how many distinct uids they have."""

    count: int
    distinct: int


class StoreRows:
    """A reader of one store, whose schema exists."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)

    def __enter__(self) -> "StoreRows":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.dispose()

    def count(self) -> int:
        """Rows now."""
        with self._engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM calls")).scalar_one())

    def rows(self) -> Rows:
        """Rows and distinct uids now."""
        with self._engine.connect() as connection:
            count, distinct = connection.execute(text("SELECT count(*), count(DISTINCT uid) FROM calls")).one()
            return Rows(int(count), int(distinct))

    def wait_for(self, calls: int) -> float:
        """Wait until that many rows are there; the seconds it took. Raises `RowsDiffer` if it comes to another number.

        Too few is told once nothing has been stored for `PATIENCE_SECONDS`, too many at once.
        """
        for count, seconds, still in self._counts():
            if count == calls:
                return seconds
            if count > calls:
                raise RowsDiffer(f"the store holds {count} rows after {calls} calls")
            if still > PATIENCE_SECONDS:
                raise RowsDiffer(f"the store holds {count} rows after {calls} calls, none came in {PATIENCE_SECONDS} s")
        raise AssertionError("the counts never end")

    def settle(self, at_least: int) -> float:
        """Wait until so many rows are there and no more come, or none come for `PATIENCE_SECONDS`.

        Returns the seconds until the last one came.
        """
        for count, seconds, still in self._counts():
            if still > (QUIET_SECONDS if count >= at_least else PATIENCE_SECONDS):
                return seconds - still
        raise AssertionError("the counts never end")

    def _counts(self) -> Iterator[tuple[int, float, float]]:
        """Rows, seconds since the start, seconds since the last row came; for ever."""
        began = time.monotonic()
        last, since = -1, began
        while True:
            try:
                count = self.count()
            except OperationalError:  # away, or SQLite busy with a checkpoint
                count = last
            now = time.monotonic()
            if count != last:
                last, since = count, now
            yield count, now - began, now - since
            time.sleep(POLL_SECONDS)
