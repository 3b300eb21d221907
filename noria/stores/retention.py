"""Retention: calls older than their tenant's limit leave the online store, and their space goes back.

A trace goes whole, once its newest call is older than the limit, and with it its tokens and its references to large
content. Every deletion is a transaction of at most `batch_rows` rows, between which other writers have their turn; so a
trace of more calls than that goes in several, the oldest first. Kept whatever its age is what the warehouse has not
taken over yet (`Taken`), and the last call that it has: by its id the warehouse knows that this is its store.

The tables have no index by time, which every insert would pay for: one pass reads ids and times of all calls.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, or_, select

from noria.stores.bodies import is_hash
from noria.stores.online import OnlineStore
from noria.stores.tables import call_bodies, calls, pinned_answers, scores

if TYPE_CHECKING:
    from noria.stores.warehouse import Warehouse

SCORE_GRACE = timedelta(days=1)
"""A score may arrive before the call that it is about, which waits in a spool; this long it is waited for."""
BODY_GRACE = timedelta(hours=1)
"""A file of content is there before the row that refers to it."""

_T = TypeVar("_T")

_PARAMETERS = 500  # per statement, far below what either database takes


@dataclass(frozen=True, slots=True)
class Ages:
    """How old calls may become, in days: `tenants` for single ones, `default` for all others; None keeps them."""

    default: float | None = None
    tenants: Mapping[str, float] = field(default_factory=dict[str, float])

    def oldest(self, tenant: str, now: datetime) -> datetime | None:
        """Calls of the tenant before this time have expired; None where none ever does."""
        days = self.tenants.get(tenant, self.default)
        return None if days is None else now - timedelta(days=days)

    def expired(self, now: datetime) -> ColumnElement[bool]:
        """The condition on a row of `calls`."""
        conditions = [
            and_(calls.c.tenant == tenant, calls.c.response_time < now - timedelta(days=days))
            for tenant, days in self.tenants.items()
        ]
        if self.default is not None:
            others = calls.c.tenant.not_in(list(self.tenants))
            conditions.append(and_(others, calls.c.response_time < now - timedelta(days=self.default)))
        return or_(*conditions)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing ever expires."""
        return self.default is None and not self.tenants


@dataclass(frozen=True, slots=True)
class Taken:
    """The ids of the last call (with its tokens) and the last score that a follower has taken over; these two stay."""

    calls: int
    scores: int


@dataclass(slots=True)
class Pruned:
    """What has been deleted so far."""

    calls: int = 0
    scores: int = 0
    pinned_answers: int = 0
    files: int = 0
    file_bytes: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, one.name)} {one.name.replace('_', ' ')}" for one in fields(self))


def taken_over(warehouse: "Warehouse", store: OnlineStore) -> Taken:
    """What the warehouse holds of the online store: what may be deleted here."""
    cursors = warehouse.cursors()
    # Its cursor of tokens stands at the last call that has some, so it may lie lower with nothing left to take.
    waiting = store.tokens_after(cursors["call_tokens"], 1, upto=cursors["calls"])
    return Taken(waiting[0][0] - 1 if waiting else cursors["calls"], cursors["scores"])


def prune(
    store: OnlineStore,
    ages: Ages,
    taken: Taken,
    *,
    batch_rows: int = 1000,
    now: datetime | None = None,
    on_progress: Callable[[Pruned], None] = lambda pruned: None,
) -> Pruned:
    """Delete what has expired at `now`; `on_progress` is told after every transaction what is gone in all.

    Scores go when no call of their trace is there, and answers to pinned calls by `ages.default`. Files of large
    content go when no row refers to them, whether or not anything expires. Interrupted at any point, the next run
    goes on. Deleting frees pages inside the database; `retention_space.give_back` returns them to the disk.
    """
    now = datetime.now(UTC) if now is None else now
    pruned = Pruned()
    steps = [_prune_files(store, now, pruned)]
    if not ages.keeps_all:
        steps.insert(0, _prune_calls(store, ages, taken, batch_rows, now, pruned))
        steps.insert(1, _prune_scores(store, taken, batch_rows, now, pruned))
    if ages.default is not None:
        steps.insert(2, _prune_answers(store, now - timedelta(days=ages.default), batch_rows, pruned))
    for step in steps:
        for _ in step:
            on_progress(pruned)
    return pruned


