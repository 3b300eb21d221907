"""The warehouse: calls, tokens and scores as Delta tables that any engine reads, followed from the online store.

Exactly once: the rows of a batch and the cursor behind them (the last id taken over) are one Delta commit, the cursor
as an application transaction (Delta protocol, "Transaction Identifiers"). A crash leaves both or neither, and of two
processes that take over the same rows Delta lets one commit; the other reads the cursor again. Each table has its own
cursor, so a crash between two tables is mended by the next sync.

Readers pin versions: `connect(versions)` sees the Parquet files of exactly those versions, whatever is written
meanwhile.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from noria.contracts.errors import IntegrityError, NotFound, StationFailed
from noria.contracts.round import Target
from noria.stores.online import OnlineStore
from noria.stores.tables import SCORE_KEY
from noria.stores.warehouse_tables import (
    CONFIGURATION,
    PARTITIONS,
    SCHEMAS,
    calls_to_arrow,
    scores_to_arrow,
    tokens_to_arrow,
)

_CURSOR = "sync"
_MAX_CONFLICTS = 50

_TRACES = """
CREATE VIEW traces AS SELECT
    trace_id,
    arg_min(app, id) AS app,
    arg_min(tenant, id) AS tenant,
    list(process_node ORDER BY id) AS nodes,
    min(request_time) AS request_time,
    CASE WHEN bool_or(arm = 'rollout') THEN 'rollout' WHEN bool_or(arm = 'canary') THEN 'canary' ELSE 'live' END AS arm,
    min(id) AS min_id,
    max(id) AS max_id
FROM calls GROUP BY trace_id
"""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What one sync took over.

    calls, tokens, scores   rows that this process committed
    from_id, to_id          the calls' ids, both inclusive; to_id is from_id - 1 when nothing was new
    lag                     highest id of the online store minus to_id, right after
    """

    calls: int
    tokens: int
    scores: int
    from_id: int
    to_id: int
    lag: int


