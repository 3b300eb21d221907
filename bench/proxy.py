"""The proxy against its peers, in one run: `python -m bench.proxy [--quick] [--postgres]`.

Calls go straight to the mock upstream (`direct`), through Noria's proxy with recording on (`noria`), through aiohttp
passing bytes (`bare_aiohttp`) and through LiteLLM's proxy (`litellm`): the four in turn for each kind of call and each
number of connections, the whole several times over, medians of the repetitions. The proxy under test, its child
processes included, has one core; the mock upstream and the load generator share the other. After each load of Noria's
proxy the store must come to hold exactly the calls that were made, else the run fails.

A whole run appends its figures to bench/results.jsonl and its table to bench/proxy.jsonl in place of the last one's.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from bench import litellm
from bench.calls import KINDS
from bench.load import Sample, measure
from bench.postgres import Postgres
from bench.processes import (
    LOAD_CORE,
    RELAY_CORE,
    Server,
    cache_folder,
    free_port,
    mock_upstream,
    noria_proxy,
    pin,
)
from bench.proxy_table import BARE, DIRECT, LITELLM, NORIA, PEERS, TARGETS, Row, write
from bench.results import commit, record
from bench.store_rows import RowsDiffer, StoreRows
from noria.stores.online import OnlineStore

CONNECTIONS = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared at one time: calls of one kind on so many connections."""

    kind: str
    connections: int


