import subprocess
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from noria.contracts.call import Arm, Call, CallStatus, Score
from noria.contracts.errors import IntegrityError, InvalidRecord, NotFound
from noria.stores.online import OnlineStore
from noria.stores.warehouse import SyncResult, Warehouse
from noria.stores.warehouse_tables import SCHEMAS

MakeCall = Callable[..., Call]
MakeScore = Callable[..., Score]


def rows(warehouse: Warehouse, query: str, versions: dict[str, int] | None = None) -> list[tuple[object, ...]]:
    with warehouse.connect(versions) as connection:
        return connection.execute(query).fetchall()


def ids(warehouse: Warehouse, table: str = "calls", column: str = "id") -> list[object]:
    return [row[0] for row in rows(warehouse, f"SELECT {column} FROM {table} ORDER BY {column}")]


def test_what_the_online_store_holds_is_taken_over_once(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(n, tokens=make_call(n).tokens if n % 2 else None) for n in range(10)])
    online.add_scores([make_score(f"{n:032x}") for n in range(5)])
    assert warehouse.sync(online, batch=3) == SyncResult(calls=10, tokens=5, scores=5, from_id=1, to_id=10, lag=0)
    versions = warehouse.versions()
    assert warehouse.sync(online) == SyncResult(calls=0, tokens=0, scores=0, from_id=11, to_id=10, lag=0)
    assert warehouse.versions() == versions, "nothing new, nothing written"
    online.add_calls([make_call(10)])
    assert warehouse.sync(online) == SyncResult(calls=1, tokens=1, scores=0, from_id=11, to_id=11, lag=0)
    assert ids(warehouse) == list(range(1, 12))
    assert ids(warehouse, "call_tokens", "call_id") == [2, 4, 6, 8, 10, 11]
    assert warehouse.last_call_id() == 11
    assert warehouse.cursors() == {"calls": 11, "call_tokens": 11, "scores": 5}


def test_rows_are_the_fields_of_the_call(online: OnlineStore, warehouse: Warehouse, make_call: MakeCall) -> None:
    call = make_call(0, arm=Arm.CANARY, usage=None)
    online.add_calls([call])
    warehouse.sync(online)
    with warehouse.connect() as connection:
        found = connection.sql("SELECT * FROM calls").to_arrow_table().to_pylist()[0]
        tokens = connection.execute("SELECT * FROM call_tokens").fetchall()
    assert set(found) == {name for name in Call.__slots__ if name != "tokens"} | {"day"}
    for name in ("uid", "app", "input", "output", "request_time", "response_time", "duration_ms", "policy_version"):
        assert found[name] == getattr(call, name), name
    assert found["finish_reasons"] == ["stop"]
    assert (found["arm"], found["status"], found["usage"]) == ("canary", "ok", None)
    assert found["attributes"] == '{"pinned": null, "text": "\\u00e9\\u0000"}'
    assert found["day"] == date(2026, 3, 1)
    assert call.tokens is not None
    assert tokens == [(1, list(call.tokens.prompt_token_ids), [0], [-0.1])]


def test_an_empty_warehouse_has_the_same_views(
    online: OnlineStore, make_call: MakeCall, make_score: MakeScore, tmp_path: Path
) -> None:
    full, empty = Warehouse(tmp_path / "full"), Warehouse(tmp_path / "empty")
    online.add_calls([make_call(0)])
    online.add_scores([make_score("a")])
    full.sync(online)
    for view in (*SCHEMAS, "traces"):
        assert rows(empty, f"DESCRIBE {view}") == rows(full, f"DESCRIBE {view}")
        assert rows(empty, f"SELECT * FROM {view}") == []
    assert empty.count_traces_after("dispatch.router", 7) == (0, 7)
    assert empty.last_call_id() == 0


def test_a_crash_between_the_tables_is_mended_by_the_next_sync(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(n) for n in range(10)])
    online.add_scores([make_score(f"{n:032x}") for n in range(3)])
    assert warehouse.sync_calls(online, 4, 10) == 4  # and here the process dies
    assert warehouse.cursors() == {"calls": 4, "call_tokens": 0, "scores": 0}
    assert warehouse.sync_calls(online, 4, 10) == 4
    assert warehouse.sync_tokens(online, 6, 10) == 6  # and here again
    assert Warehouse(warehouse.root).sync(online) == SyncResult(2, 4, 3, from_id=9, to_id=10, lag=0)
    assert ids(warehouse) == list(range(1, 11))
    assert ids(warehouse, "call_tokens", "call_id") == list(range(1, 11))
    assert len(ids(warehouse, "scores")) == 3


