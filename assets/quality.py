"""A quality report as the result of an asset check."""

import dagster as dg

from assets.pictures import table
from noria.stores.quality import QualityReport


def check_result(
    report: QualityReport, *, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
) -> dg.AssetCheckResult:
    """Passed when every rule holds; else the rules that do not, with the ids of the rows that break them."""
    return dg.AssetCheckResult(
        passed=report.ok,
        severity=severity,
        description=(
            f"{report.rules} rules hold on {report.rows} rows"
            if report.ok
            else "; ".join(f"{breach.meaning} ({breach.rows} rows)" for breach in report.breaches)
        ),
        metadata={
            "rows": report.rows,
            "rules": report.rules,
            "breaches": table(
                [
                    {"rule": breach.rule, "meaning": breach.meaning, "rows": breach.rows, "ids": ", ".join(breach.ids)}
                    for breach in report.breaches
                ],
                limit=50,
                width=400,
            ),
        },
    )


def no_rows(what: str) -> dg.AssetCheckResult:
    """The result of a check that had nothing to look at."""
    return dg.AssetCheckResult(passed=True, description=f"nothing to check: {what}", metadata={"rows": 0})
