"""Samples selected by a SQL file that the user edits, and their split into train and validation.

The file holds one SELECT over the warehouse's views (calls, call_tokens, scores, traces) and returns `id` and `input`.
It may use $app, $node, $tenant, $seed and $round, and need not use any of them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from noria.contracts.errors import ConfigError
from noria.stores.warehouse import Warehouse

SAMPLES = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("input", pa.string(), nullable=False)])


def select_samples(
    warehouse: Warehouse,
    sql_path: str | Path,
    params: Mapping[str, object],
    versions: Mapping[str, int] | None = None,
) -> pa.Table:
    """Run the file on pinned versions of the warehouse; (rows) id int64, input string, in the order of the SQL.

    Raises `ConfigError`, naming the file and the mend, unless the file is one read-only SELECT whose result has unique
    integer ids and text inputs without NULLs, of calls that may be trained on (status ok, no rollout, with consent).
    """
    path = Path(sql_path)
    statement = _only_select(path)
    unknown = sorted(statement.named_parameters - params.keys())
    if unknown:
        known = ", ".join(f"${name}" for name in sorted(params))
        raise _error(path, f"uses the parameter ${unknown[0]}", f"the parameters are {known}")
    used = {name: params[name] for name in statement.named_parameters}
    with warehouse.connect(versions) as connection:
        try:
            result = connection.sql(statement, params=used).to_arrow_table()
        except duckdb.Error as error:
            raise _error(path, f"does not run: {_first_line(error)}", "mend the SQL") from error
        samples = _checked(path, result)
        _check_trainable(path, connection, samples)
    return samples


def split(table: pa.Table, fraction: float) -> tuple[pa.Table, pa.Table]:
    """Split rows with a column `input` into (train, validation), order kept.

    `fraction`, from 0 to 1, is the expected share of distinct inputs on the validation side. The side is decided by the
    SHA-256 of the input with case folded and whitespace collapsed: equal inputs fall on the same side, in every round,
    and a larger fraction only moves inputs from train to validation. Raises ValueError for another fraction.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"validation_fraction {fraction} is not between 0 and 1")
    held_back = pa.array([_position(text) < fraction for text in table.column("input").to_pylist()], pa.bool_())
    return table.filter(pc.invert(held_back)), table.filter(held_back)


def _position(text: str) -> float:
    """Where an input lies in [0, 1)."""
    normalized = " ".join(text.casefold().split())
    digest = hashlib.sha256(normalized.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48  # 48 bits: exact as a float, so never rounded up to 1


def _only_select(path: Path) -> duckdb.Statement:
    if not path.is_file():
        raise ConfigError(f"no selection at {path}; set `selection` of the target in noria.toml to a SQL file")
    try:
        statements = duckdb.extract_statements(path.read_text())
    except duckdb.Error as error:
        raise _error(path, f"is not valid SQL: {_first_line(error)}", "mend the SQL") from error
    if len(statements) != 1:
        raise _error(path, f"holds {len(statements)} statements", "leave exactly one SELECT in it")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise _error(path, f"holds a {statements[0].type.name} statement", "selection only reads: write one SELECT")
    return statements[0]


def _checked(path: Path, result: pa.Table) -> pa.Table:
    for name, kind, is_kind in (
        ("id", "integers", pa.types.is_integer),
        ("input", "text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t)),
    ):
        if result.column_names.count(name) != 1:
            returned = ", ".join(result.column_names)
            raise _error(path, f"returns the columns {returned}", f"return one column named {name}")
        column = result.column(name)
        if not is_kind(column.type):
            raise _error(path, f"returns {name} as {column.type}", f"{name} must be {kind}: calls.{name}")
        if column.null_count:
            raise _error(path, f"returns {column.null_count} NULLs in {name}", f"add WHERE {name} IS NOT NULL")
    samples = pa.table([result.column("id").cast(pa.int64()), result.column("input").cast(pa.string())], schema=SAMPLES)
    distinct = samples.column("id").unique()
    if len(distinct) != samples.num_rows:
        twice = samples.num_rows - len(distinct)
        raise _error(path, f"returns {twice} rows whose id was there already", "a join repeats calls: add DISTINCT")
    return samples


def _check_trainable(path: Path, connection: duckdb.DuckDBPyConnection, samples: pa.Table) -> None:
    # Contract of Call: only `ok` is ever trained on, a rollout is never selected, consent decides.
    connection.register("noria_selected", samples)
    row = connection.execute(
        "SELECT s.id, c.id IS NULL, c.status, c.arm, c.consent FROM noria_selected s LEFT JOIN calls c ON s.id = c.id"
        " WHERE c.id IS NULL OR c.status <> 'ok' OR c.arm = 'rollout' OR NOT c.consent ORDER BY s.id LIMIT 1"
    ).fetchone()
    if row is None:
        return
    call_id, missing, status, arm, consent = row
    if missing:
        raise _error(path, f"returns id {call_id}, which is no call", "return calls.id as id")
    raise _error(
        path,
        f"returns call {call_id} (status {status}, arm {arm}, consent {str(consent).lower()})",
        "add WHERE status = 'ok' AND arm <> 'rollout' AND consent",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _error(path: Path, violation: str, mend: str) -> ConfigError:
    return ConfigError(f"{path} {violation}; {mend}")