HEADLINES = (Cell("short", 1), Cell("short", 16), Cell("stream", 1))
"""The cells behind the named figures; they are repeated more often."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    seconds: float = 1.0
    warm_up: float = 0.3
    rounds: int = 3
    headline_rounds: int = 5
    connections: tuple[int, ...] = CONNECTIONS
    first_seconds: float = 1.0
    """A load of each kind that nothing is taken from: imports, caches and pools of a server that has just started."""

    def round(self, number: int) -> list[Cell]:
        """The cells of one round, counted from 0."""
        cells = [Cell(kind, connections) for kind in KINDS for connections in self.connections]
        return [cell for cell in cells if number < self.rounds or cell in HEADLINES]


QUICK = Plan(seconds=0.3, warm_up=0.1, rounds=1, headline_rounds=1, connections=(1, 16), first_seconds=0.3)


Samples = dict[tuple[str, Cell], list[Sample]]
Drains = dict[tuple[str, Cell], list[float]]


class Comparison:
    """The servers of one run, and what was measured so far."""

    def __init__(self, urls: dict[str, str], rows: StoreRows, plan: Plan) -> None:
        self._urls = {target: f"{url}/v1/chat/completions" for target, url in urls.items()}
        self._rows = rows
        self._plan = plan
        self._made = 0
        self.samples: Samples = defaultdict(list)
        self.drains: Drains = defaultdict(list)

    def run(self) -> None:
        """Measure. Raises `WrongAnswer` and `RowsDiffer`."""
        rounds = [self._plan.round(number) for number in range(self._plan.headline_rounds)]
        with tqdm(total=len(self._urls) * (len(KINDS) + sum(map(len, rounds))), unit="load") as progress:
            for kind in KINDS:
                for target in self._urls:
                    progress.set_postfix_str(f"{target} {kind}, not counted")
                    self._load(target, Cell(kind, 4), self._plan.first_seconds)
                    progress.update()
            for number, cells in enumerate(rounds):
                # Another target begins in each round, so that none always follows the same one.
                targets = list(self._urls)
                targets = targets[number % len(targets) :] + targets[: number % len(targets)]
                for cell in cells:
                    for target in targets:
                        progress.set_postfix_str(f"{target} {cell.kind} x{cell.connections}")
                        sample, drain_seconds = self._load(target, cell, self._plan.seconds)
                        self.samples[target, cell].append(sample)
                        self.drains[target, cell].append(drain_seconds)
                        progress.update()
        if NORIA in self._urls:
            stored = self._rows.rows()
            if (stored.count, stored.distinct) != (self._made, self._made):
                raise RowsDiffer(f"{self._made} calls were made through the proxy, the store holds {stored}")

    def _load(self, target: str, cell: Cell, seconds: float) -> tuple[Sample, float]:
        """One load, and how many seconds the store took after it to hold its calls."""
        sample = measure(
            self._urls[target],
            KINDS[cell.kind],
            cell.connections,
            seconds,
            exact=target != LITELLM,
            warm_up=self._plan.warm_up,
        )
        if target != NORIA:
            return sample, 0.0
        self._made += sample.made
        return sample, self._rows.wait_for(self._made)


@contextlib.contextmanager
def servers(targets: Sequence[str], folder: Path, store_url: str) -> Iterator[dict[str, str]]:
    """The base URL of each target, with its server running for the block."""
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(mock_upstream(folder / "upstream.log", LOAD_CORE))
        started: dict[str, Server] = {DIRECT: upstream}
        if NORIA in targets:
            proxy = noria_proxy(folder, upstream.url, store_url=store_url, core=RELAY_CORE)
            started[NORIA] = stack.enter_context(proxy)
        if BARE in targets:
            port = free_port()
            command = ("-m", "bench.bare_aiohttp", "--port", str(port), "--upstream", upstream.url)
            started[BARE] = stack.enter_context(Server(command, port, folder / "bare.log", core=RELAY_CORE))
        if LITELLM in targets:
            started[LITELLM] = stack.enter_context(litellm.start(folder, upstream.url, core=RELAY_CORE))
        yield {target: server.wait_ready().url for target, server in started.items() if target in targets}


def table(comparison: Comparison, store: str) -> list[Row]:
    """What was measured, a row for each target and cell."""
    commit_now = commit()
    versions = {NORIA: commit_now, BARE: f"aiohttp {version('aiohttp')}", LITELLM: litellm.version()}
    return [
        Row(
            target=target,
            kind=cell.kind,
            connections=cell.connections,
            calls_per_second=statistics.median(sample.calls_per_second for sample in samples),
            p50_ms=statistics.median(sample.p50_ms for sample in samples),
            p99_ms=statistics.median(sample.p99_ms for sample in samples),
            first_byte_p50_ms=statistics.median(sample.first_byte_p50_ms for sample in samples),
            calls=sum(sample.calls for sample in samples),
            drain_seconds=statistics.median(comparison.drains[target, cell]) if target == NORIA else None,
            version=versions.get(target, ""),
            store=store,
            commit=commit_now,
        )
        for (target, cell), samples in comparison.samples.items()
    ]


def added(samples: Samples, target: str, cell: Cell, measured: str) -> float:
    """What a target adds to the direct call, in milliseconds: the median of the differences within each round."""
    pairs = zip(samples[target, cell], samples[DIRECT, cell], strict=True)
    return float(statistics.median(getattr(one, measured) - getattr(direct, measured) for one, direct in pairs))


def record_figures(comparison: Comparison, rows: Sequence[Row]) -> None:
    """Append the named figures, one for each peer."""
    rates = {(row.target, row.kind, row.connections): row.calls_per_second for row in rows}
    for peer in PEERS:
        figure = record(
            "proxy_rps_c16", rates[NORIA, "short", 16], "calls/s", peer=peer, peer_value=rates[peer, "short", 16]
        )
        print(figure)
    for name, cell, measured in (
        ("proxy_added_p50_ms_c1", Cell("short", 1), "p50_ms"),
        ("proxy_added_p99_ms_c1", Cell("short", 1), "p99_ms"),
        ("proxy_added_first_byte_ms_c1", Cell("stream", 1), "first_byte_p50_ms"),
    ):
        for peer in PEERS:
            ours = added(comparison.samples, NORIA, cell, measured)
            theirs = added(comparison.samples, peer, cell, measured)
            print(record(name, ours, "ms", peer=peer, peer_value=theirs))


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"{'kind':8}{'conns':>6}  {'target':14}{'calls/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'1st byte':>9}{'drain s':>9}")
    for row in sorted(rows, key=lambda row: (list(KINDS).index(row.kind), row.connections)):
        drain = f"{row.drain_seconds:9.2f}" if row.drain_seconds is not None else ""
        print(
            f"{row.kind:8}{row.connections:6}  {row.target:14}{row.calls_per_second:9.0f}{row.p50_ms:9.3f}"
            f"{row.p99_ms:9.3f}{row.first_byte_p50_ms:9.3f}{drain}"
        )


def main() -> None:
    """Measure, print, and record if it was a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute, a look at the order of things; records nothing")
    parser.add_argument("--postgres", action="store_true", help="the online store is a PostgreSQL on the load's core")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="fewer record nothing")
    parser.add_argument("--seconds", type=float, help="measured time of each load")
    given = parser.parse_args()
    plan = QUICK if given.quick else Plan()
    if given.seconds:
        plan = replace(plan, seconds=given.seconds)
    if LITELLM in given.targets:
        litellm.environment()
    pin(LOAD_CORE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxy-", dir=cache_folder())))
        store_url = f"sqlite:///{folder / 'online.db'}"
        if given.postgres:
            store_url = stack.enter_context(Postgres(folder / "postgres")).url
        store = OnlineStore(store_url)
        store.upgrade()
        store.close()
        urls = stack.enter_context(servers(given.targets, folder, store_url))
        comparison = Comparison(urls, stack.enter_context(StoreRows(store_url)), plan)
        comparison.run()
    rows = table(comparison, "postgresql" if given.postgres else "sqlite")
    show(rows)
    if plan == Plan() and set(given.targets) == set(TARGETS):
        record_figures(comparison, rows)
        write(rows)


if __name__ == "__main__":
    main()
