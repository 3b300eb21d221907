"""Which errors say that the online store is away, and which are about the row that was written.

The difference decides what a writer does: wait and write the same again, or put the row aside and go on.
"""

import sqlite3

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from noria.contracts.errors import ConfigError

# PostgreSQL 18, appendix A. Classes of SQLSTATE that no change of the row would mend: connection (08), transaction
# state, an ended session among it (25), authorization (28), database or schema unknown (3D, 3F), deadlock and
# serialization (40), resources (53), object not in the required state, lock timeout among it (55), operator
# intervention (57), system error (58). Not among them: 22 data, 23 integrity, 54 program limits (a row too large).
_AWAY_CLASSES = frozenset({"08", "25", "28", "3D", "3F", "40", "53", "55", "57", "58"})
_SCHEMA_STATES = frozenset({"42P01", "42703"})  # undefined table, undefined column
_FORBIDDEN_STATES = frozenset({"42501"})  # the role may not do this to the table, whatever the row is

_AWAY_SQLITE = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_NOTADB,
    }
)


_SQLITE_SCHEMA_WORDS = ("no such table", "no such column", "has no column named")  # it has no code of its own for them


def is_away(error: BaseException) -> bool:
    """Whether the store is not there or not ready, so that the same write may succeed later.

    Away: no connection, a server that starts or stops, a lock that was not had in time, a full disk, a schema that is
    missing or of another revision (`ConfigError`), a folder for large content that cannot be written. False for
    whatever is about the row: bad data, a broken constraint, too large a value, a statement refused for what it holds.
    """
    if isinstance(error, (ConfigError, PoolTimeout, OSError)):
        return True
    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        return error.orig is not None and is_away(error.orig)
    if isinstance(error, psycopg.Error):
        if error.sqlstate is None:  # from the client: the connection broke, or the value cannot be sent
            return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
        return error.sqlstate[:2] in _AWAY_CLASSES or error.sqlstate in _FORBIDDEN_STATES or is_schema_missing(error)
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)  # absent on errors of the Python module itself
        return (code is not None and code & 0xFF in _AWAY_SQLITE) or is_schema_missing(error)
    return False


def is_schema_missing(error: BaseException | None) -> bool:
    """Whether a table or column that the code knows is not there."""
    if isinstance(error, psycopg.Error):
        return error.sqlstate in _SCHEMA_STATES
    return isinstance(error, sqlite3.OperationalError) and any(words in str(error) for words in _SQLITE_SCHEMA_WORDS)