def _prune_calls(
    store: OnlineStore, ages: Ages, taken: Taken, batch_rows: int, now: datetime, pruned: Pruned
) -> Iterator[None]:
    position = 0
    done: set[str] = set()  # traces that are deleted or stay: a long one is not looked at again in every window
    while True:
        with store.read() as connection:
            query = select(calls.c.id, calls.c.trace_id).where(
                calls.c.id > position, calls.c.id < taken.calls, ages.expired(now)
            )
            rows = connection.execute(query.order_by(calls.c.id).limit(batch_rows)).all()
        if not rows:
            return
        position = rows[-1].id
        for trace_ids in _chunks(dict.fromkeys(row.trace_id for row in rows if row.trace_id not in done)):
            deleted = batch_rows
            while deleted == batch_rows:
                with store.write() as connection:
                    deleted = _delete_traces(connection, trace_ids, ages, taken, batch_rows, now)
                pruned.calls += deleted
                yield
            done.update(trace_ids)


def _delete_traces(
    connection: Connection, trace_ids: Sequence[str], ages: Ages, taken: Taken, batch_rows: int, now: datetime
) -> int:
    """Delete up to `batch_rows` calls of those of the traces that have expired whole; returns how many."""
    end = min(taken.calls, connection.execute(select(func.coalesce(func.max(calls.c.id), 0))).scalar_one())
    last = func.max(calls.c.response_time)
    found = connection.execute(
        select(calls.c.tenant, calls.c.trace_id, last.label("last"), func.max(calls.c.id).label("last_id"))
        .where(calls.c.trace_id.in_(trace_ids))
        .group_by(calls.c.tenant, calls.c.trace_id)
    )
    whole: dict[str, list[str]] = {}
    for row in found:
        oldest = ages.oldest(row.tenant, now)
        if oldest is not None and row.last < oldest and row.last_id < end:
            whole.setdefault(row.tenant, []).append(row.trace_id)
    if not whole:
        return 0
    expired = or_(*(and_(calls.c.tenant == tenant, calls.c.trace_id.in_(some)) for tenant, some in whole.items()))
    return _delete(connection, calls, calls.c.id, select(calls.c.id).where(expired).order_by(calls.c.id), batch_rows)


def _prune_scores(store: OnlineStore, taken: Taken, batch_rows: int, now: datetime, pruned: Pruned) -> Iterator[None]:
    of_nothing = or_(
        and_(scores.c.target_kind == "trace", ~exists().where(calls.c.trace_id == scores.c.target_id)),
        and_(scores.c.target_kind == "call", ~exists().where(calls.c.uid == scores.c.target_id)),
    )
    position = 0
    while True:
        with store.read() as connection:  # the long look holds no writer up
            newest_id = connection.execute(select(func.coalesce(func.max(scores.c.id), 0))).scalar_one()
            query = select(scores.c.id).where(
                scores.c.id > position,
                scores.c.id < min(taken.scores, newest_id),
                scores.c.at < now - SCORE_GRACE,
                of_nothing,
            )
            ids = list(connection.scalars(query.order_by(scores.c.id).limit(batch_rows)))
        if not ids:
            return
        position = ids[-1]
        with store.write() as connection:  # a call may have come meanwhile
            for some in _chunks(ids):
                pruned.scores += connection.execute(delete(scores).where(scores.c.id.in_(some), of_nothing)).rowcount
        yield


def _prune_answers(store: OnlineStore, oldest: datetime, batch_rows: int, pruned: Pruned) -> Iterator[None]:
    deleted = batch_rows
    while deleted == batch_rows:
        with store.write() as connection:
            query = select(pinned_answers.c.key).where(pinned_answers.c.at < oldest)
            deleted = _delete(connection, pinned_answers, pinned_answers.c.key, query, batch_rows)
        pruned.pinned_answers += deleted
        yield


def _delete(connection: Connection, table: Table, key: ColumnElement[Any], query: Any, limit: int) -> int:
    """Delete the first `limit` rows whose keys `query` gives; returns how many."""
    keys = list(connection.scalars(query.limit(limit)))
    for some in _chunks(keys):
        connection.execute(delete(table).where(key.in_(some)))
    return len(keys)


def _prune_files(store: OnlineStore, now: datetime, pruned: Pruned) -> Iterator[None]:
    if store.bodies is None:
        return
    for paths in _chunks(store.bodies.older_than((now - BODY_GRACE).timestamp())):
        names = [path.name for path in paths if is_hash(path.name)]
        # In a writer's turn: none can begin to refer to a file between the look and the deletion (OnlineStore).
        with store.write() as connection:
            used = set(connection.scalars(select(call_bodies.c.sha256).where(call_bodies.c.sha256.in_(names))))
            for path in paths:
                with suppress(FileNotFoundError):  # another run has deleted it
                    if path.name not in used:
                        size = path.stat().st_size
                        path.unlink()
                        pruned.files += 1
                        pruned.file_bytes += size
        yield


def _chunks(items: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while chunk := list(islice(rest, _PARAMETERS)):
        yield chunk
