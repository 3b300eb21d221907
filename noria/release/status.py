"""The wheel at a glance: per target, what is live, how the last round went, and what the next one waits for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.config import Config
from noria.contracts.errors import NotFound
from noria.contracts.round import Round, Target
from noria.release.chain import read_plan, read_report_summary, round_numbers
from noria.release.registry import Registry
from noria.stores.artifacts import Artifacts
from noria.stores.online import OnlineStore
from noria.stores.warehouse import Warehouse

STATIONS = (
    ("train_set", "train.parquet"),
    ("val_set", "val.parquet"),
    ("trajectories", "trajectories.parquet"),
    ("rewarded_batch", "rewarded.parquet"),
    ("checkpoint", "checkpoint/COMPLETE.json"),
    ("eval_report", "report.json"),
)


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """One target, in words for the terminal."""

    target: str
    enabled: bool
    live: str
    last_round: str
    reached: str
    verdict: str
    waits_for: str


def wheel(config: Config) -> list[TargetStatus]:
    """The status of every target of noria.toml, read from the stores alone: it works while everything is down."""
    online = OnlineStore(config.store_url)
    try:
        if not online.schema_current():
            online.upgrade()
        warehouse, artifacts, registry = (
            Warehouse(config.warehouse_dir),
            Artifacts(config.artifacts_dir),
            Registry(online),
        )
        return [_status(config, name, warehouse, artifacts, registry) for name in config.targets]
    finally:
        online.close()


def _status(config: Config, name: str, warehouse: Warehouse, artifacts: Artifacts, registry: Registry) -> TargetStatus:
    target = Target.parse(name)
    release = registry.current(name)
    numbers = round_numbers(artifacts, target)
    enabled = config.targets[name].enabled
    last = Round(target, numbers[-1]) if numbers else None
    report = read_report_summary(artifacts, last) if last else None
    return TargetStatus(
        target=name,
        enabled=enabled,
        live=release.version if release else "-",
        last_round=last.key if last else "-",
        reached=_reached(artifacts, last) if last else "-",
        verdict=f"{report['verdict']}: {report['reason']}" if report else "-",
        waits_for=_waits_for(config, name, warehouse, artifacts, last) if enabled else "off: set enabled = true",
    )


def _reached(artifacts: Artifacts, round_: Round) -> str:
    folder = artifacts.round_dir(round_.key)
    missing = next((station for station, file in STATIONS if not artifacts.exists(f"{folder}/{file}")), None)
    if missing is None:
        return "done"
    if artifacts.exists(f"{folder}/failure.json"):
        failure: Mapping[str, Any] = artifacts.read_json(f"{folder}/failure.json")
        return "; ".join(f"failed at {station}: {why}" for station, why in failure["stations"].items())
    return f"at {missing}"


def _waits_for(config: Config, name: str, warehouse: Warehouse, artifacts: Artifacts, last: Round | None) -> str:
    if last is not None:
        reached = _reached(artifacts, last)
        if reached.startswith("failed"):
            return "the sensor to take its failed round up again"
        if reached != "done":
            return "its round to end"
    try:
        cursor = read_plan(artifacts, last).cursor if last else 0
    except NotFound:
        cursor = 0
    count, _ = warehouse.count_traces_after(name, cursor)
    wanted = config.sensors.min_new_trajectories
    if count >= wanted:
        return "the sensor's next look"
    return f"{count} of {wanted} new trajectories"
