import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import insert
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateIndex, CreateTable

from noria.contracts.call import Call, CallTokens, Score
from noria.contracts.call_json import call_to_json
from noria.contracts.errors import ConfigError, InvalidRecord, NotFound
from noria.stores.online import OnlineStore
from noria.stores.tables import metadata

MakeCall = Callable[..., Call]
MakeScore = Callable[..., Score]


@pytest.fixture
def online(store_url: str) -> Iterator[OnlineStore]:
    """An empty store, on each of the two databases."""
    store = OnlineStore(store_url)
    store.upgrade()
    yield store
    store.close()


def test_calls_come_back_as_they_went_in(online: OnlineStore, make_call: MakeCall) -> None:
    east = timezone(timedelta(hours=8))
    records = [
        make_call(0, request_time=datetime(2026, 1, 1, 7, 0, 0, 1, tzinfo=east)),
        make_call(1, tokens=None, usage=None, policy_version=None, finish_reasons=(), reward_score=0.25),
        make_call(2, tokens=CallTokens((), (), ()), consent=False, attributes={}),
    ]
    assert online.add_calls(records) == 3
    found = online.calls_after(0, 10)
    assert found == [replace(call, id=n) for n, call in enumerate(records, start=1)]
    assert found[0].request_time.tzinfo is UTC
    assert online.call(2) == found[1]
    assert online.trace(records[0].trace_id) == found[:2]


def test_the_same_uid_twice_changes_nothing(online: OnlineStore, make_call: MakeCall) -> None:
    assert online.add_calls([make_call(0), make_call(1), make_call(1, output="other")]) == 2
    assert online.add_calls([make_call(1, output="other"), make_call(2)]) == 1
    assert online.add_calls([]) == 0
    assert online.count_calls() == 3
    assert [call.uid for call in online.calls_after(0, 10)] == ["uid-00000000", "uid-00000001", "uid-00000002"]
    assert online.calls_after(0, 10)[1].output == make_call(1).output


def test_a_time_without_zone_is_refused_and_nothing_is_written(online: OnlineStore, make_call: MakeCall) -> None:
    with pytest.raises(InvalidRecord, match=r"uid-00000001: request_time .* has no timezone"):
        online.add_calls([make_call(0), make_call(1, request_time=datetime(2026, 1, 1))])
    assert online.count_calls() == 0


def test_following_by_id(online: OnlineStore, make_call: MakeCall) -> None:
    assert online.last_call_id() == 0
    online.add_calls([make_call(n, tokens=None if n % 3 else make_call(n).tokens) for n in range(10)])
    assert [call.id for call in online.calls_after(3, 4)] == [4, 5, 6, 7]
    assert [call.id for call in online.calls_after(3, 10, upto=5)] == [4, 5]
    assert all(call.tokens is None for call in online.calls_after(0, 10, with_tokens=False))
    assert [call_id for call_id, _ in online.tokens_after(1, 2)] == [4, 7]
    assert [call_id for call_id, _ in online.tokens_after(1, 9, upto=6)] == [4]
    assert online.last_call_id() == 10
    with pytest.raises(NotFound, match="no call 99; its ids end at 10"):
        online.call(99)


def test_traces_of_more_ids_than_one_query_takes(online: OnlineStore, make_call: MakeCall) -> None:
    online.add_calls([make_call(n) for n in range(2400)])
    wanted = [f"{n:032x}" for n in range(1199, -1, -1)]
    found = online.traces([*wanted, "f" * 32, wanted[0]])
    assert [call.id for call in found] == list(range(1, 2401))
    assert online.traces([]) == []
    assert online.trace("f" * 32) == []


