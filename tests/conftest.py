"""PostgreSQL for the tests that are marked `postgres`: one server a session, a fresh database for each test."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url


@pytest.fixture(scope="session")
def postgres_admin() -> Iterator[Engine]:
    """A connection outside any transaction to a server of this session; it starts at first use and ends with it."""
    from bench.postgres import Postgres

    folder = Path(tempfile.mkdtemp(prefix="noria-pg-"))  # pytest's own folders are too deep for a socket's path
    with Postgres(folder / "data") as server:
        engine = create_engine(server.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            # Nothing of a test outlives a power cut; and a worker that analyzes would hold followers back for a moment.
            for setting in ("fsync = off", "autovacuum = off"):
                connection.exec_driver_sql(f"ALTER SYSTEM SET {setting}")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        yield engine
        engine.dispose()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_admin: Engine) -> Iterator[str]:
    """SQLAlchemy URL of an empty database that goes away after the test."""
    name = f"test_{secrets.token_hex(6)}"
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield make_url(postgres_admin.url).set(database=name).render_as_string(hide_password=False)
    with postgres_admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
