"""The figures of every benchmark, one JSON line each, in bench/results.jsonl."""

import json
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results.jsonl"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement. `ratio` is value / peer_value, where a peer was measured in the same run."""

    name: str
    value: float
    unit: str
    peer: str | None
    peer_value: float | None
    ratio: float | None
    commit: str
    date: str


def record(name: str, value: float, unit: str, *, peer: str | None = None, peer_value: float | None = None) -> Figure:
    """Append one figure with the commit and date of now, and return it; with several peers, one figure for each."""
    ratio = value / peer_value if peer_value else None
    figure = Figure(name, value, unit, peer, peer_value, ratio, commit(), datetime.now(UTC).date().isoformat())
    with RESULTS.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")
    return figure


def latest() -> list[Figure]:
    """The newest figure of each name and peer, names and peers in the order in which they first appeared."""
    newest: dict[str, dict[str | None, Figure]] = {}
    for line in RESULTS.read_text().splitlines():
        figure = Figure(**json.loads(line))
        newest.setdefault(figure.name, {})[figure.peer] = figure
    return [figure for of_name in newest.values() for figure in of_name.values()]


def commit() -> str:
    """The commit that was measured; `-dirty` if anything but the results themselves differs from it."""
    head = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--", ".", ":!bench/*.jsonl", ":!docs")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip()
