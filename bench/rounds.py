"""Where a round's seconds go: `python -m bench.rounds [--rounds N]`.

Turns the wheel for a few rounds, and lets plain TRL make as many rollouts and updates from the same weights in the same
run. `round_overhead_share` is the share of a round that is neither sampling nor scoring nor updating the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.results import ROOT, record
from noria.config import load

SEED = 0


def turn(rounds: int, seed: int) -> dict[str, Any]:
    """The result of `noria demo --json`."""
    command = [sys.executable, "-m", "noria.cli", "demo", "--rounds", str(rounds), "--seed", str(seed), "--json"]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(process.stdout.splitlines()[-1]))


def plain_trl_seconds(base: Path, rollouts: int) -> float:
    """Seconds that plain TRL takes for as many rollouts and updates, without its start and its evaluations."""
    out = base.parent / "plain_trl.jsonl"
    batch = load().training.batch_size
    command = [sys.executable, "bench/plain_trl.py", "--base", str(base), "--out", str(out), "--seed", str(SEED)]
    subprocess.run([*command, "--steps", str(rollouts // batch)], cwd=ROOT, check=True)
    return float(json.loads(out.read_text().splitlines()[-1])["seconds"])


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    result = turn(rounds, SEED)
    rows = result["rounds"]
    per_round = statistics.mean(row["seconds"] for row in rows)
    rollouts = rows[0]["rollouts"]
    base = load().home_dir / "demo" / f"seed-{SEED}" / "artifacts" / "base" / "model"
    peer = plain_trl_seconds(base, rollouts)
    figures = [
        record("round_overhead_share", statistics.mean(1 - r["model_seconds"] / r["seconds"] for r in rows), "share"),
        record(f"round_seconds_{rollouts}_rollouts", per_round, "s", peer="plain_trl", peer_value=peer),
    ]
    figures += [
        record(f"station_seconds_{station}", statistics.mean(row["stations"][station] for row in rows), "s")
        for station in rows[0]["stations"]
    ]
    for figure in figures:
        print(figure)


if __name__ == "__main__":
    main()
