"""Station 2: the calls and scores in the warehouse, exactly once."""

import dagster as dg

from assets.pictures import table
from assets.quality import check_result, no_rows
from noria.contracts.call import CallStatus
from noria.stores.quality import Rule, validate
from resources.stores import Stores

RULES = (
    Rule("expect_column_values_to_be_unique", "a call is in the warehouse once", {"column": "id"}),
    Rule("expect_column_values_to_not_be_null", "a call has a trace", {"column": "trace_id"}),
    Rule(
        "expect_column_values_to_match_regex",
        "a trace id is 32 hexadecimal digits",
        {"column": "trace_id", "regex": "^[0-9a-f]{32}$"},
    ),
    Rule(
        "expect_column_values_to_be_in_set",
        "the status is one that the contract knows",
        {"column": "status", "value_set": [str(status) for status in CallStatus]},
    ),
    Rule("expect_column_values_to_be_between", "no negative latency", {"column": "duration_ms", "min_value": 0}),
    Rule("expect_column_values_to_not_be_null", "the request is kept", {"column": "input"}),
)
CHECKED_ROWS = 20_000
"""The check looks at the newest rows; what came before was checked when it was new."""


@dg.asset(
    deps=["sampled_calls"],
    group_name="traffic",
    kinds={"deltalake", "duckdb"},
    description=(
        "**The traffic, where your analysts can query it.** Calls, tokens and feedback as Delta tables. Each run takes "
        "over what is new since the last, exactly once, by the online store's id; opening the tables in a DuckDB shell "
        "never blocks the wheel."
    ),
)
def warehouse_calls(context: dg.AssetExecutionContext, stores: Stores) -> dg.MaterializeResult:
    """Follow the online store until nothing is left, in micro-batches."""
    before = stores.warehouse.last_call_id()
    result = stores.warehouse.sync(stores.online)
    context.log.info(f"took over {result.calls} calls and {result.scores} scores (ids {result.from_id}-{result.to_id})")
    connection = stores.warehouse.connect()
    newest = connection.sql(
        "SELECT id, app, process_node, status, arm, policy_version, input, output FROM calls ORDER BY id DESC LIMIT 5"
    ).to_arrow_table()
    total = connection.sql("SELECT count(*) AS calls FROM calls").fetchall()
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": total[0][0],
            "new_calls": result.calls,
            "new_scores": result.scores,
            "first_new_id": before + 1,
            "last_call_id": result.to_id,
            "lag_calls": stores.online.last_call_id() - result.to_id,
            "newest": table(newest.to_pylist()),
            "folder": dg.MetadataValue.path(str(stores.settings.config.warehouse_dir)),
        }
    )


@dg.asset_check(
    asset=warehouse_calls, blocking=True, description="The newest calls keep their contract (Great Expectations)."
)
def warehouse_calls_are_sound(stores: Stores) -> dg.AssetCheckResult:
    """Validate the newest rows: ids once, traces well-formed, known status, no negative latency."""
    rows = (
        stores.warehouse.connect()
        .sql(f"SELECT id, trace_id, status, duration_ms, input FROM calls ORDER BY id DESC LIMIT {CHECKED_ROWS}")
        .to_arrow_table()
    )
    if rows.num_rows == 0:
        return no_rows("no calls have landed yet")
    return check_result(validate(rows, RULES, id_column="id"))
