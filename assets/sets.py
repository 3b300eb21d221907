"""Station 3: what the model learns from, and what it is checked on, selected by SQL that the user edits."""

import dagster as dg
import pyarrow as pa

from assets.partitions import round_of, rounds
from assets.pictures import table
from assets.quality import check_result
from noria.contracts.errors import StationFailed
from noria.contracts.round import Round
from noria.release.chain import RoundPlan, plan_round
from noria.stores.artifacts import Artifacts
from noria.stores.quality import Rule, validate
from noria.stores.selection import select_samples, split
from resources.registry import Releases
from resources.stores import Stores

RULES = (
    Rule("expect_table_row_count_to_be_between", "the set is not empty", {"min_value": 1}),
    Rule("expect_column_values_to_be_unique", "a call is selected once", {"column": "id"}),
    Rule("expect_column_values_to_not_be_null", "every sample has an input", {"column": "input"}),
    Rule("expect_column_values_to_be_unique", "an input is selected once", {"column": "input"}),
)


def plan_of(stores: Stores, releases: Releases, round_: Round) -> RoundPlan:
    """The round's plan: read if the round has begun, else made now from what is newest."""
    config = stores.settings.config
    target = str(round_.target)
    live = releases.registry.current(target)
    return plan_round(
        stores.artifacts,
        round_,
        seed=config.seed,
        versions=stores.warehouse.versions(),
        cursor=stores.warehouse.last_call_id(),
        live=live.version if live else None,
        failures_before_restart=config.target(target).gate.failures_before_restart,
    )


def make_set(stores: Stores, releases: Releases, round_: Round, name: str) -> tuple[str, pa.Table, RoundPlan, bool]:
    """Path, rows and plan of the round's `train` or `val` set, and whether it was there already.

    Raises `StationFailed` when the selection is empty.
    """
    plan = plan_of(stores, releases, round_)
    path = set_path(stores.artifacts, round_, name)
    if stores.artifacts.exists(path):
        return path, stores.artifacts.read_parquet(path), plan, True
    config = stores.settings.config
    settings = config.target(str(round_.target))
    sql = config.path(settings.selection)
    parameters = {
        "app": round_.target.app,
        "node": round_.target.node,
        "tenant": config.proxy.tenant,
        "seed": plan.seed,
        "round": round_.number,
    }
    selected = select_samples(stores.warehouse, sql, parameters, plan.versions)
    train, val = split(selected, settings.validation_fraction)
    rows = train.slice(0, settings.samples_per_round) if name == "train" else val.slice(0, settings.validation_samples)
    if rows.num_rows == 0 and name == "train":
        raise StationFailed(
            f"{settings.selection} selects nothing to train {round_.target} on (warehouse at call {plan.cursor}); "
            "send traffic with feedback, materialize warehouse_calls, or widen the SQL"
        )
    stores.artifacts.write_parquet(
        path,
        rows,
        {
            "round": round_.key,
            "selection": settings.selection,
            "selection_sha256": stores.artifacts.sha256_file(sql),
            "delta_versions": str(plan.versions),
            "selected": str(selected.num_rows),
        },
    )
    return path, rows, plan, False


def set_path(artifacts: Artifacts, round_: Round, name: str) -> str:
    """Where the round's `train` or `val` set stands."""
    return f"{artifacts.round_dir(round_.key)}/{name}.parquet"


def _result(stores: Stores, path: str, rows: pa.Table, plan: RoundPlan, reused: bool) -> dg.MaterializeResult:
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": rows.num_rows,
            "file": dg.MetadataValue.url(stores.artifacts.url(path)),
            "sha256": stores.artifacts.sha256(path),
            "samples": table(rows.slice(0, 5).to_pylist()),
            "parent": plan.parent,
            "why_this_parent": plan.parent_why,
            "delta_versions": dg.MetadataValue.json(plan.versions),
            "already_there": reused,
        }
    )


@dg.asset(
    deps=["warehouse_calls"],
    partitions_def=rounds,
    group_name="sets",
    kinds={"parquet", "duckdb"},
    description=(
        "**What the model learns from in this round.** One row a recorded call: its id and its input, selected by the "
        "SQL file of the target that you edit (`selection` in noria.toml), from pinned versions of the warehouse."
    ),
)
def train_set(context: dg.AssetExecutionContext, stores: Stores, releases: Releases) -> dg.MaterializeResult:
    """Select and split by a hash of the input; the same SQL on the same versions gives the same bytes."""
    path, rows, plan, reused = make_set(stores, releases, round_of(context), "train")
    return _result(stores, path, rows, plan, reused)


@dg.asset(
    deps=["warehouse_calls"],
    partitions_def=rounds,
    group_name="sets",
    kinds={"parquet", "duckdb"},
    description=(
        "**What the round is checked on, and never learns from.** The other side of the split: the same input always "
        "falls on the same side, in every round."
    ),
)
def val_set(context: dg.AssetExecutionContext, stores: Stores, releases: Releases) -> dg.MaterializeResult:
    """The held-back side of the round's selection."""
    path, rows, plan, reused = make_set(stores, releases, round_of(context), "val")
    return _result(stores, path, rows, plan, reused)


@dg.asset_check(asset=train_set, blocking=True, description="Not empty, no call and no input twice.")
def train_set_is_sound(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """Validate the set that rollouts will be made from (Great Expectations)."""
    rows = stores.artifacts.read_parquet(set_path(stores.artifacts, round_of(context), "train"))
    return check_result(validate(rows, RULES, id_column="id"))


@dg.asset_check(
    asset=val_set,
    blocking=True,
    additional_deps=[train_set],
    description="No input of the validation set stands in the train set.",
)
def val_set_is_not_trained_on(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """Compare both sets by input."""
    round_ = round_of(context)
    train = stores.artifacts.read_parquet(set_path(stores.artifacts, round_, "train"))
    val = stores.artifacts.read_parquet(set_path(stores.artifacts, round_, "val"))
    return leak_result(train, val)


def leak_result(train: pa.Table, val: pa.Table) -> dg.AssetCheckResult:
    """Failed when an input stands in both sets; names the validation rows."""
    trained = set(train.column("input").to_pylist())
    leaked = [row["id"] for row in val.to_pylist() if row["input"] in trained]
    return dg.AssetCheckResult(
        passed=not leaked,
        description=(
            f"{val.num_rows} validation inputs, none in the train set"
            if not leaked
            else f"{len(leaked)} validation inputs are in the train set: ids {leaked[:20]}"
        ),
        metadata={"leaked": len(leaked), "rows": val.num_rows},
    )
