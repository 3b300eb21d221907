"""Does a killed proxy lose a call? `python -m bench.durability --calls 50000 --kills 5`.

Clients call a real proxy at full speed, each call with content of its own, some of them streams. The proxy is killed
(SIGKILL) at random instants and started again; with `--postgres-outage 60` the database is stopped for so long in the
middle. After the drain every call whose whole answer has reached a client must be in the store exactly once, with its
uid and its content, and the proxy's memory must be back where it was. Exit code 1 if anything of that is not so.

A kill ends a process, not the machine: what it has written is in the kernel's page cache and survives, whatever
`proxy.spool_fsync` says.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import uvloop
from tqdm import tqdm

from bench.durability_check import Verdict, compare
from bench.durability_clients import Clients
from bench.memory import Memory, Watch, memory_of
from bench.postgres import Postgres
from bench.processes import Server, cache_folder, free_port, mock_upstream, noria_proxy
from bench.store_rows import StoreRows
from noria.contracts.call import Call
from noria.stores.bodies import Bodies
from noria.stores.online import OnlineStore

MEMORY_SLACK_MB = 20.0
SETTLE_SECONDS = 10.0
"""How long after the drain the memory may take to be back, and an orphaned writer to end."""
STALL_SECONDS = 60.0
"""A run in which no answer arrives for this long has failed."""
_KILLS_BETWEEN = (0.05, 0.95)
_KILL_JITTER_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to the proxy. At least `calls` are delivered; the load goes on until the outage is over."""

    calls: int = 50_000
    kills: int = 5
    outage_seconds: float = 0.0
    store: Literal["sqlite", "postgresql"] = "sqlite"
    connections: int = 32
    warm_up_calls: int = 1000
    seed: int = 0

    def kill_points(self) -> list[float]:
        """After how many delivered calls the proxy is killed, ascending."""
        random_ = random.Random(self.seed)
        return sorted(random_.uniform(*_KILLS_BETWEEN) * self.calls for _ in range(self.kills))


@dataclass(slots=True)
class Report:
    """What happened; `violations` is empty if all is well. Memory is None where it was not measured."""

    sent: int = 0
    delivered: int = 0
    streams: int = 0
    broken: int = 0
    refused: int = 0
    kills: int = 0
    delivered_in_outage: int = 0
    seconds: float = 0.0
    drain_seconds: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)
    before: Memory | None = None
    peak: Memory | None = None
    after: Memory | None = None
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        verdict = self.verdict
        lines = [
            f"calls sent {self.sent}, delivered {self.delivered} ({self.streams} streams), broken {self.broken}, "
            f"refused {self.refused}, in {self.seconds:.1f} s",
            f"kills {self.kills}, delivered while the database was stopped {self.delivered_in_outage}, "
            f"drained {self.drain_seconds:.1f} s after the last answer",
            f"stored {verdict.stored}, of these not delivered {verdict.undelivered}; "
            f"missing {len(verdict.missing)}, duplicates {len(verdict.duplicates)}, altered {len(verdict.altered)}",
            f"memory of proxy + writer: before {self.before}, peak {self.peak}, after {self.after}",
        ]
        return "\n".join([*lines, *(f"VIOLATION: {violation}" for violation in self.violations)])


