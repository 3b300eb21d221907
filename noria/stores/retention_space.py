"""The space of deleted rows: how much a store takes, and how it gives back what it no longer needs."""

from collections.abc import Callable

from sqlalchemy import text

from noria.stores.online import OnlineStore

_PAGES = 500  # given back in one transaction of SQLite: 2 MB, about 0.1 s on a busy machine
_INCREMENTAL = 2  # what PRAGMA auto_vacuum says for it
_TABLES = "calls, call_tokens, call_bodies, scores, pinned_answers"


def bytes_of(store: OnlineStore) -> int:
    """Bytes on disk: the SQLite file and its log, or the PostgreSQL database. Files of large content are not in it."""
    if store.file is not None:
        paths = (store.file, store.file.with_name(f"{store.file.name}-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())
    with store.read() as connection:
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


def give_back(
    store: OnlineStore, *, compact: bool = False, on_progress: Callable[[int], None] = lambda pages: None
) -> bool:
    """Return the space of deleted rows; whether all of it could be.

    SQLite: the file shrinks, in steps between which others write; `on_progress` is told how many free pages are left.
    False for a file that an earlier Noria made, which cannot shrink so. PostgreSQL: VACUUM, after which new rows take
    the space, and the end of the table goes back to the disk.

    `compact` rewrites everything (VACUUM; VACUUM FULL on PostgreSQL): writers wait meanwhile and as much disk is needed
    again, but the space returns whatever the file is, and an old SQLite file shrinks by itself from then on.
    """
    if store.dialect == "postgresql":
        with store.upkeep() as connection:
            connection.exec_driver_sql(f"VACUUM ({'FULL, ' if compact else ''}ANALYZE) {_TABLES}")
        return True
    with store.upkeep() as connection:
        if compact:
            connection.exec_driver_sql(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            connection.exec_driver_sql("VACUUM")
        incremental = bool(connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() == _INCREMENTAL)
    free = _free_pages(store) if incremental else 0
    while free:
        with store.write() as connection:
            connection.exec_driver_sql(f"PRAGMA incremental_vacuum({_PAGES})").close()
        left = _free_pages(store)
        on_progress(left)
        if left >= free:  # others delete as fast; the next run goes on
            break
        free = left
    with store.upkeep() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
    return incremental


def _free_pages(store: OnlineStore) -> int:
    with store.read() as connection:
        return int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
