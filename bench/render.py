"""docs/performance.md and its plots, from the lines of JSON in bench/: `python -m bench.render`."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Plot

from bench import proxy_table
from bench.results import ROOT, Figure, latest

LEARNING = ROOT / "bench" / "learning.jsonl"
IMAGES = ROOT / "docs" / "images"
SOURCES = {"noria": ("Noria's rounds, through the real agent", "tab:blue"), "plain_trl": ("plain TRL", "tab:orange")}


def table(figures: list[Figure]) -> str:
    """The figures as a Markdown table."""
    lines = ["| figure | value | peer | ratio | commit | date |", "|---|---:|---|---:|---|---|"]
    for figure in figures:
        peer = f"{figure.peer}: {_rounded(figure.peer_value)} {figure.unit}" if figure.peer_value is not None else ""
        ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else ""
        value = f"{_rounded(figure.value)} {figure.unit}"
        lines.append(f"| `{figure.name}` | {value} | {peer} | {ratio} | {figure.commit} | {figure.date} |")
    return "\n".join(lines)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plot_stations(figures: list[Figure], path: Path) -> None:
    """Seconds of a round by station."""
    stations = [f for f in figures if f.name.startswith("station_seconds_")]
    plot = Plot(figsize=(6.4, 3.0), layout="constrained")
    axis = plot.subplots()
    names = [figure.name.removeprefix("station_seconds_") for figure in stations]
    bars = axis.barh(names[::-1], [figure.value for figure in stations][::-1], color="tab:blue")
    axis.bar_label(bars, fmt="%.1f s", padding=3)
    axis.margins(x=0.12)
    axis.set(xlabel="seconds", title="one round, station by station")
    plot.savefig(path, dpi=110)


def plot_learning(path: Path) -> None:
    """Held-out accuracy by number of sampled rollouts, one thin line a seed."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in LEARNING.read_text().splitlines():
        row = json.loads(line)
        runs[row["source"], row["seed"]].append(row)
    plot = Plot(figsize=(6.4, 3.8), layout="constrained")
    axis = plot.subplots()
    named: set[str] = set()
    for (source, _seed), rows in sorted(runs.items()):
        label, colour = SOURCES[source]
        axis.plot(
            [row["rollouts"] for row in rows],
            [row["accuracy"] for row in rows],
            color=colour,
            alpha=0.8,
            label=label if source not in named else None,
        )
        named.add(source)
    axis.set(xlabel="sampled rollouts", ylabel="held-out accuracy (greedy)", ylim=(0, 0.8))
    axis.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
    axis.legend(loc="lower right")
    axis.set_title("learning curves, three seeds each")
    plot.savefig(path, dpi=110)


def proxy_section() -> str:
    """The proxy's part of the page, with its plot; nothing before `bench.proxy` has run."""
    rows = proxy_table.read()
    if not rows:
        return ""
    proxy_table.plot(rows, IMAGES / "proxy.png")
    return f"""
## The proxy

{proxy_table.section(rows)}
![calls per second and latency added](images/proxy.png)
"""


def main() -> None:
    """Write the page and the plots."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    figures = latest()
    plot_stations(figures, IMAGES / "stations.png")
    plot_learning(IMAGES / "learning.png")
    page = f"""# Performance

Written by `make bench` from `bench/*.jsonl`; do not edit. Measured on two shared CPU cores: compare, do not
quote.

{table(figures)}

`round_overhead_share` is the share of a round's seconds that is neither sampling, nor scoring, nor updating the model:
starting the trainer, the agent and the proxy, checks, files. The peer of a round is plain TRL making as many rollouts
and updates in one process, without an agent, proxy, store, gate or lineage.

![seconds per station](images/stations.png)
{proxy_section()}
## Learning

`bench/learning.jsonl` holds the held-out accuracy of the example's router by the number of sampled rollouts: Noria's
rounds (`noria demo`, three seeds) and plain TRL (`bench/plain_trl.py`) from the same weights on the same queries.

![learning curves](images/learning.png)
"""
    (ROOT / "docs" / "performance.md").write_text(page)


if __name__ == "__main__":
    main()