class Trial:
    """One run of a plan, with everything that it writes in `folder`."""

    def __init__(self, plan: Plan, folder: Path, *, progress: bool = True) -> None:
        self.report = Report()
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._random = random.Random(plan.seed + 1)
        self._port = free_port()
        self._servers: list[Server] = []
        self._watch = Watch()

    def run(self) -> Report:
        """Do it all. Raises `RuntimeError` if a server does not start."""
        plan = self._plan
        with contextlib.ExitStack() as stack:
            self._postgres = None
            self._store_url = f"sqlite:///{self._folder / 'online.db'}"
            if plan.store == "postgresql":
                self._postgres = stack.enter_context(Postgres(self._folder / "postgres"))
                self._store_url = self._postgres.url
            store = OnlineStore(self._store_url, bodies=Bodies(self._folder / "artifacts" / "bodies"))
            stack.callback(store.close)
            store.upgrade()
            self._rows = stack.enter_context(StoreRows(self._store_url))
            self._upstream = stack.enter_context(mock_upstream(self._folder / "upstream.log"))
            stack.callback(self._end_servers)
            self._start()
            self._servers[-1].wait_ready()
            self._clients = Clients(self._servers[-1].url)
            uvloop.run(self._work())
            self._end(store)
        return self.report

    def _start(self) -> None:
        server = noria_proxy(self._folder, self._upstream.url, store_url=self._store_url, port=self._port)
        self._servers.append(server)

    def _end_servers(self) -> None:
        for server in self._servers:
            server.end()

    # Under load

    async def _work(self) -> None:
        clients, report = self._clients, self.report
        warm = self._plan.warm_up_calls
        async with asyncio.timeout(STALL_SECONDS):
            await clients.run(self._plan.connections, lambda: len(clients.delivered) >= warm)
        await self._drain()
        self.report.before = memory_of(self._servers[-1])
        # The calls of the warm-up are compared as well, but do not count.
        self._target = warm + self._plan.calls
        watching = asyncio.create_task(self._watch.follow(self._servers))
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            events = [group.create_task(self._kill_and_restart())]
            if self._plan.outage_seconds:
                events.append(group.create_task(self._stop_database(warm + self._plan.calls / 2)))

            def enough() -> bool:
                return len(clients.delivered) >= self._target and all(event.done() for event in events)

            group.create_task(self._follow_progress(enough))
            group.create_task(clients.run(self._plan.connections, enough))
        report.seconds = time.monotonic() - began
        report.drain_seconds = await self._drain()
        report.after = await self._settled()
        watching.cancel()

    async def _follow_progress(self, enough: Callable[[], bool]) -> None:
        delivered = self._clients.delivered
        last, since = len(delivered), time.monotonic()
        with tqdm(total=self._target, initial=last, unit="call", disable=not self._progress) as bar:
            while not enough():
                await asyncio.sleep(0.2)
                now = len(delivered)
                bar.update(min(now, self._target) - bar.n)
                if now > last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > STALL_SECONDS:
                    instead = self._clients.wrong.most_common(1)
                    raise RuntimeError(f"no answer in {STALL_SECONDS} s, but {instead}:\n{self._servers[-1].log_end()}")

    async def _kill_and_restart(self) -> None:
        """SIGKILL the proxy at the planned points and a random moment more, and start it again at once."""
        orphans: list[psutil.Process] = []
        for point in self._plan.kill_points():
            await self._delivered(self._plan.warm_up_calls + point)
            await asyncio.sleep(self._random.random() * _KILL_JITTER_SECONDS)
            orphans += self._servers[-1].children()
            self._servers[-1].kill()
            self.report.kills += 1
            self._start()
            await asyncio.to_thread(self._servers[-1].wait_ready)
        _gone, alive = await asyncio.to_thread(psutil.wait_procs, orphans, SETTLE_SECONDS)
        self.report.violations += [
            f"process {orphan.pid} of a killed proxy still runs after {SETTLE_SECONDS} s" for orphan in alive
        ]

    async def _stop_database(self, point: float) -> None:
        """Stop PostgreSQL after so many delivered calls, for as long as planned."""
        assert self._postgres is not None, "an outage needs store = postgresql"
        await self._delivered(point)
        await asyncio.to_thread(self._postgres.stop)
        before = len(self._clients.delivered)
        await asyncio.sleep(self._plan.outage_seconds)
        self.report.delivered_in_outage = len(self._clients.delivered) - before
        await asyncio.to_thread(self._postgres.start)

    async def _delivered(self, point: float) -> None:
        while len(self._clients.delivered) < point:  # noqa: ASYNC110 - the clients' hot path sets no event
            await asyncio.sleep(0.005)

    # After it

    async def _drain(self) -> float:
        """Wait until the store has what was delivered, or takes nothing more; the seconds it took."""
        return await asyncio.to_thread(self._rows.settle, len(self._clients.delivered))

    async def _settled(self) -> Memory:
        """The memory once it is back where it was, or after `SETTLE_SECONDS`."""
        assert self.report.before is not None
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            now = memory_of(self._servers[-1])
            if now.above(self.report.before) <= MEMORY_SLACK_MB or time.monotonic() > deadline:
                return now
            await asyncio.sleep(0.2)

    def _end(self, store: OnlineStore) -> None:
        """End the proxy as an operator would, and compare."""
        report, clients = self.report, self._clients
        code = self._servers[-1].end()
        report.sent, report.broken, report.refused = clients.sent, clients.broken, clients.refused
        report.delivered, report.streams = len(clients.delivered), clients.streams
        report.peak = self._watch.peak
        report.verdict = compare(clients.delivered, clients.sent, calls_of(store))
        report.violations += report.verdict.violations()
        wrong = clients.wrong.most_common(5)
        report.violations += [f"{count} answers were not the upstream's: {what}" for what, count in wrong]
        if code != 0:
            report.violations.append(f"the proxy ended with {code}:\n{self._servers[-1].log_end()}")
        if self._plan.outage_seconds and not report.delivered_in_outage:
            report.violations.append("no call was delivered while the database was stopped")
        assert report.before is not None
        assert report.after is not None
        growth = report.after.above(report.before)
        if growth > MEMORY_SLACK_MB:
            report.violations.append(
                f"memory stays {growth:.0f} MB above where it was; {MEMORY_SLACK_MB:.0f} are allowed"
            )


def calls_of(store: OnlineStore) -> Iterator[Call]:
    """Every call of a store, in id order, its large content put back."""
    last = 0
    while batch := store.calls_after(last, 500):
        for call in batch:
            yield store.call(call.id or 0) if "large" in call.attributes else call
        last = batch[-1].id or 0


def main() -> None:
    """Run one trial and tell how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    planned = Plan()
    parser.add_argument("--calls", type=int, default=planned.calls)
    parser.add_argument("--kills", type=int, default=planned.kills)
    parser.add_argument("--connections", type=int, default=planned.connections)
    parser.add_argument("--seed", type=int, default=planned.seed)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--postgres-outage", type=float, default=0.0, metavar="SECONDS", help="implies postgresql")
    parser.add_argument("--keep", action="store_true", help="keep store, spool and logs")
    given = parser.parse_args()
    plan = Plan(
        calls=given.calls,
        kills=given.kills,
        outage_seconds=given.postgres_outage,
        store="postgresql" if given.postgres_outage else given.store,
        connections=given.connections,
        seed=given.seed,
    )
    folder = Path(tempfile.mkdtemp(prefix="durability-", dir=cache_folder()))
    try:
        report = Trial(plan, folder).run()
    finally:
        if given.keep:
            print(f"store, spool and logs are in {folder}")
        else:
            shutil.rmtree(folder)
    print(report)
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
