"""What the sensors decide, as tables; and that their cursors only grow, on a real Dagster instance."""

import json
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from noria.config import SensorConfig
from noria.contracts.call import Arm, Call, CallStatus
from pipelines.learning import defs
from pipelines.sensors import (
    Decision,
    IngestCursor,
    LastRound,
    Standing,
    decide,
    enough_trajectories,
    ingest_due,
    traffic_landed,
)
from resources.settings import Settings
from resources.stores import Stores

SETTINGS = SensorConfig(
    min_new_calls=100, max_ingest_seconds=60, min_new_trajectories=200, min_pause_seconds=30, max_attempts=3
)
FOREVER = float("inf")


@pytest.mark.parametrize(
    ("last", "new", "ended", "attempts", "decision"),
    [
        (LastRound.NONE, 0, FOREVER, 0, Decision.WAIT),
        (LastRound.NONE, 199, FOREVER, 0, Decision.WAIT),
        (LastRound.NONE, 200, FOREVER, 0, Decision.BEGIN),
        (LastRound.TURNING, 10_000, 0.0, 1, Decision.WAIT),
        (LastRound.DONE, 200, 29.0, 1, Decision.WAIT),
        (LastRound.DONE, 200, 30.0, 1, Decision.BEGIN),
        (LastRound.DONE, 199, 1e6, 1, Decision.WAIT),
        (LastRound.FAILED, 0, 29.0, 1, Decision.WAIT),
        (LastRound.FAILED, 0, 30.0, 1, Decision.RESUME),
        (LastRound.FAILED, 10_000, 30.0, 2, Decision.RESUME),
        (LastRound.FAILED, 199, 30.0, 3, Decision.WAIT),
        (LastRound.FAILED, 200, 30.0, 3, Decision.BEGIN),
    ],
)
def test_when_a_target_turns(last: LastRound, new: int, ended: float, attempts: int, decision: Decision) -> None:
    decided, why = decide(Standing(last, new, ended, attempts), SETTINGS)
    assert decided is decision
    assert why


@pytest.mark.parametrize(
    ("cursor", "call_id", "score_id", "now", "due"),
    [
        (IngestCursor(), 0, 0, 1000.0, False),
        (IngestCursor(), 99, 0, 1000.0, True),  # the first look is long after the epoch
        (IngestCursor(50, 5, 990.0), 50, 5, 5000.0, False),
        (IngestCursor(50, 5, 990.0), 149, 5, 1000.0, False),
        (IngestCursor(50, 5, 990.0), 150, 5, 1000.0, True),
        (IngestCursor(50, 5, 990.0), 51, 5, 1050.0, True),
        (IngestCursor(50, 5, 990.0), 50, 6, 1000.0, False),
        (IngestCursor(50, 5, 990.0), 50, 6, 1051.0, True),
    ],
)
def test_when_an_ingest_is_due(cursor: IngestCursor, call_id: int, score_id: int, now: float, due: bool) -> None:
    assert (ingest_due(cursor, call_id, score_id, now, SETTINGS) is None) is due


CONFIG = """
home = "home"
[sensors]
min_new_calls = 3
min_new_trajectories = 2
min_pause_seconds = 0
[targets."shop.a"]
selection = "a.sql"
reward = "r.py:f"
suite = "s.py:f"
[targets."shop.b"]
selection = "b.sql"
reward = "r.py:f"
suite = "s.py:f"
[targets."shop.off"]
enabled = false
selection = "b.sql"
reward = "r.py:f"
suite = "s.py:f"
"""


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    (tmp_path / "noria.toml").write_text(CONFIG)
    opened = Stores(settings=Settings(path=str(tmp_path / "noria.toml")))
    opened.online.upgrade()
    return opened


def land(stores: Stores, node: str, count: int, *, arm: Arm = Arm.LIVE) -> None:
    """Land `count` calls of one node, each in a trace of its own, in store and warehouse."""
    at = datetime.now(UTC)
    start = stores.online.last_call_id()
    stores.online.add_calls(
        [
            Call(
                uid=f"{node}-{start + index}",
                tenant="default",
                app="shop",
                process_node=node,
                trace_id=f"{start + index:032x}",
                model_name="m",
                policy_version=None,
                arm=arm,
                input="{}",
                output="{}",
                status=CallStatus.OK,
                request_time=at,
                response_time=at,
                duration_ms=1.0,
            )
            for index in range(count)
        ]
    )
    stores.warehouse.sync(stores.online)


