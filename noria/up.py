"""Everything on one machine: `noria up`."""

import os
import subprocess
import sys

from noria.config import Config
from noria.contracts.errors import ConfigError, StationFailed
from noria.contracts.release import Release
from noria.preflight import check
from noria.processes import (
    Services,
    environment,
    interrupt_on_signals,
    only_one,
    prepare_home,
    require_free_ports,
)
from noria.release.registry import Registry
from noria.stores.artifacts import Artifacts
from noria.stores.online import OnlineStore

PROCESSES = ("policy", "proxy", "judge", "agent", "dagster", "traffic")
EXIT_STATION = 1


def up(config: Config) -> int:
    """Prepare the home, cold-start the model if there is none, and run every process until one ends or Ctrl-C.

    Returns the exit code. Raises `ConfigError` for what the user must mend first.
    """
    check(config)
    interrupt_on_signals()
    with only_one(config):
        require_free_ports(config, PROCESSES)
        prepare_home(config)
        upgrade_store(config)
        cold_start(config)
        mend_runs(config)
        _say("Starting the services (the UI takes about half a minute) …")
        with Services(config, PROCESSES, started=lambda name: _say(f"  {name} answers")) as services:
            _say(greeting(config))
            code = services.wait()
            _say(f"A process has ended, and so the others were stopped. The last lines of {services.log}:")
            _say(services.last_lines())
            return code or EXIT_STATION


def upgrade_store(config: Config) -> None:
    """Bring the online store to the current schema."""
    online = OnlineStore(config.store_url)
    try:
        online.upgrade()
    finally:
        online.close()


def cold_start(config: Config) -> None:
    """Make the base weights and release them, through their Dagster asset, unless there is nothing left to do."""
    made = Artifacts(config.artifacts_dir).completed("base") is not None
    if made and all(release is not None for release in _live(config).values()):
        return
    if not made:
        _say("Making the first weights (about a minute on two cores) …")
    process = subprocess.run(
        [sys.executable, "-m", "pipelines.execute", "cold_start"],
        cwd=config.root,
        env=environment(config),
        check=False,
    )
    if process.returncode != 0:
        raise StationFailed("the cold start failed; what it said stands above")


def _live(config: Config) -> dict[str, Release | None]:
    """What serves each enabled target."""
    online = OnlineStore(config.store_url)
    try:
        return {name: Registry(online).current(name) for name in config.enabled_targets}
    finally:
        online.close()


def mend_runs(config: Config) -> None:
    """Close the Dagster runs that a killed machine left open, so that the sensors take their rounds up again."""
    subprocess.run([sys.executable, "-m", "pipelines.mend"], cwd=config.root, env=environment(config), check=True)


def greeting(config: Config) -> str:
    """The five lines: what to open, and what happens next."""
    first = next(iter(config.enabled_targets), None)
    if first is None:
        raise ConfigError('no target is enabled; set enabled = true under [targets."app.node"] in noria.toml')
    wanted = config.sensors.min_new_trajectories
    return (
        f"Noria is up. Open the wheel:  {config.ui.url}/asset-groups\n"
        f"Traffic flows: {config.traffic.rate:g} users' requests a second go through the proxy at {config.proxy.url}.\n"
        f"When {wanted} new trajectories of {first} have landed, a round turns by itself: rollouts, rewards, training, "
        "gate.\n"
        "A round that passes its gate goes live within a second; one that does not costs nothing.\n"
        "Watch: `noria status` here, the sensors and rounds in the UI. Stop with Ctrl-C; `make run` goes on from there."
    )


def _say(text: str) -> None:
    sys.stdout.write(text + os.linesep)
    sys.stdout.flush()