class Warehouse:
    """Delta tables `calls`, `call_tokens` and `scores` below a folder or object-store URL; made at first use."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(root) if "://" in str(root) else str(Path(root).resolve())

    # Following the online store

    def sync(self, online: OnlineStore, batch: int = 5000) -> SyncResult:
        """Take over what the online store holds now and the warehouse does not, `batch` rows a commit.

        Any number of processes may do it at once. Raises `StationFailed` when other writers keep winning,
        and `IntegrityError` when the online store ends before what was taken over.
        """
        last_call, last_score = online.last_call_id(), online.last_score_id()
        before = self.cursors()
        if last_call < before["calls"] or last_score < before["scores"]:
            raise IntegrityError(
                f"the warehouse {self.root} has followed an online store to call {before['calls']} and score "
                f"{before['scores']}, but this one ends at {last_call} and {last_score}: it is another store; "
                "give [store] url the one that belongs to it, or delete the warehouse's folder to build it again"
            )
        taken = {
            "calls": self._follow("calls", lambda: self.sync_calls(online, batch, last_call)),
            "tokens": self._follow("call_tokens", lambda: self.sync_tokens(online, batch, last_call)),
            "scores": self._follow("scores", lambda: self.sync_scores(online, batch, last_score)),
        }
        after = self.last_call_id()
        return SyncResult(**taken, from_id=before["calls"] + 1, to_id=after, lag=max(0, online.last_call_id() - after))

    def sync_calls(self, online: OnlineStore, batch: int, upto: int) -> int:
        """Commit the next calls and their cursor; the number of rows, 0 when none is left."""
        table = self._open("calls")
        found = online.calls_after(_cursor(table), batch, upto=upto, with_tokens=False)
        if found:
            write_deltalake(table, calls_to_arrow(found), mode="append", commit_properties=_commit(found[-1].id))
        return len(found)

    def sync_tokens(self, online: OnlineStore, batch: int, upto: int) -> int:
        """Commit the next rows of `call_tokens` and their cursor; the number of rows, 0 when none is left."""
        table = self._open("call_tokens")
        found = online.tokens_after(_cursor(table), batch, upto=upto)
        if found:
            write_deltalake(table, tokens_to_arrow(found), mode="append", commit_properties=_commit(found[-1][0]))
        return len(found)

    def sync_scores(self, online: OnlineStore, batch: int, upto: int) -> int:
        """Merge the next scores by their key and commit the cursor; the number of rows, 0 when none is left."""
        table = self._open("scores")
        found = online.scores_after(_cursor(table), batch, upto=upto)
        if found:
            same_key = " AND ".join(f"kept.{name} = new.{name}" for name in SCORE_KEY)
            table.merge(
                scores_to_arrow(found),
                predicate=same_key,
                source_alias="new",
                target_alias="kept",
                commit_properties=_commit(found[-1].id),
            ).when_matched_update_all("new.id > kept.id").when_not_matched_insert_all().execute()
        return len(found)

    def _follow(self, name: str, step: Callable[[], int]) -> int:
        total = 0
        while taken := _despite_conflicts(name, step):
            total += taken
        return total

    def last_call_id(self) -> int:
        """The highest id of a call that has been taken over, 0 when there is none."""
        return _cursor(self._open("calls"))

    def cursors(self) -> dict[str, int]:
        """The last id taken over, by table: of a call for `calls` and `call_tokens`, of a score for `scores`."""
        return {name: _cursor(self._open(name)) for name in SCHEMAS}

    # Reading

    def versions(self) -> dict[str, int]:
        """The newest version of each table: what a set is pinned to."""
        return {name: self._open(name).version() for name in SCHEMAS}

    def connect(self, versions: Mapping[str, int] | None = None) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB with the views calls, call_tokens, scores and traces.

        The views read exactly the versions that are given; a table that is not named is read at its newest. Raises
        `NotFound` for a version that does not exist.
        """
        connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "TimeZone": "UTC"})
        for name in SCHEMAS:
            self._create_view(connection, name, (versions or {}).get(name))
        connection.execute(_TRACES)
        return connection

    def count_traces_after(self, target: str, call_id: int) -> tuple[int, int]:
        """How many traces hold a call of the target, with an id above `call_id`, that could be trained on.

        Such a call has status ok, the user's consent, and is no rollout. The second number is the highest id among
        them, or `call_id` when there is none: a cursor that never goes back.
        """
        node = Target.parse(target)
        with duckdb.connect(config={"autoinstall_known_extensions": "false", "TimeZone": "UTC"}) as connection:
            self._create_view(connection, "calls", None)
            row = connection.execute(
                "SELECT count(DISTINCT trace_id), coalesce(max(id), $after) FROM calls WHERE app = $app"
                " AND process_node = $node AND id > $after AND status = 'ok' AND arm <> 'rollout' AND consent",
                {"app": node.app, "node": node.node, "after": call_id},
            ).fetchone()
        count, highest = row or (0, call_id)
        return int(count), int(highest)

    def _create_view(self, connection: duckdb.DuckDBPyConnection, name: str, version: int | None) -> None:
        files = self._files(name, version)
        # Quoted, because `at` is a keyword; an empty app is null as a partition value.
        columns = ", ".join(
            "coalesce(app, '') AS app" if field == "app" else f'"{field}"' for field in SCHEMAS[name].names
        )
        if not files:
            connection.register(f"empty_{name}", SCHEMAS[name].empty_table())
            connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM empty_{name}")
            return
        quoted = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
        hive = "hive_types = {'day': DATE, 'app': VARCHAR}" if name in PARTITIONS else "hive_partitioning = false"
        connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM read_parquet([{quoted}], {hive})")

    # Upkeep

    def compact(self, retain_versions: Mapping[str, Collection[int]], *, retention_hours: int = 168) -> dict[str, int]:
        """Join small files, then delete files that no retained version reads; files deleted, by table.

        Kept are the newest version, the versions in `retain_versions` (by table), and every file that was replaced
        less than `retention_hours` ago, which a reader may still have open.
        """
        deleted: dict[str, int] = {}
        for name in SCHEMAS:
            keep = sorted(retain_versions.get(name, ()))
            deleted[name] = _despite_conflicts(name, partial(self._compact, name, keep, retention_hours))
        return deleted

    def _compact(self, name: str, keep: list[int], retention_hours: int) -> int:
        self._open(name).optimize.compact()
        deleted = self._open(name).vacuum(
            retention_hours=retention_hours,
            dry_run=False,
            enforce_retention_duration=False,  # what a shorter retention endangers is kept by version
            keep_versions=keep,
        )
        return len(deleted)

    # Tables

    def _uri(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def _open(self, name: str, version: int | None = None) -> DeltaTable:
        uri = self._uri(name)
        if not DeltaTable.is_deltatable(uri):
            with suppress(CommitFailedError):  # another process has just made it
                DeltaTable.create(
                    uri,
                    SCHEMAS[name],
                    mode="ignore",
                    partition_by=PARTITIONS.get(name),
                    configuration=CONFIGURATION,
                )
        if version is None:
            return DeltaTable(uri)
        try:
            return DeltaTable(uri, version=version)
        except DeltaError as error:
            newest = DeltaTable(uri).version()
            raise NotFound(f"warehouse table {name} has no version {version}; its newest is {newest}") from error

    def _files(self, name: str, version: int | None) -> list[str]:
        # The log holds URL-encoded paths relative to the table; `file_uris` would encode the root and decode the rest.
        actions = pa.table(self._open(name, version).get_add_actions(flatten=True))
        return sorted(f"{self._uri(name)}/{unquote(path)}" for path in actions.column("path").to_pylist())


def _despite_conflicts(name: str, step: Callable[[], int]) -> int:
    """Run a step that starts from the table's newest version; again, when another process has committed meanwhile."""
    for _ in range(_MAX_CONFLICTS):
        try:
            return step()
        except CommitFailedError as error:
            conflict = error
    raise StationFailed(
        f"warehouse {name}: other writers won {_MAX_CONFLICTS} times in a row; run one sync at a time ({conflict})"
    ) from conflict


def _cursor(table: DeltaTable) -> int:
    return table.transaction_version(_CURSOR) or 0


def _commit(last_id: int | None) -> CommitProperties:
    if last_id is None:
        raise ValueError("rows of the online store have ids")
    return CommitProperties(app_transactions=[Transaction(_CURSOR, last_id)])
