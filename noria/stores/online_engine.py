"""How the online store connects: SQLite in WAL mode, or PostgreSQL through psycopg 3, by URL alone.

Nothing waits for ever. On PostgreSQL connecting ends after `CONNECT_SECONDS`; TCP keepalives find a peer that is gone
within `PEER_GONE_SECONDS`; a writer waits `BUSY_SECONDS` for its turn, and the server ends a writer that holds its turn
and says nothing for `STALLED_SECONDS`. The URL's query overrides what the drivers take (`?connect_timeout=3`; for
SQLite `?timeout=3`, the wait for a turn).
"""

import sqlite3
import time
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from noria.contracts.errors import ConfigError

BUSY_SECONDS = 30.0
"""How long a writer waits for its turn."""
STALLED_SECONDS = 60.0
"""A writer that holds its turn and sends nothing for this long is rolled back by PostgreSQL."""
CONNECT_SECONDS = 10
PEER_GONE_SECONDS = 60

_WRITES = "noria_writes"
_ADVISORY_LOCK = 0x6E6F726961  # "noria"
_CONNECT_ARGS = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": PEER_GONE_SECONDS // 2,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": PEER_GONE_SECONDS * 1000,
    "application_name": "noria",
    "client_encoding": "utf8",
}
# One round trip, and for this transaction only, so that a pooler between here and the server may share connections.
_TAKE_TURN = text(
    "SELECT set_config('lock_timeout', :busy, true), set_config('idle_in_transaction_session_timeout', :stalled, true),"
    " pg_advisory_xact_lock(:lock)"
)


def make_engine(url_text: str) -> Engine:
    """The engine of a URL; connects at first use. Raises `ConfigError` for a URL that cannot serve."""
    try:
        url = make_url(url_text.replace("postgres://", "postgresql://", 1))
        backend = url.get_backend_name()
        if backend == "postgresql":
            return _postgres(url)
        if backend != "sqlite":
            raise ConfigError(f"[store] url names {backend!r}; the online store runs on sqlite or postgresql")
        if url.database in (None, "", ":memory:"):
            raise ConfigError("[store] url names an in-memory SQLite; the processes of Noria share it: name a file")
        engine = create_engine(url, connect_args={} if "timeout" in url.query else {"timeout": BUSY_SECONDS})
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(f"[store] url cannot be used: {error}") from error
    event.listen(engine, "connect", _on_sqlite_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _postgres(url: URL) -> Engine:
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise ConfigError(
            f"[store] url names the driver {url.drivername!r}; write postgresql:// or postgresql+psycopg://"
        )
    defaults = {name: value for name, value in _CONNECT_ARGS.items() if name not in url.query}
    return create_engine(url.set(drivername="postgresql+psycopg"), pool_pre_ping=True, connect_args=defaults)


def reading(engine: Engine) -> Connection:
    """A connection whose transactions see one state of the store and write nothing."""
    connection = engine.connect()
    if engine.dialect.name == "postgresql":  # what SQLite's transactions are by themselves
        connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return connection


def writing(engine: Engine) -> Connection:
    """A connection whose transactions begin as writers; on PostgreSQL each calls `take_turn` first."""
    return engine.connect().execution_options(**{_WRITES: True})


def take_turn(connection: Connection) -> None:
    """Wait until no other writer runs, at most `BUSY_SECONDS`; the turn ends with the transaction.

    SQLite has taken it with BEGIN IMMEDIATE.
    """
    if connection.dialect.name == "postgresql":
        values = {
            "busy": f"{BUSY_SECONDS:.0f}s",
            "stalled": f"{STALLED_SECONDS:.0f}s",
            "lock": _ADVISORY_LOCK,
        }
        connection.execute(_TAKE_TURN, values)


def require_utf8(connection: Connection) -> None:
    """Raise `ConfigError` for a PostgreSQL database in another encoding, which would refuse many a call's text."""
    if connection.dialect.name != "postgresql":
        return
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding != "UTF8":
        raise ConfigError(
            f"the database {connection.engine.url.database!r} has the encoding {encoding}; calls are in UTF-8: "
            "make it with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


def prepare_file(engine: Engine) -> None:
    """Put a SQLite file into WAL mode, and a new one into the mode in which deleted rows can give their space back."""
    # Changing the journal mode does not wait for the busy timeout; two first starts at once must take turns here.
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            with engine.connect() as connection:
                raw: Any = connection.connection.dbapi_connection
                if raw.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    raw.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts only before the first page is written
                    raw.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _on_sqlite_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own; `_on_sqlite_begin` does
    # What the spool has handed over it deletes, so a commit must outlive a power cut; NORMAL would not sync the log.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _on_sqlite_begin(connection: Connection) -> None:
    # IMMEDIATE waits for its turn at the start; a deferred transaction that turns from reading to writing fails.
    options = connection.get_execution_options()
    if options.get("isolation_level") == "AUTOCOMMIT":
        return
    writes = options.get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
