"""The code location `learning`: the lineage, its checks, the jobs and the sensors that turn it."""

import dagster as dg

from assets import (
    checkpoint,
    cold_start,
    eval_report,
    promoted_model,
    rewarded_batch,
    sampled_calls,
    sets,
    trajectories,
    warehouse_calls,
)
from pipelines import jobs, sensors
from resources.agent import Agent
from resources.judge import Judge
from resources.policy import Policy
from resources.registry import Releases
from resources.settings import Settings
from resources.stores import Stores
from resources.trainer import Trainer

STATIONS = [
    sampled_calls,
    warehouse_calls,
    sets,
    trajectories,
    rewarded_batch,
    checkpoint,
    eval_report,
    promoted_model,
    cold_start,
]

settings = Settings()
stores = Stores(settings=settings)

defs = dg.Definitions(
    assets=dg.load_assets_from_modules(STATIONS),
    asset_checks=dg.load_asset_checks_from_modules(STATIONS),
    jobs=[jobs.ingest, jobs.turn, jobs.cold_start],
    sensors=[sensors.traffic_landed, sensors.enough_trajectories, sensors.run_failed],
    # The heavy work runs in processes of its own (policy server, judge, trainer); a process per step would only wait.
    executor=dg.in_process_executor,
    resources={
        "settings": settings,
        "stores": stores,
        "releases": Releases(stores=stores),
        "agent": Agent(settings=settings),
        "policy": Policy(settings=settings),
        "judge": Judge(settings=settings),
        "trainer": Trainer(),
    },
)
