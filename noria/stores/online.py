"""The online store: every call, score and release, in the order in which they were committed.

SQLite in WAL mode by default: many readers beside one writer, shared by all processes of one machine. A PostgreSQL URL
runs the same SQL. Writers take turns (BEGIN IMMEDIATE; an advisory lock on PostgreSQL), so ids become visible in
ascending order and a follower that remembers the last id it has seen misses nothing.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Select,
    Table,
    and_,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    make_url,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError, ProgrammingError

from noria.contracts.call import Call, CallTokens, Score
from noria.contracts.errors import ConfigError, NotFound
from noria.stores import tables
from noria.stores.tables import SCORE_KEY, call_tokens, calls, release_events, scores

BUSY_SECONDS = 30.0
"""How long a writer waits for its turn."""

_WRITES = "noria_writes"
_ADVISORY_LOCK = 0x6E6F726961  # "noria"
_IDS_PER_QUERY = 500

_CALLS_WITH_TOKENS: Select[Any] = select(
    calls, call_tokens.c.prompt_token_ids, call_tokens.c.completion_token_ids, call_tokens.c.logprobs
).select_from(calls.outerjoin(call_tokens, call_tokens.c.call_id == calls.c.id))


class OnlineStore:
    """Calls, scores and releases behind one SQLAlchemy URL; safe to share between threads.

    Connects lazily; `upgrade` creates or migrates the schema. Raises `ConfigError` for a URL that cannot serve.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = _make_engine(url)
        self._insert: Any = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert

    # Schema and connections

    def upgrade(self) -> None:
        """Create the schema or migrate it to the newest revision; safe when several processes do it at once.

        Raises `ConfigError` when the schema is of a later Noria.
        """
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._use_wal()
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        with self.write() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise ConfigError(f"the online store {self._engine.url!r} cannot be migrated: {error}") from error

    def schema_current(self) -> bool:
        """Whether the schema exists and is at the newest revision."""
        found, needed = self._revisions()
        return found == needed

    def _revisions(self) -> tuple[str | None, str | None]:
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        needed = ScriptDirectory(str(_MIGRATIONS)).get_current_head()
        if self._file is not None and not self._file.exists():
            return None, needed  # connecting would create an empty file
        with self._engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision(), needed

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the store."""
        with self._explained(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a transaction that no other writer runs beside; commits at the end, or rolls back."""
        with (
            self._explained(),
            self._engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            yield connection

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @property
    def _file(self) -> Path | None:
        if self._engine.dialect.name != "sqlite":
            return None
        return Path(str(self._engine.url.database))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the database's "no such table" into what is wrong and what mends it."""
        try:
            yield
        except (OperationalError, ProgrammingError) as error:
            found, needed = self._revisions()
            if found == needed:
                raise
            raise ConfigError(
                f"the online store {self._engine.url!r} is at schema revision {found}, this Noria needs {needed}; "
                "start the services or call OnlineStore.upgrade()"
            ) from error

    def _use_wal(self) -> None:
        # Changing the journal mode does not wait for the busy timeout; two first starts at once must take turns here.
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                with self._engine.connect() as connection:
                    raw: Any = connection.connection.dbapi_connection
                    if raw.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                        raw.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    # Calls

    def add_calls(self, records: Sequence[Call]) -> int:
        """Append calls with their tokens in one transaction; a uid that is there already changes nothing.

        Returns how many were new. Ids follow the order of `records`. Raises `InvalidRecord` for a time without zone.
        """
        rows = [tables.call_to_row(call) for call in records]
        tokens = [
            {"call_uid": call.uid, **tables.tokens_to_row(call.tokens)} for call in records if call.tokens is not None
        ]
        if not rows:
            return 0
        with self.write() as connection:
            before = _highest(connection, calls)
            connection.execute(self._insert(calls).on_conflict_do_nothing(index_elements=["uid"]), rows)
            if tokens:
                call_id = select(calls.c.id).where(calls.c.uid == bindparam("call_uid")).scalar_subquery()
                insert = self._insert(call_tokens).values(
                    call_id=call_id, **{name: bindparam(name) for name in tokens[0] if name != "call_uid"}
                )
                connection.execute(insert.on_conflict_do_nothing(index_elements=["call_id"]), tokens)
            return _count_above(connection, calls, before)

    def calls_after(self, call_id: int, limit: int, *, upto: int | None = None, with_tokens: bool = True) -> list[Call]:
        """At most `limit` calls with an id above `call_id` (and not above `upto`), in id order."""
        query = (_CALLS_WITH_TOKENS if with_tokens else select(calls)).where(calls.c.id > call_id)
        if upto is not None:
            query = query.where(calls.c.id <= upto)
        return self._calls(query.order_by(calls.c.id).limit(limit))

    def tokens_after(self, call_id: int, limit: int, *, upto: int | None = None) -> list[tuple[int, CallTokens]]:
        """At most `limit` pairs (call id, tokens) with an id above `call_id` (and not above `upto`), in id order."""
        query = select(call_tokens).where(call_tokens.c.call_id > call_id)
        if upto is not None:
            query = query.where(call_tokens.c.call_id <= upto)
        with self.read() as connection:
            rows = connection.execute(query.order_by(call_tokens.c.call_id).limit(limit)).mappings()
            return [(row["call_id"], tables.tokens_from_row(row)) for row in rows]

    def call(self, call_id: int) -> Call:
        """One call with its tokens. Raises `NotFound`."""
        found = self._calls(_CALLS_WITH_TOKENS.where(calls.c.id == call_id))
        if not found:
            raise NotFound(f"the online store has no call {call_id}; its ids end at {self.last_call_id()}")
        return found[0]

    def trace(self, trace_id: str) -> list[Call]:
        """The calls of one trace with their tokens, in id order; empty for an unknown trace."""
        return self._calls(_CALLS_WITH_TOKENS.where(calls.c.trace_id == trace_id).order_by(calls.c.id))

    def traces(self, trace_ids: Iterable[str]) -> list[Call]:
        """The calls of several traces with their tokens, in id order."""
        found: list[Call] = []
        for some in _chunks(trace_ids):
            found += self._calls(_CALLS_WITH_TOKENS.where(calls.c.trace_id.in_(some)))
        return sorted(found, key=lambda call: call.id or 0)

    def last_call_id(self) -> int:
        """The highest id of a call, 0 when there is none."""
        with self.read() as connection:
            return _highest(connection, calls)

    def count_calls(self) -> int:
        """How many calls there are."""
        with self.read() as connection:
            return connection.execute(select(func.count()).select_from(calls)).scalar_one()

    def _calls(self, query: Select[Any]) -> list[Call]:
        with self.read() as connection:
            return [tables.call_from_row(row) for row in connection.execute(query).mappings()]

    # Scores

    def add_scores(self, records: Sequence[Score]) -> int:
        """Write scores in one transaction; the last of several with the same key counts.

        A score that says the same again (value, source, explanation) changes nothing. One that says something else
        supersedes: it replaces the old row under a new id, so that a follower by id sees it. Returns how many were
        written. Raises `InvalidRecord` for a value that is not finite.
        """
        latest: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in map(tables.score_to_row, records):
            key = tuple(row[name] for name in SCORE_KEY)
            latest.pop(key, None)
            latest[key] = row
        if not latest:
            return 0
        rows = list(latest.values())
        superseded = delete(scores).where(
            *(scores.c[name] == bindparam(f"key_{name}") for name in SCORE_KEY),
            or_(
                scores.c.value != bindparam("new_value"),
                scores.c.source != bindparam("new_source"),
                scores.c.explanation.is_distinct_from(bindparam("new_explanation")),
            ),
        )
        changes = [
            {f"key_{name}": row[name] for name in SCORE_KEY}
            | {f"new_{name}": row[name] for name in ("value", "source", "explanation")}
            for row in rows
        ]
        with self.write() as connection:
            before = _highest(connection, scores)
            connection.execute(superseded, changes)
            connection.execute(self._insert(scores).on_conflict_do_nothing(index_elements=SCORE_KEY), rows)
            return _count_above(connection, scores, before)

    def scores_after(self, score_id: int, limit: int, *, upto: int | None = None) -> list[Score]:
        """At most `limit` scores with an id above `score_id` (and not above `upto`), in id order."""
        query = select(scores).where(scores.c.id > score_id)
        if upto is not None:
            query = query.where(scores.c.id <= upto)
        return self._scores(query.order_by(scores.c.id).limit(limit))

    def last_score_id(self) -> int:
        """The highest id of a score, 0 when there is none."""
        with self.read() as connection:
            return _highest(connection, scores)

    def scores_of_trace(self, trace_id: str) -> list[Score]:
        """What was said about a trace and about its calls, in id order: later statements stand last."""
        return self.scores_of_traces([trace_id])

    def scores_of_traces(self, trace_ids: Iterable[str]) -> list[Score]:
        """What was said about several traces and about their calls (target_kind `call`, by uid), in id order."""
        found: list[Score] = []
        for some in _chunks(trace_ids):
            uids = select(calls.c.uid).where(calls.c.trace_id.in_(some))
            of_trace = and_(scores.c.target_kind == "trace", scores.c.target_id.in_(some))
            of_call = and_(scores.c.target_kind == "call", scores.c.target_id.in_(uids))
            found += self._scores(select(scores).where(or_(of_trace, of_call)))
        return sorted(found, key=lambda score: score.id or 0)

    def _scores(self, query: Select[Any]) -> list[Score]:
        with self.read() as connection:
            return [tables.score_from_row(row) for row in connection.execute(query).mappings()]

    # Releases

    def release_head(self) -> int:
        """The highest id of a release event, 0 when there is none: a cache of releases is stale when it has moved."""
        with self.read() as connection:
            return _highest(connection, release_events)


_MIGRATIONS = Path(__file__).with_name("migrations")


def _highest(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.coalesce(func.max(table.c.id), 0))).scalar_one())


