"""Batches of rows into the online store, as fast as its two databases take them.

PostgreSQL gets one statement per portion, the columns as arrays in psycopg's binary format: one round trip for a
thousand rows, and no moment in which a slow client holds the writers' turn between two of them. SQLite gets one
prepared statement for all rows. Both skip a uid that is there already.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Boolean, Column, Connection, Double, LargeBinary, Table
from sqlalchemy.types import BigInteger

from noria.stores.tables import UtcDateTime, call_bodies, call_tokens, calls

PORTION_BYTES = 32_000_000
"""What one statement carries, more or less: PostgreSQL ends a connection whose message exceeds 1 GB."""

Row = dict[str, Any]

_CALL_COLUMNS = tuple(column for column in calls.columns if column.name != "id")


def insert_calls(connection: Connection, rows: Sequence[Row]) -> int:
    """Insert rows of `calls` in the order given; returns how many were new."""
    new = 0
    for portion in _portions(rows):
        if connection.dialect.name == "postgresql":
            new += _execute_arrays(connection, _PG_CALLS, _CALL_COLUMNS, portion)
        else:
            values = [_for_sqlite(row) for row in portion]
            new += connection.exec_driver_sql(_insert_for_sqlite(tuple(portion[0])), values).rowcount
    return new


def insert_tokens(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert rows of `call_tokens` whose call is named by `uid`."""
    _insert_by_uid(connection, call_tokens, rows)


def insert_bodies(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert rows of `call_bodies` whose call is named by `uid`."""
    _insert_by_uid(connection, call_bodies, rows)


def _insert_by_uid(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    if not rows:
        return
    columns = (calls.c.uid, *(column for column in table.columns if column.name != "call_id"))
    names = ", ".join(column.name for column in columns[1:])
    if connection.dialect.name == "postgresql":
        statement = (
            f"INSERT INTO {table.name} (call_id, {names}) SELECT calls.id, {names}"
            f" FROM unnest({_arrays(columns)}) AS new(call_uid, {names}) JOIN calls ON calls.uid = call_uid"
            " ON CONFLICT DO NOTHING"
        )
        _execute_arrays(connection, statement, columns, rows)
        return
    marks = ", ".join("?" for _ in columns[1:])
    found = f"SELECT id, {marks} FROM calls WHERE uid = ?"
    statement = f"INSERT INTO {table.name} (call_id, {names}) {found} ON CONFLICT DO NOTHING"
    values = [(*(row[column.name] for column in columns[1:]), row["uid"]) for row in rows]
    connection.exec_driver_sql(statement, values)


def _portions(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    start, size = 0, 0
    for end, row in enumerate(rows):
        size += len(row["input"]) + len(row["output"])
        if size > PORTION_BYTES and end > start:
            yield rows[start:end]
            start, size = end, len(row["input"]) + len(row["output"])
    if rows:
        yield rows[start:]


def _execute_arrays(connection: Connection, statement: str, columns: Sequence[Column[Any]], rows: Sequence[Row]) -> int:
    values = tuple([row[column.name] for row in rows] for column in columns)
    return connection.exec_driver_sql(statement, values).rowcount


def _arrays(columns: Sequence[Column[Any]]) -> str:
    """Placeholders of psycopg for one array a column: `%b::text[], …`."""
    return ", ".join(f"%b::{_pg_type(column)}[]" for column in columns)


def _pg_type(column: Column[Any]) -> str:
    for kind, name in (
        (UtcDateTime, "timestamptz"),
        (Boolean, "boolean"),
        (Double, "float8"),
        (LargeBinary, "bytea"),
        (BigInteger, "bigint"),
    ):
        if isinstance(column.type, kind):
            return name
    return "text"


_CALL_NAMES = ", ".join(column.name for column in _CALL_COLUMNS)
_PG_CALLS = (
    f"INSERT INTO calls ({_CALL_NAMES}) SELECT {_CALL_NAMES}"
    f" FROM unnest({_arrays(_CALL_COLUMNS)}) WITH ORDINALITY AS new({_CALL_NAMES}, place) ORDER BY place"
    " ON CONFLICT (uid) DO NOTHING"
)


def _insert_for_sqlite(names: tuple[str, ...]) -> str:
    marks = ", ".join("?" for _ in names)
    return f"INSERT INTO calls ({', '.join(names)}) VALUES ({marks}) ON CONFLICT (uid) DO NOTHING"


def _for_sqlite(row: Row) -> tuple[Any, ...]:
    times = {name: _sqlite_time(row[name]) for name in ("request_time", "response_time")}
    return tuple({**row, **times}.values())


def _sqlite_time(time: datetime) -> str:
    """The text that SQLAlchemy's DateTime reads."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
