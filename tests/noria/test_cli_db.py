"""`noria db` against both databases."""

import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from noria.cli_db import db, online_store
from noria.config import load
from noria.contracts.call import Arm, Call, CallStatus
from noria.contracts.errors import ConfigError
from noria.stores.warehouse import Warehouse


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A project whose store has no schema yet."""
    text = "[retention]\nmax_age_days = 30\n"
    if request.param == "postgresql":
        text += f'[store]\nurl = "{request.getfixturevalue("postgres_url")}"\n'
    (tmp_path / "noria.toml").write_text(text)
    return tmp_path


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(db, list(arguments), env={"NORIA_CONFIG": str(home / "noria.toml")})


def call(n: int, days: float) -> Call:
    ended = datetime.now(UTC) - timedelta(days=days)
    return Call(
        uid=f"u{n}",
        tenant="default",
        app="a",
        process_node="n",
        trace_id=f"t{n}",
        model_name="m",
        policy_version=None,
        arm=Arm.LIVE,
        input=f'["{"x" * 100_000}{n}"]',
        output="{}",
        status=CallStatus.OK,
        request_time=ended,
        response_time=ended,
        duration_ms=1.0,
    )


def test_a_store_is_upgraded_looked_at_and_pruned(home: Path) -> None:
    before = run(home, "status")
    assert isinstance(before.exception, ConfigError)
    assert "run `noria db upgrade`" in str(before.exception)
    assert "was brought to the schema" in run(home, "upgrade").stdout
    assert "is the schema" in run(home, "upgrade").stdout

    config = load(home / "noria.toml")
    with online_store(config) as store:
        store.add_calls([*(call(n, 40) for n in range(20)), call(20, 1)])
    status = run(home, "status")
    assert status.exit_code == 0, status.output
    assert "calls       21 (last id 21)" in status.stdout
    files = [path for path in config.bodies_dir.rglob("*") if path.is_file()]
    assert len(files) == 21, "large strings lie beside the artifacts"

    kept = run(home, "prune").stdout
    assert "deleted     0 calls" in kept
    assert "the warehouse has taken no call over yet" in kept
    with online_store(config) as store:
        Warehouse(config.warehouse_dir).sync(store)
    for path in files:
        os.utime(path, (0, 0))
    pruned = run(home, "prune", "--compact")
    assert pruned.exit_code == 0, pruned.output
    assert "deleted     20 calls, 0 scores, 0 pinned answers, 20 files," in pruned.stdout
    with online_store(config) as store:
        assert [one.uid for one in store.trace("t20")] == ["u20"]
        assert store.count_calls() == 1


def test_nothing_expires_unless_it_is_configured(home: Path) -> None:
    (home / "noria.toml").write_text((home / "noria.toml").read_text().replace("max_age_days = 30\n", ""))
    run(home, "upgrade")
    assert "no call expires: set max_age_days" in run(home, "prune").stdout


def test_a_store_that_cannot_be_reached_is_one_line_without_the_password(tmp_path: Path) -> None:
    url = "postgresql://user:sesame@127.0.0.1:1/noria?connect_timeout=2"
    (tmp_path / "noria.toml").write_text(f'[store]\nurl = "{url}"\n')
    for verb in ("status", "upgrade", "prune"):
        error = run(tmp_path, verb).exception
        assert isinstance(error, ConfigError), error
        assert "user:***@127.0.0.1:1" in str(error)
        assert "refused" in str(error)
        assert "sesame" not in str(error)
        assert "\n" not in str(error)


def test_an_old_file_is_told_how_to_shrink(tmp_path: Path) -> None:
    (tmp_path / ".noria").mkdir()
    with sqlite3.connect(tmp_path / ".noria" / "online.db") as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()
    (tmp_path / "noria.toml").touch()
    run(tmp_path, "upgrade")
    assert "cannot shrink yet: run `noria db prune --compact` once" in run(tmp_path, "prune").stdout
    assert "cannot shrink" not in run(tmp_path, "prune", "--compact").stdout
    assert "cannot shrink" not in run(tmp_path, "prune").stdout


def test_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "noria.toml").touch()
    result = subprocess.run(
        [sys.executable, "-m", "noria.cli", "db", "status"],
        env={**os.environ, "NORIA_CONFIG": str(tmp_path / "noria.toml")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("noria: the online store ")
    assert result.stderr.count("\n") == 1
