"""A store of an earlier Noria is brought to the present schema with all that it holds."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, inspect, make_url, text

import noria.stores.online
from noria.contracts.call import Call, Score
from noria.contracts.errors import ConfigError
from noria.stores import tables
from noria.stores.online import OnlineStore

MakeCall = Callable[..., Call]
MakeScore = Callable[..., Score]


@pytest.fixture
def online(store_url: str) -> Iterator[OnlineStore]:
    """A store without a schema."""
    store = OnlineStore(store_url)
    if store.file is not None:
        store.file.parent.mkdir(parents=True)
    yield store
    store.close()


def migrate(online: OnlineStore, step: Callable[[Config, str], None], revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(noria.stores.online._MIGRATIONS))
    with online.write() as connection:
        config.attributes["connection"] = connection
        step(config, revision)


def fill(online: OnlineStore, records: list[Call], stated: list[Score]) -> None:
    """Rows as v0001 wrote them."""
    with online.write() as connection:
        for number, call in enumerate(records, start=1):
            connection.execute(tables.calls.insert(), [tables.call_to_row(call)])
            if call.tokens is not None:
                row = {"call_id": number, **tables.tokens_to_row(call.tokens)}
                connection.execute(tables.call_tokens.insert(), [row])
        connection.execute(tables.scores.insert(), [tables.score_to_row(score) for score in stated])
        row = {"target": "a.b", "version": "1", "checkpoint": "c", "state": "live", "weight": 1.0}
        connection.execute(tables.releases.insert(), [row])


def test_a_store_of_v0001_keeps_everything(online: OnlineStore, make_call: MakeCall, make_score: MakeScore) -> None:
    migrate(online, command.upgrade, "v0001")
    records = [make_call(n, tokens=None if n % 3 else make_call(n).tokens) for n in range(20)]
    stated = [make_score(f"t{n}") for n in range(5)]
    fill(online, records, stated)
    problem = online.schema_problem()
    assert problem is not None
    assert "is at schema revision v0001, this Noria needs v0002; run `noria db upgrade`" in problem
    if online.dialect == "postgresql":  # what followers read by is not there yet
        with pytest.raises(ConfigError, match="noria db upgrade"):
            online.calls_after(0, 10)

    online.upgrade()
    assert online.schema_problem() is None
    assert online.calls_after(0, 100) == [replace(call, id=n) for n, call in enumerate(records, start=1)]
    assert online.scores_after(0, 100) == [replace(score, id=n) for n, score in enumerate(stated, start=1)]
    assert online.last_call_id() == 20
    with online.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM releases")).scalar_one() == 1

    assert online.add_calls([records[0], make_call(20)]) == 1
    assert online.add_scores([stated[0], make_score("new")]) == 1
    assert [call.uid for call in online.calls_after(20, 10)] == [make_call(20).uid]
    assert [score.target_id for score in online.scores_after(5, 10)] == ["new"]


@pytest.mark.postgres
def test_a_database_that_is_not_in_utf8_is_refused(postgres_url: str, postgres_admin: Engine) -> None:
    name = f"{make_url(postgres_url).database}_latin"
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    store = OnlineStore(make_url(postgres_url).set(database=name).render_as_string(hide_password=False))
    with pytest.raises(ConfigError, match="has the encoding SQL_ASCII; calls are in UTF-8"):
        store.upgrade()
    store.close()


def test_down_and_up_again_loses_no_call(online: OnlineStore, make_call: MakeCall) -> None:
    online.upgrade()
    online.add_calls([make_call(n) for n in range(4)])
    migrate(online, command.downgrade, "v0001")
    with online.read() as connection:
        found = inspect(connection)
        assert "call_bodies" not in found.get_table_names()
    online.upgrade()
    assert [call.id for call in online.calls_after(0, 10)] == [1, 2, 3, 4]
    migrate(online, command.downgrade, "base")
    assert not online.schema_current()