def test_scoring_again_changes_nothing_or_supersedes(online: OnlineStore, make_score: MakeScore) -> None:
    assert online.add_scores([make_score("a"), make_score("b")]) == 2
    assert online.add_scores([make_score("a", at=datetime.now(UTC))]) == 0
    assert online.last_score_id() == 2
    assert online.add_scores([make_score("a", 0.0), make_score("b"), make_score("c", 0.0), make_score("c", 1.0)]) == 2
    found = online.scores_after(0, 10)
    assert [(score.target_id, score.value) for score in found] == [("b", 1.0), ("a", 0.0), ("c", 1.0)]
    b, a, c = [score.id or 0 for score in found]
    assert b == 2 < a < c, "what superseded stands behind what a follower has seen"
    assert [score.id for score in online.scores_after(b, 10, upto=a)] == [a]
    assert online.add_scores([make_score("a", 0.0, explanation=None)]) == 1, "another reference is another statement"
    assert online.add_scores([make_score("a", 0.0, explanation=None)]) == 0
    assert online.add_scores([]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_is_a_finite_number_about_a_trace_or_call(
    online: OnlineStore, make_score: MakeScore, value: float
) -> None:
    with pytest.raises(InvalidRecord, match="not finite"):
        online.add_scores([make_score("a", value)])
    with pytest.raises(InvalidRecord, match="'trace' or 'call'"):
        online.add_scores([make_score("a", target_kind="tenant")])


def test_scores_of_a_trace_are_its_own_and_those_of_its_calls(
    online: OnlineStore, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(0), make_call(1), make_call(2)])
    first, second = make_call(0).trace_id, make_call(2).trace_id
    online.add_scores(
        [
            make_score(make_call(1).uid, target_kind="call"),
            make_score(first),
            make_score(second),
            make_score("other"),
            make_score(make_call(1).uid),  # a trace that happens to be called like a call
        ]
    )
    assert [score.id for score in online.scores_of_trace(first)] == [1, 2]
    assert [score.id for score in online.scores_of_traces([second, first])] == [1, 2, 3]


def test_text_that_no_column_can_hold_is_kept_without_those_characters(
    online: OnlineStore, make_call: MakeCall, make_score: MakeScore
) -> None:
    records = [
        make_call(0, uid="a\x00b", input="x\x00y", output="\ud800 é", model_name="m\x00"),
        make_call(1, input='{"content": "\\u0000 \\ud800"}', attributes={"raw": "\x00\ud800"}),
    ]
    assert online.add_calls(records) == 2
    assert online.add_calls(records) == 0, "a replayed write stays idempotent"
    found, escaped = online.calls_after(0, 10)
    assert (found.uid, found.input, found.output, found.model_name) == ("a\ufffdb", "x\ufffdy", "\ufffd é", "m\ufffd")
    assert found.attributes["replaced_characters"] == ["uid", "model_name", "input", "output"]
    assert found.tokens == records[0].tokens
    assert escaped == replace(records[1], id=2), "JSON's own escapes stay as they are"
    assert online.add_scores([make_score("a", explanation="x\x00")]) == 1
    assert online.scores_after(0, 10)[0].explanation == "x\ufffd"


def test_a_trace_that_crosses_tenants_is_read_by_tenant(online: OnlineStore, make_call: MakeCall) -> None:
    online.add_calls([make_call(0, tenant="a"), make_call(1, tenant="b")])
    trace_id = make_call(0).trace_id
    assert [call.tenant for call in online.trace(trace_id)] == ["a", "b"]
    assert [call.tenant for call in online.trace(trace_id, tenant="b")] == ["b"]
    assert online.trace(trace_id, tenant="c") == []


def test_rows_of_every_kind_of_emptiness_in_one_batch(online: OnlineStore, make_call: MakeCall) -> None:
    records = [
        make_call(0, policy_version=None, usage=None, agent_version=None, subject=None, tokens=None),
        make_call(1, policy_version=None, usage=None, reward_score=0.5, subject="s", tokens=None, duration_ms=7),
    ]
    assert online.add_calls(records) == 2
    assert online.add_calls([make_call(2, reward_score=None)]) == 1
    assert [call.reward_score for call in online.calls_after(0, 9)] == [None, 0.5, None]
    assert online.call(2).duration_ms == 7.0


def test_a_batch_of_more_than_one_statement_carries(online: OnlineStore, make_call: MakeCall) -> None:
    big = '"' + "x" * 9_000_000 + '"'
    assert online.add_calls([make_call(n, input=big, uid=f"u{n % 8}") for n in range(9)]) == 8
    assert [call.uid for call in online.calls_after(0, 10)] == [f"u{n}" for n in range(8)]


