"""Learning curves: `python -m bench.learning [--seeds 0 1 2] [--rounds 10] [--results FILE …]`.

For each seed, Noria's rounds (`noria demo --json`) and plain TRL from the same first weights with as many rollouts.
Writes bench/learning.jsonl: {"source", "seed", "rollouts", "accuracy"}. `--results` takes what `noria demo --json` has
printed already, while its homes still hold the first weights, instead of turning the wheel again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.render import LEARNING
from bench.results import ROOT
from bench.rounds import turn
from noria.config import load


def noria_curve(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Accuracy of the first weights and after each round, by rollouts made until then."""
    made = 0
    rows = [{"source": "noria", "seed": result["seed"], "rollouts": 0, "accuracy": result["start_accuracy"]}]
    for row in result["rounds"]:
        made += row["rollouts"]
        rows.append({"source": "noria", "seed": result["seed"], "rollouts": made, "accuracy": row["accuracy"]})
    return rows


def plain_trl_curve(seed: int, rollouts: int) -> list[dict[str, Any]]:
    """The same for plain TRL, from the first weights in the home of that seed's demo."""
    config = load()
    base = config.home_dir / "demo" / f"seed-{seed}" / "artifacts" / "base"
    out = base / "plain_trl.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "bench/plain_trl.py", "--base", str(base / "model"), "--out", str(out)]
    steps = rollouts // config.training.batch_size
    subprocess.run([*command, "--seed", str(seed), "--steps", str(steps)], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [
        {"source": "plain_trl", "seed": seed, "rollouts": line["rollouts"], "accuracy": line["accuracy"]}
        for line in lines
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--results", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.results:
        results = [json.loads(path.read_text().splitlines()[-1]) for path in arguments.results]
    else:
        results = [turn(arguments.rounds, seed) for seed in arguments.seeds]
    rows = [row for result in results for row in noria_curve(result)]
    for result in results:
        rows += plain_trl_curve(result["seed"], sum(row["rollouts"] for row in result["rounds"]))
    LEARNING.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
