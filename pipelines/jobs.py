"""The three jobs of the wheel."""

import dagster as dg

ingest = dg.define_asset_job(
    "ingest",
    selection=dg.AssetSelection.assets("sampled_calls", "warehouse_calls"),
    description="Take over into the warehouse what the proxy has landed.",
)

turn = dg.define_asset_job(
    "turn",
    selection=dg.AssetSelection.assets(
        "train_set",
        "val_set",
        "trajectories",
        "rewarded_batch",
        "checkpoint",
        "eval_report",
        "promoted_model",
    ),
    description="One round of one target: from its train set to the release, if the gate passes.",
)

cold_start = dg.define_asset_job(
    "cold_start",
    selection=dg.AssetSelection.assets("cold_start"),
    description="Make the first weights and release them to every target that serves nothing yet.",
)
