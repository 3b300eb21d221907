"""The wheel without the UI, for a fixed number of rounds: `python -m pipelines.demo`, behind `noria demo`.

Services, agent and traffic run as in production, on free ports and in a home of their own (`home/demo/seed-S`). Each
round is the job `turn`, executed in this process. The cold start is kept between demos of the same settings.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg

from noria.config import Config, load
from noria.contracts.errors import NoriaError, StationFailed
from noria.contracts.report import EvalReport
from noria.contracts.round import Round, Target
from noria.loading import load_function
from noria.preflight import check
from noria.processes import Services, environment, interrupt_on_signals, only_one, prepare_home
from noria.release.gate import report_from_json
from noria.release.statistics import accuracy_interval
from noria.stores.artifacts import Artifacts
from noria.up import cold_start, upgrade_store
from pipelines.execute import execute

SERVICES = ("policy", "proxy", "judge", "agent")
STATIONS = ("train_set", "val_set", "trajectories", "rewarded_batch", "checkpoint", "eval_report", "promoted_model")
CALLS_BETWEEN_ROUNDS = 60
"""Live requests after each round; they show what the released version does for its users."""
TRAFFIC_RATE = 40.0
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Row:
    """One round of the table. Accuracies are shares of held-out items answered fully right; seconds by station."""

    round: str
    target: str
    reward: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    live_accuracy: float
    verdict: str
    live: str
    rollouts: int
    seconds: float
    model_seconds: float
    stations: dict[str, float]


def run_demo(config: Config, rounds: int) -> dict[str, object]:
    """Turn the wheel `rounds` times for every enabled target; returns the result with the keys of `--json`."""
    from pipelines.learning import defs

    started = time.monotonic()
    check(config)
    rows: list[Row] = []
    with only_one(config):
        prepare_home(config)
        upgrade_store(config)
        cold_start(config)
        os.environ.update(environment(config))
        with dg.DagsterInstance.get() as instance, Services(config, SERVICES):
            users = send_traffic(config, None)
            sys.stderr.write(f"live traffic: {users:.1%} of the users' requests went to the right tool\n")
            for number in range(1, rounds + 1):
                execute(defs, instance, "ingest", None)
                for name in config.enabled_targets:
                    rows.append(turn_once(config, defs, instance, Round(Target.parse(name), number)))
                    sys.stderr.write(progress_line(rows[-1]) + "\n")
                if number < rounds:
                    users = send_traffic(config, CALLS_BETWEEN_ROUNDS)
                    sys.stderr.write(f"live traffic: {users:.1%} right\n")
    return summary(config, rows, time.monotonic() - started)


def turn_once(config: Config, defs: dg.Definitions, instance: dg.DagsterInstance, round_: Round) -> Row:
    """One round of one target, as a row of the table."""
    instance.add_dynamic_partitions("rounds", [round_.key])
    started = time.monotonic()
    run_id = execute(defs, instance, "turn", round_.key)
    seconds = time.monotonic() - started
    artifacts = Artifacts(config.artifacts_dir)
    report = report_from_json(artifacts.read_bytes(f"{artifacts.round_dir(round_.key)}/report.json").decode())
    metadata = {station: latest_metadata(instance, station, round_.key) for station in STATIONS}
    interval = accuracy_interval([pair.candidate for pair in report.pairs], confidence=0.95)
    return Row(
        round=round_.key,
        target=str(round_.target),
        reward=float(metadata["rewarded_batch"]["reward"]),
        accuracy=accuracy(report, "candidate"),
        accuracy_low=interval.low,
        accuracy_high=interval.high,
        live_accuracy=accuracy(report, "baseline"),
        verdict=report.verdict.value,
        live=str(metadata["promoted_model"]["live"]),
        rollouts=int(metadata["trajectories"]["dagster/row_count"]),
        seconds=seconds,
        model_seconds=sum(
            float(metadata[station].get(key, 0.0))
            for station, key in (
                ("trajectories", "model_seconds"),
                ("checkpoint", "update_seconds"),
                ("eval_report", "model_seconds"),
            )
        ),
        stations=station_seconds(instance, run_id),
    )


def accuracy(report: EvalReport, side: str) -> float:
    """Share of the suite's items that one side answers fully right (score 1)."""
    return sum(getattr(pair, side) >= 1.0 for pair in report.pairs) / len(report.pairs)


def station_seconds(instance: dg.DagsterInstance, run_id: str) -> dict[str, float]:
    """Seconds of each station, its checks included."""
    seconds = dict.fromkeys(STATIONS, 0.0)
    for stats in instance.get_run_step_stats(run_id):
        station = next(name for name in STATIONS if stats.step_key.startswith(name))
        if stats.start_time and stats.end_time:
            seconds[station] += stats.end_time - stats.start_time
    return seconds