def test_another_online_store_is_not_followed(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, tmp_path: Path
) -> None:
    online.add_calls([make_call(0), make_call(1)])
    warehouse.sync(online)
    other = OnlineStore(f"sqlite:///{tmp_path / 'other.db'}")
    other.upgrade()
    other.add_calls([make_call(2)])
    with pytest.raises(IntegrityError, match="to call 2 and score 0, but this one ends at 1 and 0"):
        warehouse.sync(other)
    other.close()
    assert ids(warehouse) == [1, 2]


def test_a_superseded_score_is_replaced_by_its_key(
    online: OnlineStore, warehouse: Warehouse, make_score: MakeScore
) -> None:
    online.add_scores([make_score("a", 0.0), make_score("b", 0.0), make_score("c", 0.0)])
    warehouse.sync(online)
    online.add_scores([make_score("a", 1.0, explanation=None), make_score("d", 1.0), make_score("a", scorer="judge")])
    assert warehouse.sync(online, batch=1).scores == 3
    found = rows(warehouse, "SELECT target_id, scorer, value, explanation IS NULL FROM scores ORDER BY ALL")
    assert found == [
        ("a", "dispatch-desk", 1.0, True),
        ("a", "judge", 1.0, False),
        ("b", "dispatch-desk", 0.0, False),
        ("c", "dispatch-desk", 0.0, False),
        ("d", "dispatch-desk", 1.0, False),
    ]
    assert warehouse.cursors()["scores"] == online.last_score_id()


def test_processes_that_sync_at_once_take_each_row_over_once(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(n) for n in range(600)])
    online.add_scores([make_score(f"{n:032x}") for n in range(60)])
    script = f"""
from noria.stores.online import OnlineStore
from noria.stores.warehouse import Warehouse
result = Warehouse({warehouse.root!r}).sync(OnlineStore({online.url!r}), batch=60)
assert result.to_id == 600, result
print(result.calls, result.tokens, result.scores)
"""
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    taken = [[int(number) for number in answer.split()] for answer in answers]
    assert [sum(numbers) for numbers in zip(*taken, strict=True)] == [600, 600, 60]
    assert ids(warehouse) == list(range(1, 601))
    assert ids(warehouse, "call_tokens", "call_id") == list(range(1, 601))
    assert len(ids(warehouse, "scores")) == 60


def test_pinned_versions_stay_what_they_were(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(0)])
    online.add_scores([make_score("a", 0.0)])
    warehouse.sync(online)
    pinned = warehouse.versions()
    online.add_calls([make_call(1)])
    online.add_scores([make_score("a", 1.0)])
    warehouse.sync(online)
    query = "SELECT (SELECT count(*) FROM calls), (SELECT count(*) FROM traces), (SELECT value FROM scores)"
    assert rows(warehouse, query) == [(2, 1, 1.0)]
    assert rows(warehouse, query, pinned) == [(1, 1, 0.0)]
    assert rows(warehouse, query, {"calls": pinned["calls"]}) == [(1, 1, 1.0)]
    with pytest.raises(NotFound, match="calls has no version 99; its newest is 2"):
        warehouse.connect({"calls": 99})


def test_compaction_joins_files_and_keeps_what_is_pinned(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, make_score: MakeScore
) -> None:
    for n in range(4):
        online.add_calls([make_call(0, uid=str(n))])
        online.add_scores([make_score("a", float(n))])
        warehouse.sync(online)
    pinned = {"calls": 2, "scores": 2, "call_tokens": 1}
    unpinned = {"scores": 1}
    before = rows(warehouse, "SELECT calls.id, value FROM calls, scores ORDER BY ALL", pinned)
    deleted = warehouse.compact({name: [version] for name, version in pinned.items()}, retention_hours=0)
    assert deleted["calls"] == 2, "the two files that version 2 does not read"
    assert rows(warehouse, "SELECT calls.id, value FROM calls, scores ORDER BY ALL", pinned) == before
    assert len(DeltaTable(f"{warehouse.root}/calls").get_add_actions()["path"]) == 1
    assert ids(warehouse) == [1, 2, 3, 4]
    with pytest.raises(Exception, match="No files found"):
        rows(warehouse, "SELECT * FROM scores", unpinned)
    online.add_calls([make_call(9)])
    assert warehouse.sync(online).calls == 1, "the cursor outlives compaction"
    assert warehouse.compact({}) == {"calls": 0, "call_tokens": 0, "scores": 0}, "younger than a week"


