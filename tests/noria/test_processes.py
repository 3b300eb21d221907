"""One home, one Noria; and what a killed one left behind is found and ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from noria.config import Config, load
from noria.contracts.errors import ConfigError
from noria.processes import MARK, end_leftovers, environment, only_one, prepare_home

ROOT = Path(__file__).parents[2]
SLEEPER = [sys.executable, "-c", "import time; time.sleep(120)"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(ROOT / "noria.toml", {"NORIA_HOME": str(tmp_path)})


def test_a_second_noria_on_the_same_home_is_refused(config: Config) -> None:
    with only_one(config), pytest.raises(ConfigError, match="already runs on"), only_one(config):
        pass


def test_the_home_is_free_again_afterwards(config: Config) -> None:
    held = []
    for _ in range(2):
        with only_one(config):
            held.append(config.home_dir)
    assert len(held) == 2


def test_what_a_killed_one_left_behind_is_ended_and_nothing_else(config: Config) -> None:
    left = subprocess.Popen(SLEEPER, env=environment(config), start_new_session=True)
    other = subprocess.Popen(SLEEPER, env={**os.environ, MARK: "/another/home"}, start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while psutil.Process(left.pid).environ().get(MARK) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert end_leftovers(config) == [left.pid]
        assert not psutil.pid_exists(left.pid) or left.poll() is not None
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_dagster_gets_its_configuration(config: Config) -> None:
    prepare_home(config)
    text = (config.dagster_home / "dagster.yaml").read_text()
    assert "noria/target" in text
    assert "telemetry" in text
