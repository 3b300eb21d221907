"""Does a reader that follows the store by id miss a row? `python -m bench.follow --rows 1000000`.

Two processes write to one PostgreSQL through `OnlineStore.add_calls`, as two proxies do. A third is a program that
knows nothing of Noria's writers: it inserts a row, waits, and commits late. This process follows by id and counts every
row of every writer: each must come once and in its writer's order. Exits with 1 if a row was skipped or came twice.

`--unordered` takes away what orders the third writer (the trigger of migration v0002): then rows become visible below
what has been read, and a reader that only remembers the last id misses them. It shows that this program would notice.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, func, select
from tqdm import tqdm

from bench.postgres import Postgres
from noria.contracts.call import Arm, Call, CallStatus
from noria.stores.online import OnlineStore
from noria.stores.tables import call_to_row, calls

WRITERS = 2
LATE = "late"
LATE_SHARE = 0.001
"""Rows of the writer that takes no turns; each of its transactions stays open for `LATE_SECONDS`."""
LATE_LEAST = 20
LATE_SECONDS = 0.05
MOST_IN_A_BATCH = 400
READ_AT_ONCE = 5000
PATIENCE_SECONDS = 120.0


@dataclass(slots=True)
class Seen:
    """What the reader has seen, by writer: rows in order, and what went wrong."""

    rows: int = 0
    skipped: int = 0
    twice: int = 0
    last_id: int = 0
    _next: dict[str, int] = field(default_factory=dict[str, int])

    def take(self, call: Call) -> None:
        """Count one row; its uid is `<writer>-<number>`."""
        writer, _, number = call.uid.partition("-")
        expected, found = self._next.get(writer, 0), int(number)
        self.twice += found < expected or (call.id or 0) <= self.last_id
        self.skipped += max(0, found - expected)
        self.rows += found >= expected
        self._next[writer] = max(expected, found + 1)
        self.last_id = max(self.last_id, call.id or 0)


@dataclass(frozen=True, slots=True)
class Followed:
    """The outcome; `naive_missing` are the rows that the reader by id alone never saw."""

    written: int
    read: int
    skipped: int
    twice: int
    naive_missing: int
    seconds: float

    @property
    def missing(self) -> int:
        """Rows that were committed and that the reader never saw."""
        return self.written - self.read

    @property
    def exact(self) -> bool:
        """Whether every row came, once."""
        return self.missing == self.skipped == self.twice == 0


def follow(url: str, rows: int, *, ordered: bool = True, bar: "tqdm[Any] | None" = None) -> Followed:
    """Write `rows` rows to a store without rows at `url`, in three processes, and follow them."""
    store = OnlineStore(url)
    store.upgrade()
    late = max(LATE_LEAST, int(rows * LATE_SHARE))
    shares = {f"w{n}": (rows - late) // WRITERS + (n < (rows - late) % WRITERS) for n in range(WRITERS)}
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(WRITERS + 1)
    processes = [context.Process(target=_write, args=(url, name, count, ready)) for name, count in shares.items()]
    processes.append(context.Process(target=_write_late, args=(url, late, ready, ordered)))
    begun = time.monotonic()
    for process in processes:
        process.start()
    seen, naive = Seen(), NaiveReader(url)
    last_news = time.monotonic()
    while seen.rows < rows and time.monotonic() - last_news < PATIENCE_SECONDS:
        finished = not any(process.is_alive() for process in processes)
        found = store.calls_after(seen.last_id, READ_AT_ONCE, with_tokens=False)
        naive.read()
        for call in found:
            seen.take(call)
        if found:
            last_news = time.monotonic()
            if bar is not None:
                bar.update(len(found))
        elif finished:
            break
        else:
            time.sleep(0.002)
    for process in processes:
        process.join()
    seconds = time.monotonic() - begun
    naive.read()
    written = store.count_calls()
    naive.close()
    store.close()
    if written != rows:
        raise RuntimeError(f"{written} rows were written of {rows}; a writer failed: its traceback stands above")
    return Followed(written, seen.rows, seen.skipped, seen.twice, written - naive.rows, seconds)


class NaiveReader:
    """Remembers the last id and asks for what lies above: what a reader without the store's rule would do."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        self._last = 0
        self.rows = 0

    def read(self) -> None:
        """Take what is there."""
        with self._engine.connect() as connection:
            ids = connection.scalars(select(calls.c.id).where(calls.c.id > self._last).order_by(calls.c.id)).all()
        self.rows += len(ids)
        self._last = ids[-1] if ids else self._last

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()


def _calls(writer: str, count: int) -> Iterator[Call]:
    for n in range(count):
        now = datetime.now(UTC)
        yield Call(
            uid=f"{writer}-{n}",
            tenant="default",
            app="bench",
            process_node="node",
            trace_id=f"{writer}-{n // 4}",
            model_name="m",
            policy_version=None,
            arm=Arm.LIVE,
            input='{"messages": [{"role": "user", "content": "how many rows are there?"}]}',
            output='{"choices": [{"index": 0, "message": {"role": "assistant", "content": "many"}}]}',
            status=CallStatus.OK,
            request_time=now,
            response_time=now,
            duration_ms=1.0,
        )


def _write(url: str, writer: str, count: int, ready: Barrier) -> None:
    chance = random.Random(writer)
    store = OnlineStore(url)
    batch: list[Call] = []
    ready.wait()
    size = chance.randint(1, MOST_IN_A_BATCH)
    for call in _calls(writer, count):
        batch.append(call)
        if len(batch) == size:
            store.add_calls(batch)
            batch, size = [], chance.randint(1, MOST_IN_A_BATCH)
    store.add_calls(batch)
    store.close()


def _write_late(url: str, count: int, ready: Barrier, ordered: bool) -> None:
    engine = create_engine(url)
    insert = calls.insert().returning(calls.c.id)
    ready.wait()
    for call in _calls(LATE, count):
        with engine.begin() as late, engine.connect() as other:
            if not ordered:
                late.exec_driver_sql("SET LOCAL session_replication_role = replica")
            own_id = late.execute(insert, call_to_row(call)).scalar_one()
            deadline = time.monotonic() + LATE_SECONDS
            while _highest_id(other) < own_id and time.monotonic() < deadline:
                time.sleep(0.002)
            if not ordered:
                time.sleep(LATE_SECONDS)  # others have committed above it; now readers have time to see that
        time.sleep(LATE_SECONDS)
    engine.dispose()


def _highest_id(connection: Connection) -> int:
    highest = connection.execute(select(func.coalesce(func.max(calls.c.id), 0))).scalar_one()
    connection.rollback()
    return int(highest)


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--url", help="an empty PostgreSQL database; by default a server of its own is started")
    parser.add_argument("--unordered", action="store_true", help="let the third writer commit out of order")
    given = parser.parse_args()
    with ExitStack() as stack:
        url = given.url
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="noria-follow-")))
            url = stack.enter_context(Postgres(folder / "data")).url
        with tqdm(total=given.rows, unit="row", mininterval=1.0) as bar:
            result = follow(url, given.rows, ordered=not given.unordered, bar=bar)
    print(f"rows written      {result.written}")
    print(f"rows read         {result.read}")
    print(f"skipped           {result.missing + result.skipped}")
    print(f"twice             {result.twice}")
    print(f"seconds           {result.seconds:.1f} ({result.written / result.seconds:.0f} rows/s)")
    print(f"skipped by a reader of ids alone {result.naive_missing}")
    return 0 if result.exact and not result.naive_missing else 1


if __name__ == "__main__":
    sys.exit(main())