@pytest.mark.parametrize("app", ["", "a b/c%é='*"])
def test_apps_with_unusual_names_keep_them(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall, app: str
) -> None:
    for n in range(2):
        online.add_calls([make_call(n, app=app)])
        warehouse.sync(online)
    assert rows(warehouse, "SELECT id, app FROM calls ORDER BY id") == [(1, app), (2, app)]
    warehouse.compact({}, retention_hours=0)
    assert rows(warehouse, "SELECT id, app FROM calls ORDER BY id") == [(1, app), (2, app)]


def test_a_trace_is_one_row(online: OnlineStore, warehouse: Warehouse, make_call: MakeCall) -> None:
    trace, other, third = "a" * 32, "b" * 32, "c" * 32
    online.add_calls(
        [
            make_call(0, trace_id=trace, process_node="router"),
            make_call(1, trace_id=other, process_node="router", arm=Arm.ROLLOUT),
            make_call(2, trace_id=trace, process_node="reply", arm=Arm.CANARY),
            make_call(3, trace_id=trace, process_node="end2end"),
            make_call(4, trace_id=third, process_node="end2end", tenant="t2", app="x"),
        ]
    )
    warehouse.sync(online)
    first = make_call(0).request_time
    query = "SELECT trace_id, app, tenant, nodes, request_time, arm, min_id, max_id FROM traces ORDER BY min_id"
    assert rows(warehouse, query) == [
        (trace, "dispatch", "default", ["router", "reply", "end2end"], first, "canary", 1, 4),
        (other, "dispatch", "default", ["router"], first + timedelta(seconds=1), "rollout", 2, 2),
        (third, "x", "t2", ["end2end"], first + timedelta(seconds=4), "live", 5, 5),
    ]


def test_traces_that_could_be_trained_on_are_counted(
    online: OnlineStore, warehouse: Warehouse, make_call: MakeCall
) -> None:
    online.add_calls(
        [
            make_call(0, trace_id="a" * 32),
            make_call(0, uid="2", trace_id="a" * 32),
            make_call(0, uid="3", trace_id="b" * 32, arm=Arm.CANARY),
            make_call(0, uid="4", trace_id="c" * 32, status=CallStatus.UPSTREAM_ERROR),
            make_call(0, uid="5", trace_id="d" * 32, arm=Arm.ROLLOUT),
            make_call(0, uid="6", trace_id="e" * 32, consent=False),
            make_call(0, uid="7", trace_id="f" * 32, app="other"),
            make_call(0, uid="8", trace_id="0" * 32, process_node="reply"),
        ]
    )
    warehouse.sync(online)
    assert warehouse.count_traces_after("dispatch.router", 0) == (2, 3)
    assert warehouse.count_traces_after("dispatch.router", 2) == (1, 3)
    assert warehouse.count_traces_after("dispatch.router", 3) == (0, 3)
    with pytest.raises(InvalidRecord):
        warehouse.count_traces_after("dispatch", 0)


@pytest.mark.slow
def test_a_hundred_thousand_calls(online: OnlineStore, warehouse: Warehouse, make_call: MakeCall) -> None:
    for start in range(0, 100_000, 20_000):
        online.add_calls([make_call(n) for n in range(start, start + 20_000)])
    assert warehouse.sync(online, batch=20_000).calls == 100_000
    assert rows(warehouse, "SELECT count(*), count(DISTINCT uid), max(id) FROM calls") == [(100_000, 100_000, 100_000)]
    assert rows(warehouse, "SELECT count(DISTINCT call_id) FROM call_tokens") == [(100_000,)]
    with warehouse.connect() as connection:
        assert isinstance(connection.sql("SELECT * FROM traces LIMIT 1").to_arrow_table(), pa.Table)
