"""The wheel turns on real parts: real traffic, the real agent, real rollouts, a real trainer, a real gate.

The tests stand in the order of the story; they share one home (see conftest.py).
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import psutil
import pytest

from assets.eval_report import load_report
from assets.rewarded_batch import load_batch
from assets.trajectories import LOG, load_trajectories
from noria.contracts.errors import StationFailed
from noria.contracts.report import Verdict
from noria.contracts.round import Round
from noria.processes import Services
from noria.release.chain import read_plan
from noria.release.registry import Registry
from noria.release.status import wheel as wheel_status
from noria.stores.artifacts import Artifacts
from noria.stores.online import OnlineStore
from noria.stores.warehouse import Warehouse
from pipelines.demo import SERVICES, latest_metadata, send_traffic
from tests.end_to_end.conftest import Wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUTER = "dispatch.router"
FIRST, SECOND, THIRD = (Round.parse(f"{ROUTER}.r{number:05d}") for number in (1, 2, 3))


def artifacts_of(wheel: Wheel) -> Artifacts:
    return Artifacts(wheel.config.artifacts_dir)


def turn(wheel: Wheel, round_: Round) -> None:
    wheel.instance.add_dynamic_partitions("rounds", [round_.key])
    wheel.execute("turn", round_.key)


def mean_reward(wheel: Wheel, round_: Round) -> float:
    rows = load_batch(artifacts_of(wheel), round_)
    return sum(row.reward for row in rows) / len(rows)


def files_of(wheel: Wheel, round_: Round) -> dict[str, str]:
    folder = wheel.config.artifacts_dir / artifacts_of(wheel).round_dir(round_.key)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): Artifacts.sha256_file(path) for path in files}


@contextmanager
def meanwhile(ready: Callable[[], bool], act: Callable[[], None]) -> Iterator[threading.Event]:
    """Watch from another thread, and act once as soon as `ready`."""
    acted, stop = threading.Event(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            if ready():
                act()
                acted.set()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield acted
    finally:
        stop.set()
        watcher.join()


def trainers() -> list[psutil.Process]:
    def is_trainer(process: psutil.Process) -> bool:
        try:
            return "training.train" in process.cmdline()
        except psutil.Error:
            return False

    return [child for child in psutil.Process().children(recursive=True) if is_trainer(child)]


def test_traffic_is_in_the_warehouse_exactly_once(wheel: Wheel) -> None:
    online = OnlineStore(wheel.config.store_url)
    rows = (
        Warehouse(wheel.config.warehouse_dir)
        .connect()
        .sql("SELECT count(*), count(DISTINCT id), count(DISTINCT trace_id) FROM calls")
        .fetchall()[0]
    )
    assert rows[0] == rows[1] == online.count_calls()
    assert rows[0] == 3 * rows[2]  # router, reply and end2end of every request
    wheel.execute("ingest")
    again = Warehouse(wheel.config.warehouse_dir).connect().sql("SELECT count(*) AS n FROM calls").fetchall()[0][0]
    assert again == rows[0]


def test_reward_rises_over_two_rounds(wheel: Wheel) -> None:
    turn(wheel, FIRST)
    turn(wheel, SECOND)
    artifacts = artifacts_of(wheel)
    # On the same 174 held-out items; the rollouts of two rounds are on different samples and more noisy.
    before = load_report(artifacts, FIRST).baseline_score.mean
    after = load_report(artifacts, SECOND).candidate_score.mean
    assert after > before + 0.05
    assert 0 < mean_reward(wheel, FIRST) < 1


def test_a_round_trains_the_checkpoint_of_the_round_before(wheel: Wheel) -> None:
    artifacts = artifacts_of(wheel)
    assert read_plan(artifacts, FIRST).parent == f"{ROUTER}.r00000"
    assert read_plan(artifacts, SECOND).parent == FIRST.key
    assert {row.policy_version for row in load_batch(artifacts, SECOND)} == {FIRST.key}
    assert latest_metadata(wheel.instance, "checkpoint", SECOND.key)["optimizer"] == "continued"


def test_every_other_node_of_a_rollout_was_pinned(wheel: Wheel) -> None:
    made = load_trajectories(artifacts_of(wheel), FIRST)
    assert all(trajectory.error is None for trajectory in made)
    nodes = {(step.node, step.sampled, step.pinned) for trajectory in made for step in trajectory.steps}
    assert ("router", True, None) in nodes
    assert {pinned for node, _, pinned in nodes if node == "reply"} <= {"exact", "occurrence"}


def test_what_is_live_is_what_the_reports_say(wheel: Wheel) -> None:
    artifacts = artifacts_of(wheel)
    expected = f"{ROUTER}.r00000"
    for round_ in (FIRST, SECOND):
        report = load_report(artifacts, round_)
        assert report.baseline == expected
        if report.verdict is Verdict.PASS:
            expected = round_.key
    live = Registry(OnlineStore(wheel.config.store_url)).current(ROUTER)
    assert live is not None
    assert live.version == expected


def test_materializing_a_station_again_changes_nothing(wheel: Wheel) -> None:
    before = files_of(wheel, SECOND)
    events = Registry(OnlineStore(wheel.config.store_url)).events(ROUTER)
    send_traffic(wheel.config, 5)  # what is newest has changed; the round's plan has not
    wheel.execute("ingest")
    wheel.execute("turn", SECOND.key)
    wheel.execute("turn", FIRST.key)
    assert files_of(wheel, SECOND) == before
    assert Registry(OnlineStore(wheel.config.store_url)).events(ROUTER) == events


def test_a_killed_trainer_leaves_no_orphan_and_the_round_resumes(wheel: Wheel) -> None:
    artifacts = artifacts_of(wheel)
    log = artifacts.local(f"{artifacts.round_dir(THIRD.key)}/checkpoint/train_log.jsonl")

    def kill() -> None:
        for process in trainers():
            process.send_signal(signal.SIGKILL)

    with (
        meanwhile(lambda: log.exists() and log.read_text().count("\n") >= 3, kill) as killed,
        pytest.raises(StationFailed, match=r"checkpoint: .*exit code -9"),
    ):
        turn(wheel, THIRD)
    assert killed.is_set()
    time.sleep(1.0)
    assert trainers() == []
    assert artifacts.completed(f"{artifacts.round_dir(THIRD.key)}/checkpoint") is None
    made = files_of(wheel, THIRD)["trajectories.parquet"]

    wheel.execute("turn", THIRD.key)
    assert files_of(wheel, THIRD)["trajectories.parquet"] == made
    marker = artifacts.completed(f"{artifacts.round_dir(THIRD.key)}/checkpoint")
    assert marker is not None
    assert marker["resumed_from_step"] == 2
    assert load_report(artifacts, THIRD).candidate == THIRD.key


def test_the_second_target_turns_by_itself(wheel: Wheel) -> None:
    reply = Round.parse("dispatch.reply.r00001")
    turn(wheel, reply)
    made = load_trajectories(artifacts_of(wheel), reply)
    assert all(step.pinned for trajectory in made for step in trajectory.steps if step.node == "router")
    assert load_report(artifacts_of(wheel), reply).target == "dispatch.reply"
    assert mean_reward(wheel, reply) > 0


def test_status_tells_the_wheel_from_the_stores_alone(wheel: Wheel) -> None:
    router, reply = wheel_status(wheel.config)
    assert (router.target, router.last_round, router.reached) == (ROUTER, THIRD.key, "done")
    assert router.verdict.split(":")[0] in {verdict.value for verdict in Verdict}
    assert "new trajectories" in router.waits_for
    assert reply.enabled


def test_a_policy_server_that_dies_in_mid_round_costs_no_rollout_that_was_made(wheel: Wheel) -> None:
    round_ = Round(THIRD.target, 4)
    artifacts = artifacts_of(wheel)
    log = artifacts.local(f"{artifacts.round_dir(round_.key)}/{LOG}")

    def whole() -> int:
        return sum('"error": null' in line for line in log.read_text().splitlines())

    def kill() -> None:
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("NORIA_SERVICES_OF") == str(wheel.config.home_dir)
                if mine and process.cmdline()[-1] == "noria.services.policy":
                    os.kill(process.pid, signal.SIGKILL)
            except psutil.Error:
                continue

    with (
        meanwhile(lambda: log.exists() and log.read_bytes().count(b"\n") >= 40, kill) as killed,
        pytest.raises(StationFailed, match=r"trajectories: "),
    ):
        turn(wheel, round_)
    assert killed.is_set()
    kept = whole()
    assert kept >= 40
    wheel.services.end()

    with Services(wheel.config, SERVICES):
        wheel.execute("turn", round_.key)
    made = load_trajectories(artifacts, round_)
    assert len(made) == wheel.config.target(ROUTER).samples_per_round * wheel.config.target(ROUTER).group_size
    first_lines = log.read_text().splitlines()[:40]
    kept_traces = {line.split('"trace_id": "')[1][:32] for line in first_lines if '"error": null' in line}
    assert kept_traces <= {trajectory.trace_id for trajectory in made}


def test_a_round_without_calls_says_what_to_do(wheel: Wheel) -> None:
    nothing = Round.parse("dispatch.nowhere.r00001")
    wheel.instance.add_dynamic_partitions("rounds", [nothing.key])
    with pytest.raises(StationFailed, match=r"no target 'dispatch.nowhere' in noria.toml .*known: dispatch"):
        wheel.execute("turn", nothing.key)


def test_the_lineage_is_complete(wheel: Wheel) -> None:
    assert isinstance(wheel.instance, dg.DagsterInstance)
    for station in (
        "train_set",
        "val_set",
        "trajectories",
        "rewarded_batch",
        "checkpoint",
        "eval_report",
        "promoted_model",
    ):
        assert SECOND.key in wheel.instance.get_materialized_partitions(dg.AssetKey(station))
    assert Path(wheel.config.dagster_home / "dagster.yaml").is_file()