def _count_above(connection: Connection, table: Table, record_id: int) -> int:
    # Writers take turns, so what lies above is what this one has written.
    query = select(func.count()).select_from(table).where(table.c.id > record_id)
    return int(connection.execute(query).scalar_one())


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    distinct = list(dict.fromkeys(ids))
    for start in range(0, len(distinct), _IDS_PER_QUERY):
        yield distinct[start : start + _IDS_PER_QUERY]


def _make_engine(text: str) -> Engine:
    try:
        url = make_url(text)
        backend = url.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise ConfigError(f"[store] url names {backend!r}; the online store runs on sqlite or postgresql")
        if backend == "postgresql":
            return create_engine(url, pool_pre_ping=True)
        if url.database in (None, "", ":memory:"):
            raise ConfigError("[store] url names an in-memory SQLite; the processes of Noria share it: name a file")
        engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(f"[store] url cannot be used: {error}") from error
    event.listen(engine, "connect", _on_sqlite_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _on_sqlite_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own; `_on_sqlite_begin` does
    connection.execute("PRAGMA synchronous = NORMAL")  # in WAL mode a power cut can lose commits, never corrupt
    connection.execute("PRAGMA foreign_keys = ON")


def _on_sqlite_begin(connection: Connection) -> None:
    # IMMEDIATE waits for its turn at the start; a deferred transaction that turns from reading to writing fails.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
