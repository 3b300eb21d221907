"""What retention deletes, what it keeps, and that the space goes back."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from noria.contracts.call import Call, Score
from noria.stores.bodies import Bodies
from noria.stores.online import OnlineStore
from noria.stores.retention import Ages, Pruned, Taken, prune, taken_over
from noria.stores.retention_space import bytes_of, give_back
from noria.stores.tables import call_bodies, call_tokens, metadata, pinned_answers
from noria.stores.warehouse import Warehouse

MakeCall = Callable[..., Call]
MakeScore = Callable[..., Score]

NOW = datetime(2026, 6, 1, tzinfo=UTC)
ALL = Taken(1 << 60, 1 << 60)
MONTH = Ages(30.0)


@pytest.fixture
def online(store_url: str, tmp_path: Path) -> Iterator[OnlineStore]:
    store = OnlineStore(store_url, bodies=Bodies(tmp_path / "bodies"), inline_max_bytes=1024)
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def aged(make_call: MakeCall) -> Callable[..., Call]:
    """A call of an age in days at `NOW`, each of a trace of its own unless it is given."""

    def make(n: int, days: float, **fields: object) -> Call:
        ended = NOW - timedelta(days=days)
        values = {"request_time": ended, "response_time": ended, "trace_id": f"trace-{n}", **fields}
        return make_call(n, **values)

    return make


def uids(store: OnlineStore) -> list[str]:
    return [call.uid for call in store.calls_after(0, 10_000)]


def test_traces_go_whole_by_the_limit_of_their_tenant(online: OnlineStore, aged: Callable[..., Call]) -> None:
    records = [
        aged(0, 40),
        aged(1, 40, trace_id="grows"),
        aged(2, 31, tenant="short"),
        aged(3, 8, tenant="short"),
        aged(4, 6, tenant="short"),
        aged(5, 400, tenant="long"),
        aged(6, 40, trace_id="shared", tenant="long"),
        aged(7, 40, trace_id="shared"),
        aged(8, 29, trace_id="grows"),
        aged(9, 0),
    ]
    online.add_calls(records)
    seen: list[int] = []
    pruned = prune(
        online,
        Ages(30.0, {"short": 7.0, "long": 1000.0}),
        ALL,
        batch_rows=2,
        now=NOW,
        on_progress=lambda now: seen.append(now.calls),
    )
    assert pruned == Pruned(calls=4)
    assert seen == sorted(seen)
    assert seen[-1] == 4
    kept = [record for n, record in enumerate(records) if n not in (0, 2, 3, 7)]
    assert uids(online) == [call.uid for call in kept]
    assert [replace(call, id=None) for call in online.calls_after(0, 99)] == kept, "what is kept is untouched"
    with online.read() as connection:
        assert connection.execute(select(func.count()).select_from(call_tokens)).scalar_one() == 6
    assert prune(online, Ages(30.0, {"short": 7.0, "long": 1000.0}), ALL, now=NOW) == Pruned()


def test_only_listed_tenants_expire_where_there_is_no_default(online: OnlineStore, aged: Callable[..., Call]) -> None:
    online.add_calls([aged(0, 4000), aged(1, 40, tenant="a"), aged(2, 0)])
    assert prune(online, Ages(), ALL, now=NOW) == Pruned()
    assert prune(online, Ages(None, {"a": 30.0}), ALL, now=NOW).calls == 1
    assert uids(online) == [aged(0, 0).uid, aged(2, 0).uid]


def test_a_trace_of_more_calls_than_a_batch_goes_in_several(online: OnlineStore, aged: Callable[..., Call]) -> None:
    online.add_calls([*(aged(n, 40, trace_id="large") for n in range(95)), aged(99, 0)])
    seen: list[int] = []
    prune(online, MONTH, ALL, batch_rows=10, now=NOW, on_progress=lambda now: seen.append(now.calls))
    assert uids(online) == [aged(99, 0).uid]
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) == 10


def test_what_the_warehouse_has_not_taken_over_is_kept(
    online: OnlineStore, aged: Callable[..., Call], make_score: MakeScore, tmp_path: Path
) -> None:
    warehouse = Warehouse(tmp_path / "warehouse")
    online.add_calls([aged(0, 40), aged(1, 40), aged(2, 40, trace_id="half")])
    online.add_scores([make_score("trace-0"), make_score("nothing"), make_score("other")])
    assert prune(online, MONTH, taken_over(warehouse, online), now=NOW) == Pruned(), "it has never synced"
    warehouse.sync(online)
    online.add_calls([aged(3, 40, trace_id="half"), aged(4, 40, tokens=None), aged(5, 40)])
    online.add_scores([make_score("late")])
    assert taken_over(warehouse, online) == Taken(3, 3)
    pruned = prune(online, MONTH, taken_over(warehouse, online), now=NOW)
    assert (pruned.calls, pruned.scores) == (2, 2)
    assert uids(online) == [aged(n, 0).uid for n in (2, 3, 4, 5)]
    assert warehouse.sync(online).calls == 3
    prune(online, MONTH, taken_over(warehouse, online), now=NOW)
    assert uids(online) == [aged(5, 0).uid], "the newest stays, whatever its age"
    assert warehouse.sync(online).calls == 0, "and so the warehouse knows its store"


def test_tokens_that_wait_for_the_warehouse_hold_their_calls(
    online: OnlineStore, aged: Callable[..., Call], tmp_path: Path
) -> None:
    warehouse = Warehouse(tmp_path / "warehouse")
    online.add_calls([aged(0, 40, tokens=None), aged(1, 40), aged(2, 40)])
    warehouse.sync_calls(online, 100, 3)  # a sync that was killed before the tokens
    assert taken_over(warehouse, online) == Taken(1, 0)


def test_scores_of_vanished_traces_go_and_others_stay(
    online: OnlineStore, aged: Callable[..., Call], make_score: MakeScore
) -> None:
    online.add_calls([aged(0, 40), aged(1, 1), aged(2, 0)])
    online.add_scores(
        [
            make_score("trace-0"),
            make_score(aged(0, 0).uid, target_kind="call"),
            make_score("trace-1"),
            make_score(aged(1, 0).uid, target_kind="call"),
            make_score("its call waits in a spool", at=NOW - timedelta(hours=23)),
            make_score("trace-2"),
        ]
    )
    pruned = prune(online, MONTH, ALL, batch_rows=1, now=NOW)
    assert pruned == Pruned(calls=1, scores=2)
    assert [score.id for score in online.scores_after(0, 10)] == [3, 4, 5, 6]


def test_memoized_answers_go_by_age(online: OnlineStore) -> None:
    with online.write() as connection:
        rows = [
            {"key": str(days), "uid": "u", "output": "{}", "policy_version": None, "at": NOW - timedelta(days=days)}
            for days in (10, 29, 31, 50)
        ]
        connection.execute(pinned_answers.insert(), rows)
    assert prune(online, Ages(None, {"a": 1.0}), ALL, now=NOW).pinned_answers == 0
    assert prune(online, MONTH, ALL, batch_rows=1, now=NOW).pinned_answers == 2
    with online.read() as connection:
        assert sorted(connection.scalars(select(pinned_answers.c.key))) == ["10", "29"]


def test_files_go_when_no_row_refers_to_them(online: OnlineStore, aged: Callable[..., Call], tmp_path: Path) -> None:
    def text(content: str) -> str:
        return f'["{content * 2000}"]'

    assert online.bodies is not None
    online.add_calls(
        [aged(0, 40, input=text("a")), aged(1, 40, input=text("b")), aged(2, 1, input=text("b")), aged(3, 0)]
    )
    files = [path for path in (tmp_path / "bodies").rglob("*") if path.is_file()]
    left = files[0].with_name(".writing-1234")  # of a process that was killed
    left.touch()
    for path in (*files, left):
        os.utime(path, (0, 0))
    young = online.bodies.path(online.bodies.put(b"its row is about to be written"))
    pruned = prune(online, MONTH, ALL, now=NOW)
    assert (pruned.calls, pruned.files) == (2, 2)
    assert young.exists()
    assert not left.exists()
    assert online.call(3).input == text("b")
    with online.read() as connection:
        assert connection.execute(select(func.count()).select_from(call_bodies)).scalar_one() == 1


def test_two_runs_at_once_delete_each_file_once(online: OnlineStore) -> None:
    assert online.bodies is not None
    for n in range(3000):
        path = online.bodies.root / "ab" / f"{n:064x}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(prune, online, Ages(), ALL, now=NOW) for _ in range(2)]
    assert sum(run.result().files for run in runs) == 3000


def test_writers_go_on_while_it_deletes(online: OnlineStore, aged: Callable[..., Call]) -> None:
    online.add_calls([*(aged(n, 40) for n in range(50)), aged(50, 0)])
    written = iter(range(100, 200))

    def write(_: Pruned) -> None:
        online.add_calls([aged(next(written), 0)])

    assert prune(online, MONTH, ALL, batch_rows=10, now=NOW, on_progress=write).calls == 50
    assert len(uids(online)) == next(written) - 100 + 1


def fill(store: OnlineStore, aged: Callable[..., Call], start: int) -> None:
    large = '"' + os.urandom(8_000).hex() + '"'
    store.add_calls([aged(n, 40, output=large) for n in range(start, start + 1000)])
    store.add_calls([aged(start + 1000, 0)])


@pytest.fixture
def plain(store_url: str) -> Iterator[OnlineStore]:
    store = OnlineStore(store_url)
    store.upgrade()
    yield store
    store.close()


def test_the_space_goes_back(plain: OnlineStore, aged: Callable[..., Call]) -> None:
    empty = bytes_of(plain)
    fill(plain, aged, 0)
    full = bytes_of(plain)
    assert prune(plain, MONTH, ALL, now=NOW).calls == 1000
    steps: list[int] = []
    assert give_back(plain, on_progress=steps.append)
    if plain.dialect == "sqlite":
        assert bytes_of(plain) < empty + (full - empty) / 10
        assert len(steps) > 1
        assert steps[-1] == 0
    fill(plain, aged, 2000)
    assert bytes_of(plain) < full + (full - empty) / 4, "the space is used again"
    assert prune(plain, MONTH, ALL, now=NOW).calls == 1000
    assert give_back(plain, compact=True)
    assert bytes_of(plain) < empty + (full - empty) / 5
    assert len(uids(plain)) == 2


def test_a_file_that_cannot_shrink_says_so_until_it_was_compacted(tmp_path: Path, aged: Callable[..., Call]) -> None:
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    with store.write() as connection:
        metadata.tables["releases"].create(connection)  # a first page in the old mode
        connection.exec_driver_sql("DROP TABLE releases")
    store.upgrade()
    fill(store, aged, 0)
    full = bytes_of(store)
    prune(store, MONTH, ALL, now=NOW)
    assert not give_back(store)
    assert give_back(store, compact=True)
    assert bytes_of(store) < full / 5
    fill(store, aged, 2000)
    prune(store, MONTH, ALL, now=NOW)
    assert give_back(store), "from now on it shrinks by itself"
    assert bytes_of(store) < full / 5
    store.close()
