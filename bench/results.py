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
    """Append one figure with the commit and date of now, and return it."""
    ratio = value / peer_value if peer_value else None
    figure = Figure(name, value, unit, peer, peer_value, ratio, _commit(), datetime.now(UTC).date().isoformat())
    with RESULTS.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")
    return figure


def latest() -> list[Figure]:
    """The newest figure of each name, in the order in which the names first appeared."""
    newest: dict[str, Figure] = {}
    for line in RESULTS.read_text().splitlines():
        figure = Figure(**json.loads(line))
        newest[figure.name] = figure
    return list(newest.values())


def _commit() -> str:
    """The commit that was measured; `-dirty` if anything but the results themselves differs from it."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results.jsonl", ":!bench/learning.jsonl", ":!docs")
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip()
