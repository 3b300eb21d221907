"""Which errors mean that the store is away, raised by the databases themselves."""

import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError

from noria.contracts.call import Call
from noria.contracts.errors import ConfigError, InvalidRecord, NotFound
from noria.stores import tables
from noria.stores.bodies import Bodies
from noria.stores.online import OnlineStore, is_away

MakeCall = Callable[..., Call]


@pytest.fixture
def online(store_url: str) -> Iterator[OnlineStore]:
    store = OnlineStore(store_url)
    store.upgrade()
    yield store
    store.close()


def error_of(step: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, is what the tests ask
        step()
    return caught.value


def test_a_store_without_schema_is_away(store_url: str, make_call: MakeCall) -> None:
    store = OnlineStore(store_url)
    for step in (lambda: store.add_calls([make_call(0)]), store.last_call_id):
        error = error_of(step)
        assert isinstance(error, ConfigError)
        assert "noria db upgrade" in str(error)
        assert is_away(error)
    problem = store.schema_problem()
    assert problem is not None
    assert "is at schema revision None, this Noria needs v0002; run `noria db upgrade`" in problem
    store.upgrade()
    assert store.schema_problem() is None
    store.ping()
    with store.write() as connection:
        connection.execute(text("DROP TABLE call_tokens"))
    assert is_away(error_of(lambda: store.add_calls([make_call(0)]))), "the version is right, a table is gone"
    store.close()


def test_a_row_that_the_database_refuses_is_not_away(online: OnlineStore) -> None:
    def insert(**fields: object) -> Callable[[], object]:
        def step() -> None:
            with online.write() as connection:
                connection.execute(tables.releases.insert(), [{**row, **fields}])

        return step

    row = {"target": "a.b", "version": "1", "checkpoint": "c", "state": "live", "weight": 1.0}
    insert()()
    for refused in (insert(), insert(version="2"), insert(version=None), insert(version="3", weight="heavy")):
        error = error_of(refused)
        assert not is_away(error), error
    with online.write() as connection:
        error = error_of(lambda: connection.execute(text("SELEKT 1")))
        assert isinstance(error, DBAPIError)
        assert not is_away(error)
        connection.rollback()


def test_errors_of_records_are_not_away(online: OnlineStore, make_call: MakeCall) -> None:
    assert not is_away(
        error_of(lambda: online.add_calls([make_call(0, request_time=make_call(0).request_time.replace(tzinfo=None))]))
    )
    assert not is_away(InvalidRecord("x"))
    assert not is_away(NotFound("x"))
    assert not is_away(ValueError("x"))
    assert is_away(ConnectionRefusedError())


def test_a_folder_for_content_that_cannot_be_written_is_away(
    store_url: str, tmp_path: Path, make_call: MakeCall
) -> None:
    (tmp_path / "file").touch()
    store = OnlineStore(store_url, bodies=Bodies(tmp_path / "file"), inline_max_bytes=1024)
    store.upgrade()
    assert is_away(error_of(lambda: store.add_calls([make_call(0, input=f'"{"x" * 2000}"')])))
    store.close()


def test_a_locked_or_broken_sqlite_file_is_away(tmp_path: Path, make_call: MakeCall) -> None:
    path = tmp_path / "online.db"
    store = OnlineStore(f"sqlite:///{path}?timeout=0.05")
    assert is_away(error_of(store.ping)), "no file"
    assert not path.exists()
    store.upgrade()
    with sqlite3.connect(path) as holder:
        holder.execute("BEGIN IMMEDIATE")
        error = error_of(lambda: store.add_calls([make_call(0)]))
        assert "database is locked" in str(error)
        assert is_away(error)
    holder.close()
    assert store.add_calls([make_call(0)]) == 1
    with store.write() as connection:
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, sqlite3.Connection)
        pages = raw.execute("PRAGMA page_count").fetchone()[0]
        raw.execute(f"PRAGMA max_page_count = {pages}")
        error = error_of(
            lambda: connection.execute(tables.calls.insert(), [tables.call_to_row(make_call(1, input="x" * 9999))])
        )
        assert "full" in str(error)
        assert is_away(error)
        raw.execute("PRAGMA max_page_count = 1000000")
        raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 5000)
        error = error_of(
            lambda: connection.execute(tables.calls.insert(), [tables.call_to_row(make_call(1, input="x" * 9999))])
        )
        assert "too big" in str(error)
        assert not is_away(error)
        connection.rollback()
    store.close()
    path.write_bytes(b"no database at all, but a text of some length" * 100)
    broken = OnlineStore(f"sqlite:///{path}")
    assert is_away(error_of(broken.last_call_id))
    broken.close()


@pytest.mark.postgres
def test_a_value_too_large_for_an_index_is_about_the_row(postgres_url: str, make_call: MakeCall) -> None:
    store = OnlineStore(postgres_url)
    store.upgrade()
    error = error_of(lambda: store.add_calls([make_call(0, uid=secrets.token_hex(20_000))]))
    assert "index row" in str(error)
    assert not is_away(error)
    store.close()
    nowhere = OnlineStore(make_url(postgres_url).set(database="nobody_made_it").render_as_string(hide_password=False))
    assert is_away(error_of(nowhere.ping))


@pytest.mark.postgres
def test_a_server_that_stops_is_away_and_comes_back(make_call: MakeCall) -> None:
    from bench.postgres import Postgres

    folder = Path(tempfile.mkdtemp(prefix="noria-pg-"))
    with Postgres(folder / "data") as server:
        store = OnlineStore(server.url)
        store.upgrade()
        assert store.add_calls([make_call(0)]) == 1

        def write_while_it_stops() -> None:
            with store.write() as connection:
                server.stop()
                connection.execute(text("SELECT 1"))

        assert is_away(error_of(write_while_it_stops))
        for step in (lambda: store.add_calls([make_call(1)]), store.ping, store.schema_problem, store.last_call_id):
            assert is_away(error_of(step))
        server.start()
        assert store.add_calls([make_call(0), make_call(1)]) == 1
        store.close()
    shutil.rmtree(folder, ignore_errors=True)
