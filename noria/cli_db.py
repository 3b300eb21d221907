"""`noria db`: the schema, the size and the retention of the online store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError
from tqdm import tqdm

from noria.config import Config, load
from noria.contracts.errors import ConfigError
from noria.stores.bodies import Bodies
from noria.stores.online import OnlineStore, is_away
from noria.stores.retention import Ages, Pruned, Taken, prune, taken_over
from noria.stores.retention_space import bytes_of, give_back

db = typer.Typer(help="The online store.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The online store as it is now; `problem` says why it cannot be used, None if it can, and then the rest counts."""

    url: str
    problem: str | None
    calls: int = 0
    last_call_id: int = 0
    last_score_id: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune has deleted, the store's bytes on disk before and after, and whether all free space went back.

    `taken` is what the warehouse had taken over: nothing later than that was deleted.
    """

    pruned: Pruned
    bytes_before: int
    bytes_after: int
    gave_all_back: bool
    taken: Taken


@contextmanager
def online_store(config: Config) -> Iterator[OnlineStore]:
    """The configured store, closed afterwards; a database that cannot be reached is a `ConfigError` of one line."""
    bodies = Bodies(config.bodies_dir)
    store = OnlineStore(config.store_url, bodies=bodies, inline_max_bytes=config.store.inline_max_bytes)
    try:
        yield store
    except DBAPIError as error:
        if not is_away(error):
            raise
        reason = str(error.orig).strip().replace("\n", "; ")
        raise ConfigError(f"the online store {_shown(store)} cannot be used now: {reason}") from error
    finally:
        store.close()


def status_of(config: Config) -> StoreStatus:
    """What `noria db status` prints."""
    with online_store(config) as store:
        problem = store.schema_problem()
        if problem is not None:
            return StoreStatus(_shown(store), problem)
        return StoreStatus(
            _shown(store), None, store.count_calls(), store.last_call_id(), store.last_score_id(), bytes_of(store)
        )


def prune_store(
    config: Config, *, compact: bool = False, on_progress: Callable[[Pruned], None] = lambda pruned: None
) -> PruneReport:
    """Delete what [retention] lets expire and the warehouse has taken over, and give the space back."""
    from noria.stores.warehouse import Warehouse  # brings DuckDB and Delta: not for every verb

    retention = config.retention
    with online_store(config) as store:
        before = bytes_of(store)
        taken = taken_over(Warehouse(config.warehouse_dir), store)
        pruned = prune(
            store,
            Ages(retention.max_age_days, retention.tenants),
            taken,
            batch_rows=retention.batch_rows,
            on_progress=on_progress,
        )
        all_back = give_back(store, compact=compact)
        return PruneReport(pruned, before, bytes_of(store), all_back, taken)


@db.command()
def upgrade() -> None:
    """Bring the online store to the schema of this Noria, for which its services wait; twice changes nothing."""
    with online_store(load()) as store:
        was_current = store.schema_current()
        store.upgrade()
        typer.echo(f"{_shown(store)} {'is' if was_current else 'was brought to'} the schema of this Noria")


@db.command()
def status() -> None:
    """Print where the online store is, whether its schema is right, and what it holds. Exit code 2 if it is not."""
    found = status_of(load())
    if found.problem is not None:
        raise ConfigError(found.problem)
    typer.echo(f"store       {found.url}")
    typer.echo(f"calls       {found.calls} (last id {found.last_call_id})")
    typer.echo(f"last score  {found.last_score_id}")
    typer.echo(f"on disk     {_megabytes(found.bytes)}")


@db.command("prune")
def prune_verb(
    compact: Annotated[
        bool, typer.Option("--compact", help="Rewrite the whole store too: writers wait, and twice the disk is needed.")
    ] = False,
) -> None:
    """Delete calls older than [retention] allows, once they are in the warehouse, and give their space back."""
    config = load()
    with tqdm(unit=" calls", disable=None) as bar:  # no bar where nobody looks

        def show(pruned: Pruned) -> None:
            bar.update(pruned.calls - bar.n)

        report = prune_store(config, compact=compact, on_progress=show)
    if config.retention.max_age_days is None and not config.retention.tenants:
        typer.echo("no call expires: set max_age_days under [retention] in noria.toml")
    elif report.taken.calls == 0:
        typer.echo("the warehouse has taken no call over yet, so all are kept: run the job `ingest`")
    typer.echo(f"deleted     {report.pruned}")
    typer.echo(f"on disk     {_megabytes(report.bytes_before)} before, {_megabytes(report.bytes_after)} now")
    if not report.gave_all_back:
        typer.echo("this file was made by an earlier Noria and cannot shrink yet: run `noria db prune --compact` once")


def _shown(store: OnlineStore) -> str:
    return make_url(store.url).render_as_string(hide_password=True)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
