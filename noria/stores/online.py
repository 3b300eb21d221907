"""The online store: every call, score and release, in the order in which they were committed.

SQLite in WAL mode by default: many readers beside one writer, shared by all processes of one machine. A PostgreSQL URL
runs the same code (noria/stores/online_engine.py has what differs, and how long anything waits).

Following by id: a reader that remembers the last id it has seen misses nothing. Writers take turns (BEGIN IMMEDIATE; an
advisory lock on PostgreSQL, which a trigger takes for programs that do not know of it), so ids become visible in
ascending order. Besides, the methods that followers use (`…_after`, `last_…_id`) read on PostgreSQL only up to the
first row whose transaction does not lie below `pg_snapshot_xmin`, the oldest one that still runs. That alone would not
do: a transaction may draw a low id and get a high number, and commit behind one that was read already; bench/follow.py
shows it. Nor may such a row be left out and a later one be read: a program that wrote elsewhere before it inserts here
has a low number with a high id. The price is that a long writing transaction on that server, of whatever database,
holds followers back while it runs; it never makes them skip. A writer that stalls loses its turn after
`STALLED_SECONDS`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    or_,
    select,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError, ProgrammingError

from noria.contracts.call import Call, CallTokens, Score
from noria.contracts.errors import ConfigError, NotFound
from noria.stores import tables
from noria.stores.bodies import Bodies
from noria.stores.bodies_rows import move_out, put_back, require_all
from noria.stores.online_engine import make_engine, prepare_file, reading, require_utf8, take_turn, writing
from noria.stores.online_errors import is_away as is_away
from noria.stores.online_errors import is_schema_missing
from noria.stores.online_insert import insert_bodies, insert_calls, insert_tokens
from noria.stores.tables import LARGE, SCORE_KEY, call_tokens, calls, release_events, scores

INLINE_MAX_BYTES = 65_536

_IDS_PER_QUERY = 500

_CALLS_WITH_TOKENS: Select[Any] = select(
    calls, call_tokens.c.prompt_token_ids, call_tokens.c.completion_token_ids, call_tokens.c.logprobs
).select_from(calls.outerjoin(call_tokens, call_tokens.c.call_id == calls.c.id))


class OnlineStore:
    """Calls, scores and releases behind one SQLAlchemy URL; safe to share between threads.

    Connects lazily; `upgrade` creates or migrates the schema. `bodies` keeps strings of more than `inline_max_bytes`
    outside the tables; without it they stay in the rows. Raises `ConfigError` for a URL that cannot serve. What any
    method raises when the database cannot be used, or refuses a row, `is_away` tells apart.
    """

    def __init__(self, url: str, *, bodies: Bodies | None = None, inline_max_bytes: int = INLINE_MAX_BYTES) -> None:
        self.url = url
        self.bodies = bodies
        self._inline_max_bytes = inline_max_bytes
        self._engine = make_engine(url)
        self._insert: Any = sqlite.insert if self.dialect == "sqlite" else postgresql.insert

    # Schema and connections

    def upgrade(self) -> None:
        """Create the schema or migrate it to the newest revision; safe when several processes do it at once.

        Raises `ConfigError` when the schema is of a later Noria, and for a PostgreSQL database that is not in UTF-8.
        """
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            prepare_file(self._engine)
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        with self.write() as connection:
            require_utf8(connection)
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise ConfigError(f"the online store {self._engine.url!r} cannot be migrated: {error}") from error

    def schema_current(self) -> bool:
        """Whether the schema exists and is at the newest revision."""
        return self.schema_problem() is None

    def schema_problem(self) -> str | None:
        """Why the schema cannot be used and what mends it, as one sentence; None if it is the right one.

        Raises the driver's error when the database cannot be reached.
        """
        from alembic.runtime.migration import MigrationContext

        needed, known = _revisions()
        found: str | None = None
        if self.file is None or self.file.exists():  # connecting would create an empty file
            with self._engine.connect() as connection:
                found = MigrationContext.configure(connection).get_current_revision()
        if found == needed:
            return None
        mend = "run `noria db upgrade`" if found in known else "a later Noria has been here: run that one"
        return f"the online store {self._engine.url!r} is at schema revision {found}, this Noria needs {needed}; {mend}"

    def ping(self) -> None:
        """One trip to the database and back. Raises what `is_away` knows when it is not there."""
        if self.file is not None and not self.file.exists():
            raise ConfigError(f"there is no online store at {self.file}; run `noria db upgrade`")
        with self._engine.connect() as connection:
            connection.execute(select(1))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the store."""
        with self._explained(), reading(self._engine) as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a transaction that no other writer runs beside; commits at the end, or rolls back."""
        with self._explained(), writing(self._engine) as connection, connection.begin():
            take_turn(connection)
            yield connection

    @contextmanager
    def upkeep(self) -> Iterator[Connection]:
        """A connection outside any transaction, for what databases do only there (VACUUM)."""
        with self._explained(), self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    @property
    def file(self) -> Path | None:
        """The file of a SQLite store."""
        return Path(str(self._engine.url.database)) if self.dialect == "sqlite" else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the database's "no such table" into what is wrong and what mends it."""
        try:
            yield
        except (OperationalError, ProgrammingError) as error:
            no_file = self.file is not None and not self.file.exists()
            if not (no_file or is_schema_missing(error.orig)):
                raise
            problem = self.schema_problem()
            if problem is None:
                raise
            raise ConfigError(problem) from error

    # Calls

    def add_calls(self, records: Sequence[Call]) -> int:
        """Append calls with their tokens in one transaction; a uid that is there already changes nothing.

        Returns how many were new. Ids follow the order of `records`. Large strings are on disk as files before a row
        refers to them. Raises `InvalidRecord` for a time without zone, and for a text that no column can hold.
        """
        rows = [tables.call_to_row(call) for call in records]
        if not rows:
            return 0
        tokens = [
            {"uid": row["uid"], **tables.tokens_to_row(call.tokens)}
            for call, row in zip(records, rows, strict=True)
            if call.tokens is not None
        ]
        kept = [] if self.bodies is None else move_out(self.bodies, rows, self._inline_max_bytes)
        with self.write() as connection:
            if self.bodies is not None:
                require_all(self.bodies, kept)
            new = insert_calls(connection, rows)
            insert_tokens(connection, tokens)
            insert_bodies(connection, kept)
            return new

    def calls_after(self, call_id: int, limit: int, *, upto: int | None = None, with_tokens: bool = True) -> list[Call]:
        """At most `limit` calls with an id above `call_id` (and not above `upto`), in id order.

        Large strings stay references, as a row's attributes["large"] tells; `call`, `trace` and `traces` put them back.
        """
        query = (_CALLS_WITH_TOKENS if with_tokens else select(calls)).where(calls.c.id > call_id)
        if upto is not None:
            query = query.where(calls.c.id <= upto)
        with self.read() as connection:
            rows = self._settled_rows(connection, query.order_by(calls.c.id).limit(limit), calls)
            return [tables.call_from_row(row) for row in rows]

    def tokens_after(self, call_id: int, limit: int, *, upto: int | None = None) -> list[tuple[int, CallTokens]]:
        """At most `limit` pairs (call id, tokens) with an id above `call_id` (and not above `upto`), in id order."""
        query = select(call_tokens).where(call_tokens.c.call_id > call_id)
        if self.dialect == "postgresql":
            query = query.join(calls, calls.c.id == call_tokens.c.call_id)
        if upto is not None:
            query = query.where(call_tokens.c.call_id <= upto)
        with self.read() as connection:
            rows = self._settled_rows(connection, query.order_by(call_tokens.c.call_id).limit(limit), calls)
            return [(row["call_id"], tables.tokens_from_row(row)) for row in rows]

    def call(self, call_id: int) -> Call:
        """One call with its tokens. Raises `NotFound`, and `IntegrityError` if a file of its content is missing."""
        found = self._calls(_CALLS_WITH_TOKENS.where(calls.c.id == call_id))
        if not found:
            raise NotFound(f"the online store has no call {call_id}; its ids end at {self.last_call_id()}")
        return found[0]

    def trace(self, trace_id: str, *, tenant: str | None = None, whole: bool = True) -> list[Call]:
        """The calls of one trace with their tokens, in id order, of one tenant or all; empty for an unknown trace.

        Without `whole`, large content stays references, and no file is read.
        """
        query = _CALLS_WITH_TOKENS.where(calls.c.trace_id == trace_id)
        if tenant is not None:
            query = query.where(calls.c.tenant == tenant)
        return self._calls(query.order_by(calls.c.id), whole=whole)

    def traces(self, trace_ids: Iterable[str]) -> list[Call]:
        """The calls of several traces with their tokens, in id order."""
        found: list[Call] = []
        for some in _chunks(trace_ids):
            found += self._calls(_CALLS_WITH_TOKENS.where(calls.c.trace_id.in_(some)))
        return sorted(found, key=lambda call: call.id or 0)

    def last_call_id(self) -> int:
        """The highest id of a call that no running transaction can hold back, 0 when there is none."""
        with self.read() as connection:
            return int(connection.execute(_highest_id(calls).where(self._settled(calls))).scalar_one())

    def count_calls(self) -> int:
        """How many calls there are."""
        with self.read() as connection:
            return connection.execute(select(func.count()).select_from(calls)).scalar_one()

    def _calls(self, query: Select[Any], *, whole: bool = True) -> list[Call]:
        with self.read() as connection:
            found = [tables.call_from_row(row) for row in connection.execute(query).mappings()]
        return [self._whole(call) if whole and LARGE in call.attributes else call for call in found]

    def _whole(self, call: Call) -> Call:
        if self.bodies is None:
            raise ConfigError(
                f"call {call.id} has content in files, and this store was opened without their folder; "
                "open it with OnlineStore(url, bodies=Bodies(config.bodies_dir))"
            )
        return put_back(self.bodies, call)

    def _settled_rows(self, connection: Connection, query: Select[Any], table: Table) -> Iterator[RowMapping]:
        """Rows of a query in id order, up to the first that is not settled (see the module)."""
        rows = connection.execute(query.add_columns(self._settled(table).label("settled"))).mappings()
        return takewhile(lambda row: row["settled"], rows)

    def _settled(self, table: Table) -> ColumnElement[bool]:
        """Whether every transaction up to the one that wrote a row has ended."""
        if self.dialect != "postgresql":
            return true()
        # A row that is seen though its transaction is yet to come was restored from a server that had counted further.
        return literal_column(
            f"({table.name}.written_by < (SELECT pg_snapshot_xmin(pg_current_snapshot()))"
            f" OR {table.name}.written_by >= (SELECT pg_snapshot_xmax(pg_current_snapshot())))",
            Boolean(),
        )

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
        with self.read() as connection:
            rows = self._settled_rows(connection, query.order_by(scores.c.id).limit(limit), scores)
            return [tables.score_from_row(row) for row in rows]

    def last_score_id(self) -> int:
        """The highest id of a score that no running transaction can hold back, 0 when there is none."""
        with self.read() as connection:
            return int(connection.execute(_highest_id(scores).where(self._settled(scores))).scalar_one())

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


@cache
def _revisions() -> tuple[str | None, frozenset[str | None]]:
    """The newest revision, and all from which there is a way to it; None stands for a database without a schema."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(_MIGRATIONS))
    return scripts.get_current_head(), frozenset({None, *(one.revision for one in scripts.walk_revisions())})


def _highest_id(table: Table) -> Select[Any]:
    return select(func.coalesce(func.max(table.c.id), 0))


def _highest(connection: Connection, table: Table) -> int:
    return int(connection.execute(_highest_id(table)).scalar_one())


def _count_above(connection: Connection, table: Table, record_id: int) -> int:
    # Writers take turns, so what lies above is what this one has written.
    query = select(func.count()).select_from(table).where(table.c.id > record_id)
    return int(connection.execute(query).scalar_one())


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    distinct = list(dict.fromkeys(ids))
    for start in range(0, len(distinct), _IDS_PER_QUERY):
        yield distinct[start : start + _IDS_PER_QUERY]
