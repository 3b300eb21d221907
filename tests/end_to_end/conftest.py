"""One real wheel for all end-to-end tests: services, agent, traffic, trainer, on free ports and in its own folder."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from noria.config import Config, load
from noria.processes import Services, environment, only_one, prepare_home
from noria.up import cold_start, upgrade_store
from pipelines.demo import SERVICES, free_ports, send_traffic
from pipelines.execute import execute
from pipelines.learning import defs

ROOT = Path(__file__).parents[2]
SMALL = {
    "NORIA_SEED": "0",
    "NORIA_TARGETS__DISPATCH_ROUTER__VALIDATION_SAMPLES": "16",
    "NORIA_TARGETS__DISPATCH_REPLY__ENABLED": "true",
    "NORIA_TARGETS__DISPATCH_REPLY__SAMPLES_PER_ROUND": "12",
    "NORIA_TARGETS__DISPATCH_REPLY__VALIDATION_SAMPLES": "4",
    "NORIA_TRAINING__SAVE_STEPS": "2",
    "NORIA_TRAFFIC__FEEDBACK_DELAY_SECONDS": "0.2",
}


@dataclass(frozen=True)
class Wheel:
    """A home with its services up, traffic sent and ingested."""

    config: Config
    instance: dg.DagsterInstance
    services: Services

    def execute(self, job: str, partition: str | None = None) -> str:
        """Run a job in this process; raises `StationFailed` when it fails."""
        return execute(defs, self.instance, job, partition)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wheel]:
    home = tmp_path_factory.mktemp("wheel")
    proxy, policy, judge, ui, agent = free_ports(5)
    variables = SMALL | {
        "NORIA_HOME": str(home),
        "NORIA_PROXY__PORT": str(proxy),
        "NORIA_POLICY__PORT": str(policy),
        "NORIA_JUDGE__PORT": str(judge),
        "NORIA_UI__PORT": str(ui),
        "NORIA_AGENT__URL": f"http://127.0.0.1:{agent}",
        "NORIA_PROXY__UPSTREAMS__POLICY__URL": f"http://127.0.0.1:{policy}",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        config = load(ROOT / "noria.toml")
        with only_one(config):
            prepare_home(config)
            upgrade_store(config)
            cold_start(config)
            os.environ.update(environment(config))
            with dg.DagsterInstance.get() as instance, Services(config, SERVICES) as services:
                send_traffic(config, None)
                running = Wheel(config, instance, services)
                running.execute("ingest")
                yield running
    finally:
        os.environ.clear()
        os.environ.update(before)