def look(instance: dg.DagsterInstance, stores: Stores, cursor: str | None) -> dg.SensorResult | dg.SkipReason:
    with dg.build_sensor_context(
        instance=instance, cursor=cursor, resources={"stores": stores}, definitions=defs
    ) as context:
        return enough_trajectories(context)


def test_targets_begin_rounds_independently_and_the_cursor_only_grows(stores: Stores) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert isinstance(look(instance, stores, None), dg.SkipReason)

        land(stores, "a", 2)
        land(stores, "off", 5)
        land(stores, "b", 5, arm=Arm.ROLLOUT)  # rollouts are nobody's traffic
        first = look(instance, stores, None)
        assert isinstance(first, dg.SensorResult)
        assert [request.partition_key for request in first.run_requests or []] == ["shop.a.r00001"]
        assert first.cursor is not None
        cursor = json.loads(first.cursor)
        assert cursor == {"shop.a": 2}

        instance.add_dynamic_partitions("rounds", ["shop.a.r00001"])
        assert isinstance(look(instance, stores, first.cursor), dg.SkipReason)

        land(stores, "b", 2)
        land(stores, "a", 2)
        second = look(instance, stores, first.cursor)
        assert isinstance(second, dg.SensorResult)
        assert [request.partition_key for request in second.run_requests or []] == ["shop.a.r00002", "shop.b.r00001"]
        assert all(
            request.tags["noria/target"] == (request.partition_key or "")[:6] for request in second.run_requests or []
        )
        assert second.cursor is not None
        grown = json.loads(second.cursor)
        assert all(grown[name] >= value for name, value in cursor.items())
        assert grown["shop.b"] > 0


def test_a_turning_round_holds_its_own_target_only(stores: Stores) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        land(stores, "a", 2)
        land(stores, "b", 2)
        instance.add_dynamic_partitions("rounds", ["shop.a.r00001"])
        instance.create_run_for_job(
            defs.resolve_job_def("turn"),
            status=dg.DagsterRunStatus.STARTED,
            tags={"dagster/partition": "shop.a.r00001", "noria/target": "shop.a"},
        )
        result = look(instance, stores, None)
        assert isinstance(result, dg.SensorResult)
        assert [request.partition_key for request in result.run_requests or []] == ["shop.b.r00001"]


def test_a_failed_round_is_taken_up_again_before_the_next(stores: Stores) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        land(stores, "a", 10)
        instance.add_dynamic_partitions("rounds", ["shop.a.r00001"])
        for attempt in (1, 2, 3):
            run = instance.create_run_for_job(
                defs.resolve_job_def("turn"),
                status=dg.DagsterRunStatus.STARTED,
                tags={"dagster/partition": "shop.a.r00001", "noria/target": "shop.a"},
            )
            instance.report_run_failed(run)
            result = look(instance, stores, None)
            assert isinstance(result, dg.SensorResult)
            (request,) = result.run_requests or []
            expected = "shop.a.r00001" if attempt < 3 else "shop.a.r00002"
            assert request.partition_key == expected
            assert request.run_key != "shop.a.r00001-0"


def test_ingest_follows_the_highest_id(stores: Stores) -> None:
    with dg.DagsterInstance.ephemeral() as instance:

        def look_at_traffic(cursor: str | None) -> dg.SensorResult | dg.SkipReason:
            with dg.build_sensor_context(
                instance=instance, cursor=cursor, resources={"stores": stores}, definitions=defs
            ) as context:
                return traffic_landed(context)

        assert isinstance(look_at_traffic(None), dg.SkipReason)
        land(stores, "a", 3)
        result = look_at_traffic(None)
        assert isinstance(result, dg.SensorResult)
        assert result.cursor is not None
        assert json.loads(result.cursor)["call_id"] == 3
        assert isinstance(look_at_traffic(result.cursor), dg.SkipReason)
