"""The code location `operations`: what keeps the house in order, apart from the wheel."""

import dagster as dg

from noria.cli_db import prune_store
from noria.contracts.round import Round, Target
from noria.release.chain import read_plan, round_numbers
from resources.registry import Releases
from resources.settings import Settings
from resources.stores import Stores


class RollBack(dg.Config):
    """Which version of which target is taken back, to which one (its parent if empty), and why.

    The version is named so that pressing the button twice takes back one version, not two.
    """

    target: str
    version: str
    to: str = ""
    why: str


@dg.op(description="Take the live version of a target out of service; the proxy follows within a second.")
def roll_back_release(context: dg.OpExecutionContext, config: RollBack, releases: Releases) -> None:
    """The button: the version before it serves again, and the one taken back is never a candidate again."""
    release = releases.registry.roll_back(
        config.target, version=config.version, to=config.to or None, by="roll_back job", why=config.why
    )
    context.log.info(f"{config.target} is served by {release.version if release else 'the default upstream'}")


@dg.job(description="Take the live version of a target back, by hand: set target, version and why in the launchpad.")
def roll_back() -> None:
    """One op, so that it is one button."""
    roll_back_release()


@dg.op(description="Compact small files of the warehouse and vacuum old versions, never one that a round is pinned to.")
def compact_tables(context: dg.OpExecutionContext, stores: Stores) -> None:
    """Keep what the rounds on disk were selected from."""
    pinned: dict[str, set[int]] = {}
    for name in stores.settings.config.targets:
        target = Target.parse(name)
        for number in round_numbers(stores.artifacts, target):
            for table, version in read_plan(stores.artifacts, Round(target, number)).versions.items():
                pinned.setdefault(table, set()).add(version)
    for table, removed in stores.warehouse.compact(pinned).items():
        context.log.info(f"{table}: {removed}")


@dg.job(description="Nightly housekeeping of the warehouse.")
def compact_warehouse() -> None:
    """One op."""
    compact_tables()


nightly = dg.ScheduleDefinition(
    name="nightly_compaction",
    job=compact_warehouse,
    cron_schedule="30 3 * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
)


@dg.op(description="Delete calls older than [retention] allows, once the warehouse has them, and give the space back.")
def prune_calls(context: dg.OpExecutionContext, stores: Stores) -> None:
    """What `noria db prune` does."""
    report = prune_store(stores.settings.config)
    context.log.info(f"{report.pruned}; {report.bytes_before} bytes before, {report.bytes_after} now")


@dg.job(description="Nightly retention of the online store.")
def prune_online_store() -> None:
    """One op."""
    prune_calls()


retention = dg.ScheduleDefinition(
    name="retention",
    job=prune_online_store,
    cron_schedule="0 4 * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
)

settings = Settings()
stores = Stores(settings=settings)

defs = dg.Definitions(
    jobs=[roll_back, compact_warehouse, prune_online_store],
    schedules=[nightly, retention],
    executor=dg.in_process_executor,
    resources={"settings": settings, "stores": stores, "releases": Releases(stores=stores)},
)
