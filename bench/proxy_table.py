"""What `bench.proxy` measured last, in bench/proxy.jsonl, and its part of docs/performance.md."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure as Plot

from bench.calls import KINDS
from bench.results import ROOT

TABLE = ROOT / "bench" / "proxy.jsonl"
DIRECT, NORIA, BARE, LITELLM = TARGETS = ("direct", "noria", "bare_aiohttp", "litellm")
PEERS = (LITELLM, BARE)
COLOURS = {DIRECT: "lightgrey", NORIA: "tab:blue", BARE: "tab:orange", LITELLM: "tab:green"}
_TITLES = {
    "short": "A short call",
    "long": "16 KB asked, 16 KB answered",
    "stream": "A stream of 64 deltas, with a pause of 2 ms after the first",
    "tools": "Three parallel tool calls",
    "image": "A 2 MB image asked",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One target under one load: medians over the rounds; `calls` is their sum.

    `drain_seconds` is how long after the last answer the store took to hold the calls of one load; Noria only.
    """

    target: str
    kind: str
    connections: int
    calls_per_second: float
    p50_ms: float
    p99_ms: float
    first_byte_p50_ms: float
    calls: int
    drain_seconds: float | None
    version: str
    store: str
    commit: str


def write(rows: Sequence[Row]) -> None:
    """Put these rows in place of the last run's."""
    TABLE.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read(path: Path = TABLE) -> list[Row]:
    """The rows of the last run, none if there was no run."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def section(rows: Sequence[Row]) -> str:
    """The Markdown under the heading "The proxy"."""
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    versions = {row.target: row.version for row in rows}
    parts = [
        f"""Calls straight to an upstream that answers at once (`direct`), through Noria's proxy with recording on into
{_store(rows)}, through a bare aiohttp pass-through on the same event loop ({versions[BARE]}), and through LiteLLM's
proxy {versions[LITELLM]} without a database; interleaved, medians of the rounds, a closed loop. The proxy under test
has one core, Noria's writer process included; upstream and load generator share the other. Every answer is compared
with the upstream's bytes (LiteLLM's, which are its own, only for being there), and after each load the rows of the
store with the calls made: `drain` is how long after the last answer they were all there. At 16 and 64 connections the
64 writes of a stream keep the upstream's core busy: there `direct` is the limit.
""",
    ]
    for kind in kinds:
        parts.append(f"{_TITLES[kind]}:\n\n{_table([row for row in rows if row.kind == kind])}\n")
    return "\n".join(parts)


def _store(rows: Sequence[Row]) -> str:
    return {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[rows[0].store]


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| connections | | calls/s | p50 ms | p99 ms | first byte p50 ms | drain s |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row.connections, TARGETS.index(row.target))):
        drain = f"{row.drain_seconds:.2f}" if row.drain_seconds is not None else ""
        lines.append(
            f"| {row.connections} | {row.target} | {row.calls_per_second:,.0f} | {row.p50_ms:.2f} | {row.p99_ms:.2f} "
            f"| {row.first_byte_p50_ms:.2f} | {drain} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Calls per second of a short call by connections, and what each proxy adds to one at a time."""
    short = {(row.target, row.connections): row for row in rows if row.kind == "short"}
    connections = sorted({of for _, of in short})
    targets = [target for target in TARGETS if (target, connections[0]) in short]
    figure = Plot(figsize=(9.0, 3.6), layout="constrained")
    rates, latencies = figure.subplots(1, 2, width_ratios=(3, 2))
    width = 0.8 / len(targets)
    for n, target in enumerate(targets):
        places = [group + (n - (len(targets) - 1) / 2) * width for group in range(len(connections))]
        heights = [short[target, of].calls_per_second for of in connections]
        bars = rates.bar(places, heights, width, color=COLOURS[target], label=target)
        rates.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    rates.set_xticks(range(len(connections)), [str(of) for of in connections])
    rates.set(yscale="log", xlabel="connections", ylabel="calls per second", title="a short call")
    rates.legend(fontsize=8, ncols=2)
    rates.margins(y=0.25)
    proxies = [target for target in targets if target != DIRECT]
    for shift, measured, alpha in ((-0.2, "p50_ms", 1.0), (0.2, "p99_ms", 0.5)):
        heights = [
            getattr(short[target, connections[0]], measured) - getattr(short[DIRECT, connections[0]], measured)
            for target in proxies
        ]
        places = [n + shift for n in range(len(proxies))]
        bars = latencies.bar(places, heights, 0.4, color=[COLOURS[target] for target in proxies], alpha=alpha)
        latencies.bar_label(bars, [f"{measured[:3]}\n{height:.2g}" for height in heights], fontsize=7)
    latencies.set_xticks(range(len(proxies)), proxies)
    latencies.set(yscale="log", ylabel="ms added to direct", title="at one connection")
    latencies.margins(y=0.3)
    figure.savefig(path, dpi=110)
