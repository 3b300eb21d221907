"""Data quality by Great Expectations 1.x, in process, on what a station has just written.

A rule is an expectation of the library by its own name; the report names the rows that break it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

MAX_ROWS_NAMED = 20


@dataclass(frozen=True, slots=True)
class Rule:
    """One expectation: its Great Expectations type in snake case, its arguments, and what it means for the reader."""

    expectation: str
    meaning: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that does not hold: how many rows break it, and the ids of the first of them."""

    rule: str
    meaning: str
    rows: int
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Every rule that was checked on how many rows, and those that do not hold."""

    rows: int
    rules: int
    breaches: tuple[Breach, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return not self.breaches


def validate(table: pa.Table, rules: Sequence[Rule], *, id_column: str) -> QualityReport:
    """Check every rule on a table; `id_column` names the column by which a failing row is reported.

    Columns that hold lists are not looked into: give lengths and extremes as columns of their own.
    """
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    definition = (
        context.data_sources.add_pandas("noria").add_dataframe_asset("rows").add_batch_definition_whole_dataframe("all")
    )
    suite = gx.ExpectationSuite(name="rules")
    for index, rule in enumerate(rules):
        suite.add_expectation(_expectation(gx, rule, index))
    result = definition.get_batch({"dataframe": table.to_pandas()}).validate(
        suite, result_format={"result_format": "COMPLETE", "unexpected_index_column_names": [id_column]}
    )
    # The library answers column by column, not in the order asked.
    outcomes = {
        (outcome.expectation_config.meta or {})["rule"]: outcome
        for outcome in result.results
        if outcome.expectation_config is not None
    }
    breaches = [
        _breach(rule, outcomes[index].result, id_column)
        for index, rule in enumerate(rules)
        if not outcomes[index].success
    ]
    return QualityReport(rows=table.num_rows, rules=len(rules), breaches=tuple(breaches))


def _expectation(gx: Any, rule: Rule, index: int) -> Any:
    name = "".join(word.capitalize() for word in rule.expectation.split("_"))
    return getattr(gx.expectations, name)(**rule.arguments, meta={"rule": index})


def _breach(rule: Rule, result: Mapping[str, Any], id_column: str) -> Breach:
    failing = result.get("unexpected_index_list") or []
    ids = tuple(str(row[id_column]) for row in failing[:MAX_ROWS_NAMED])
    count = int(result.get("unexpected_count") or len(failing) or 0)
    column = rule.arguments.get("column")
    return Breach(f"{rule.expectation}({column})" if column else rule.expectation, rule.meaning, count, ids)