def test_two_live_versions_of_one_target_cannot_be_written(online: OnlineStore) -> None:
    row = {"target": "a.b", "checkpoint": "c", "state": "live", "weight": 1.0}
    with pytest.raises(IntegrityError), online.write() as connection:
        connection.execute(insert(metadata.tables["releases"]), [{**row, "version": v} for v in ("1", "2")])
    assert online.release_head() == 0


@pytest.mark.filterwarnings("ignore:Did not recognize type 'xid8'")
def test_the_migrations_make_the_tables_that_the_code_uses(online: OnlineStore) -> None:
    with online.read() as connection:
        # The one column that the database alone fills in (noria/stores/tables.py).
        opts = {"compare_type": True, "include_name": lambda name, kind, _parents: name != "written_by"}
        context = MigrationContext.configure(connection, opts=opts)
        assert compare_metadata(context, metadata) == []
    assert online.schema_current()
    online.upgrade()
    with online.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'v9999'")
    assert not online.schema_current()
    assert "is at schema revision v9999, this Noria needs v0002; a later Noria has been here" in str(
        online.schema_problem()
    )
    with pytest.raises(ConfigError, match="cannot be migrated: Can't locate revision identified by 'v9999'"):
        online.upgrade()


def test_the_schema_is_valid_for_postgresql() -> None:
    dialect = postgresql.dialect()
    for table in metadata.sorted_tables:
        assert str(CreateTable(table).compile(dialect=dialect))
    index = next(index for index in metadata.tables["releases"].indexes if index.name == "releases_one_live")
    assert "WHERE state = 'live'" in str(CreateIndex(index).compile(dialect=dialect))


def test_a_store_without_schema_says_what_mends_it(tmp_path: Path, make_call: MakeCall) -> None:
    for path in (tmp_path / "no folder" / "online.db", tmp_path / "online.db"):
        store = OnlineStore(f"sqlite:///{path}")
        assert not store.schema_current()
        assert not path.exists()
        with pytest.raises(
            ConfigError, match=r"at schema revision None, this Noria needs v0002; run `noria db upgrade`"
        ):
            store.add_calls([make_call(0)])
        store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "cannot be used"),
        ("mysql://localhost/noria", "runs on sqlite or postgresql"),
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("postgresql+psycopg2://localhost/noria", r"write postgresql:// or postgresql\+psycopg://"),
    ],
)
def test_a_url_that_cannot_serve_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OnlineStore(url)


def test_processes_that_start_and_write_at_once_take_turns(store_url: str, make_call: MakeCall) -> None:
    url = store_url
    script = f"""
import json, sys
from dataclasses import replace
from noria.contracts.call_json import call_from_json
from noria.stores.online import OnlineStore
store = OnlineStore({url!r})
store.upgrade()
call = call_from_json(json.loads(sys.stdin.read()))
for n in range(20):
    assert store.add_calls([replace(call, uid=f"{{sys.argv[1]}}-{{n}}-{{k}}") for k in range(10)]) == 10
"""
    text = json.dumps(call_to_json(make_call(0)))
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(n)], stdin=subprocess.PIPE, text=True) for n in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    store = OnlineStore(url)
    assert [call.id for call in store.calls_after(0, 1000)] == list(range(1, 601))
    if store.dialect == "sqlite":
        with store.read() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    store.close()


def test_a_follower_beside_writers_misses_nothing(online: OnlineStore, make_call: MakeCall) -> None:
    def write(writer: int) -> None:
        for n in range(15):
            online.add_calls([make_call(n, uid=f"{writer}-{n}-{k}") for k in range(5)])

    writers = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    while any(writer.is_alive() for writer in writers) or online.last_call_id() > (seen[-1] if seen else 0):
        seen += [call.id or 0 for call in online.calls_after(seen[-1] if seen else 0, 7)]
    for writer in writers:
        writer.join()
    assert seen == list(range(1, 226))
