"""A reader that follows a store by id, beside writers that take no turns, stall, or hold a transaction open."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.exc import DBAPIError

from noria.contracts.call import Call, Score
from noria.stores import tables
from noria.stores.online import OnlineStore, is_away
from noria.stores.online_engine import take_turn

MakeCall = Callable[..., Call]
MakeScore = Callable[..., Score]

pytestmark = pytest.mark.postgres


@pytest.fixture
def online(postgres_url: str) -> Iterator[OnlineStore]:
    store = OnlineStore(postgres_url)
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def other(postgres_url: str) -> Iterator[Engine]:
    """Connections of a program that knows nothing of the writers' turn."""
    engine = create_engine(postgres_url)
    yield engine
    engine.dispose()


def test_a_row_that_commits_late_holds_the_reader_back_and_is_not_skipped(
    online: OnlineStore, other: Engine, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(0)])
    online.add_scores([make_score("a")])
    assert online.last_call_id() == online.last_score_id() == 1
    with other.connect() as late:
        late.execute(text("SET session_replication_role = replica"))  # no trigger makes it take its turn
        late.execute(insert(tables.calls), [tables.call_to_row(make_call(1))])
        late.execute(insert(tables.scores), [tables.score_to_row(make_score("b"))])
        online.add_calls([make_call(2)])
        online.add_scores([make_score("c")])
        assert [call.id for call in online.trace(make_call(2).trace_id)] == [3], "it is committed, above the late one"
        assert online.last_call_id() == online.last_score_id() == 1
        assert [call.id for call in online.calls_after(0, 10)] == [1]
        assert [call_id for call_id, _ in online.tokens_after(0, 10)] == [1]
        assert [score.id for score in online.scores_after(0, 10)] == [1]
        late.commit()
    assert online.last_call_id() == online.last_score_id() == 3
    assert [call.uid for call in online.calls_after(1, 10)] == [make_call(1).uid, make_call(2).uid]
    assert [call_id for call_id, _ in online.tokens_after(1, 10)] == [3]
    assert [score.target_id for score in online.scores_after(1, 10)] == ["b", "c"]


def test_a_low_transaction_number_with_a_high_id_does_not_carry_the_reader_over_the_ids_below(
    online: OnlineStore, other: Engine, make_call: MakeCall, make_score: MakeScore
) -> None:
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE elsewhere (n int)"))
    online.add_calls([make_call(0)])
    online.add_scores([make_score("a")])
    with other.connect() as early, other.connect() as long:
        early.execute(text("INSERT INTO elsewhere VALUES (1)"))
        long.execute(text("INSERT INTO elsewhere VALUES (2)"))
        online.add_calls([make_call(1)])
        online.add_scores([make_score("b")])
        early.execute(insert(tables.calls), [tables.call_to_row(make_call(2))])
        early.execute(insert(tables.scores), [tables.score_to_row(make_score("c"))])
        early.commit()
        assert [call.id for call in online.calls_after(0, 10)] == [1]
        assert [call_id for call_id, _ in online.tokens_after(0, 10)] == [1]
        assert [score.id for score in online.scores_after(0, 10)] == [1]
        long.commit()
    assert [call.id for call in online.calls_after(1, 10)] == [2, 3]
    assert [score.id for score in online.scores_after(1, 10)] == [2, 3]


def test_rows_restored_from_a_server_that_has_counted_further_are_read(
    online: OnlineStore, other: Engine, make_call: MakeCall, make_score: MakeScore
) -> None:
    online.add_calls([make_call(0)])
    online.add_scores([make_score("a")])
    with other.begin() as connection:
        for table in ("calls", "scores"):
            connection.execute(text(f"UPDATE {table} SET written_by = '99999999999'"))
    assert online.last_call_id() == online.last_score_id() == 1
    assert [call.id for call in online.calls_after(0, 10)] == [1]
    assert [score.id for score in online.scores_after(0, 10)] == [1]


def test_a_program_that_knows_nothing_of_turns_takes_one_all_the_same(
    online: OnlineStore, other: Engine, make_call: MakeCall
) -> None:
    with other.connect() as late:
        late.execute(insert(tables.calls), [tables.call_to_row(make_call(0))])
        assert late.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "1min"
        writer = threading.Thread(target=online.add_calls, args=([make_call(1)],))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive(), "it waits until the other has committed"
        assert online.calls_after(0, 10) == []
        late.commit()
    writer.join()
    assert [call.uid for call in online.calls_after(0, 10)] == [make_call(0).uid, make_call(1).uid]


def test_a_reader_is_not_held_back_by_readers(online: OnlineStore, other: Engine, make_call: MakeCall) -> None:
    with other.connect() as reader:
        reader.execute(text("SELECT count(*) FROM calls"))
        online.add_calls([make_call(0)])
        assert online.last_call_id() == 1


def test_what_a_reading_transaction_sees_does_not_change(online: OnlineStore, make_call: MakeCall) -> None:
    count = text("SELECT count(*) FROM calls")
    with online.read() as connection:
        assert connection.execute(count).scalar_one() == 0
        online.add_calls([make_call(0)])
        assert connection.execute(count).scalar_one() == 0
    with online.read() as connection, pytest.raises(DBAPIError, match="read-only transaction"):
        connection.execute(text("DELETE FROM calls"))


def test_a_writer_that_stalls_loses_its_turn(online: OnlineStore, make_call: MakeCall) -> None:
    def stall() -> None:
        with online.write() as connection:
            assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "1min"
            connection.execute(insert(tables.calls), [tables.call_to_row(make_call(0))])
            connection.execute(text("SELECT set_config('idle_in_transaction_session_timeout', '100ms', true)"))
            time.sleep(0.4)
            assert online.add_calls([make_call(1)]) == 1, "the next one writes"
            connection.execute(text("SELECT 1"))

    with pytest.raises(DBAPIError) as caught:
        stall()
    assert is_away(caught.value)
    assert [call.uid for call in online.calls_after(0, 10)] == [make_call(1).uid]


def test_a_writer_waits_for_its_turn_only_so_long(online: OnlineStore, other: Engine) -> None:
    with online.write() as connection:
        assert connection.execute(text("SHOW lock_timeout")).scalar_one() == "30s"
        lock = connection.execute(text("SELECT objid, classid FROM pg_locks WHERE locktype = 'advisory'")).one()
        with other.connect() as waiting:
            waiting.execute(text("SET lock_timeout = '100ms'"))
            with pytest.raises(DBAPIError, match="lock timeout") as caught:
                waiting.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": (lock.classid << 32) + lock.objid})
        assert is_away(caught.value)
    with other.connect() as after:
        take_turn(after)
        assert after.execute(text("SHOW lock_timeout")).scalar_one() == "30s"
        after.rollback()
        assert after.execute(text("SHOW lock_timeout")).scalar_one() == "0", "for the one transaction only"