def latest_metadata(instance: dg.DagsterInstance, asset: str, partition: str) -> dict[str, object]:
    """Metadata values of the newest materialization of one partition."""
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey(asset), asset_partitions=[partition]), limit=1
    ).records
    materialization = records[0].asset_materialization if records else None
    if materialization is None:
        raise StationFailed(f"{asset} was not materialized for {partition}")
    return {key: value.value for key, value in materialization.metadata.items()}


def send_traffic(config: Config, count: int | None) -> float:
    """Send users' requests through the agent, each distinct one once if `count` is None, and wait for the feedback.

    Returns the share that the business system found right.
    """
    if count is None:
        count = len(load_function("examples/dispatch/data.py:traffic", config.root).function())
    run = load_function("examples/dispatch/traffic.py:run", config.root).function
    return float(asyncio.run(run(config, count, TRAFFIC_RATE, patience_seconds=30.0)).accuracy)


def summary(config: Config, rows: list[Row], seconds: float) -> dict[str, object]:
    """The result: accuracies of the first enabled target's live version before the first and after the last round."""
    first = [row for row in rows if row.target == config.enabled_targets[0]]
    promoted = [row for row in first if row.verdict == "pass"]
    start = first[0].live_accuracy
    return {
        "start_accuracy": start,
        "final_accuracy": promoted[-1].accuracy if promoted else start,
        "promotions": sum(row.verdict == "pass" for row in rows),
        "rounds": [asdict(row) for row in rows],
        "seconds": seconds,
        "seed": config.seed,
    }


def progress_line(row: Row) -> str:
    """One line when a round has ended."""
    return (
        f"{row.round}: reward {row.reward:.3f}, held-out accuracy {row.accuracy:.1%}, {row.verdict}, "
        f"live is {row.live}, {row.seconds:.0f} s"
    )


def render(result: dict[str, object], rows: list[dict[str, object]]) -> str:
    """The table of rounds for the terminal."""
    head = (
        f"{'round':24} {'reward':>6}  {'held-out accuracy':>22}  {'verdict':12} {'live':24} {'s':>4}  "
        "seconds per station"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        stations = row["stations"]
        assert isinstance(stations, dict)
        accuracy_text = f"{row['accuracy']:.1%} [{row['accuracy_low']:.1%}, {row['accuracy_high']:.1%}]"
        parts = "  ".join(f"{name} {seconds:.0f}" for name, seconds in stations.items())
        lines.append(
            f"{row['round']:24} {row['reward']:6.3f}  {accuracy_text:>22}  {row['verdict']:12} {row['live']:24} "
            f"{row['seconds']:4.0f}  {parts}"
        )
    lines.append(
        f"live model: {result['start_accuracy']:.1%} of the held-out queries right at the start, "
        f"{result['final_accuracy']:.1%} now; {result['promotions']} promotions in {result['seconds']:.0f} s"
    )
    return "\n".join(lines)


def demo_config(seed: int) -> Config:
    """noria.toml on free ports, in a home of the demo's own; the environment of this process carries the changes."""
    base = load()
    home = base.home_dir / "demo" / f"seed-{seed}"
    ports = free_ports(5)
    os.environ.update(
        {
            "NORIA_HOME": str(home),
            "NORIA_SEED": str(seed),
            "NORIA_PROXY__PORT": str(ports[0]),
            "NORIA_POLICY__PORT": str(ports[1]),
            "NORIA_JUDGE__PORT": str(ports[2]),
            "NORIA_UI__PORT": str(ports[3]),
            "NORIA_AGENT__URL": f"http://127.0.0.1:{ports[4]}",
            "NORIA_PROXY__UPSTREAMS__POLICY__URL": f"http://127.0.0.1:{ports[1]}",
        }
    )
    config = load()
    clear_home(config)
    return config


def clear_home(config: Config) -> None:
    """Begin anew, but keep a cold start that was made with the same settings."""
    note = config.artifacts_dir / "base" / "settings.json"
    settings = config.model.model_dump_json() + f" seed {config.seed}"
    kept = note.is_file() and note.read_text() == settings
    for path in config.home_dir.iterdir() if config.home_dir.is_dir() else ():
        if path.name == "artifacts":
            for child in path.iterdir():
                if not (kept and child.name == "base"):
                    _remove(child)
        elif path.name not in ("up.lock", "trainer.key"):
            _remove(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(settings)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def main() -> int:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="noria demo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    interrupt_on_signals()
    try:
        result = run_demo(demo_config(arguments.seed), arguments.rounds)
    except KeyboardInterrupt:
        sys.stderr.write("The demo has stopped.\n")
        return EXIT_INTERRUPTED
    except NoriaError as error:
        sys.stderr.write(f"noria: {error}\n")
        return 2 if isinstance(error, ValueError) else 1
    rows = result["rounds"]
    assert isinstance(rows, list)
    print(render(result, rows))
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
