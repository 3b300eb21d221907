from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.contracts.call import Arm, Call, CallStatus
from noria.contracts.errors import ConfigError
from noria.stores.online import OnlineStore
from noria.stores.selection import select_samples, split
from noria.stores.warehouse import Warehouse

PARAMS = {"app": "dispatch", "node": "router", "tenant": "default", "seed": 7, "round": 3}
GOOD = """
-- Newest calls of the node whose trace was judged by the business; a semicolon; in a comment
SELECT c.id, c.input FROM calls c
WHERE c.app = $app AND c.process_node = $node AND c.status = 'ok' AND c.arm <> 'rollout' AND c.consent
ORDER BY hash(c.id, $seed), c.id;
"""


@pytest.fixture
def filled(online: OnlineStore, warehouse: Warehouse, make_call: Callable[..., Call]) -> Warehouse:
    online.add_calls(
        [
            *[make_call(n) for n in range(20)],
            make_call(20, status=CallStatus.UPSTREAM_ERROR),
            make_call(22, arm=Arm.ROLLOUT),
            make_call(24, consent=False),
        ]
    )
    warehouse.sync(online)
    return warehouse


def select(warehouse: Warehouse, folder: Path, sql: str, versions: dict[str, int] | None = None) -> pa.Table:
    file = folder / "selection.sql"
    file.write_text(sql)
    return select_samples(warehouse, file, PARAMS, versions or warehouse.versions())


def test_samples_are_ids_and_inputs_in_the_order_of_the_sql(
    filled: Warehouse, tmp_path: Path, make_call: Callable[..., Call]
) -> None:
    found = select(filled, tmp_path, GOOD)
    assert found.schema.names == ["id", "input"]
    assert [field.type for field in found.schema] == [pa.int64(), pa.string()]
    assert sorted(found.column("id").to_pylist()) == list(range(1, 21, 2))
    assert found.column("id").to_pylist() != list(range(1, 21, 2))
    for row in found.to_pylist():
        assert row["input"] == make_call(row["id"] - 1).input
    assert found.equals(select(filled, tmp_path, GOOD))
    no_parameters = select(
        filled, tmp_path, "WITH c AS (FROM calls) SELECT id::INTEGER AS id, input, 1 AS x FROM c LIMIT 2"
    )
    assert no_parameters.column_names == ["id", "input"]
    assert select(filled, tmp_path, "SELECT id, input FROM calls WHERE id < 0").num_rows == 0


def test_a_pinned_selection_does_not_see_what_comes_later(
    filled: Warehouse, online: OnlineStore, tmp_path: Path, make_call: Callable[..., Call]
) -> None:
    pinned = filled.versions()
    before = select(filled, tmp_path, GOOD, pinned)
    online.add_calls([make_call(n) for n in range(100, 120)])
    filled.sync(online)
    assert select(filled, tmp_path, GOOD, pinned).equals(before)
    assert select(filled, tmp_path, GOOD).num_rows == before.num_rows + 10


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "holds 0 statements; leave exactly one SELECT"),
        ("SELECT 1; SELECT 2", "holds 2 statements"),
        ("SELEC 1", "is not valid SQL: Parser Error"),
        ("DROP VIEW calls", "holds a DROP statement; selection only reads"),
        ("COPY (SELECT 1) TO '/tmp/x.csv'", "holds a COPY statement"),
        ("INSERT INTO calls SELECT 1", "holds a INSERT statement"),
        ("SELECT id, input FROM calls WHERE app = $application", r"uses the parameter \$application; .* \$app, \$node"),
        ("SELECT id, input FROM calls WHERE app = ?", r"uses the parameter \$1"),
        ("SELECT id, inputt FROM calls", "does not run: Binder Error"),
        ("SELECT id FROM calls", "returns the columns id; return one column named input"),
        ("SELECT id, id, input FROM calls", "returns the columns id, id(_1)?, input; return one column named id"),
        ("SELECT uid AS id, input FROM calls", "returns id as .*string; id must be integers"),
        ("SELECT id, day AS input FROM calls", "returns input as date32.*; input must be text"),
        ("SELECT id, CASE WHEN id > 3 THEN input END AS input FROM calls", "returns 3 NULLs in input"),
        (
            "SELECT id, input FROM calls WHERE id < 3 UNION ALL FROM (SELECT id, input FROM calls WHERE id < 2)",
            "1 rows",
        ),
        ("SELECT 10 * id AS id, input FROM calls", "returns id 30, which is no call"),
        ("SELECT id, input FROM calls", r"call 21 \(status upstream_error, arm live, consent true\); add WHERE"),
        ("SELECT id, input FROM calls WHERE status = 'ok'", r"call 22 \(status ok, arm rollout"),
        ("SELECT id, input FROM calls WHERE status = 'ok' AND arm <> 'rollout'", "consent false"),
    ],
)
def test_a_selection_that_breaks_a_rule_names_file_and_mend(
    filled: Warehouse, tmp_path: Path, sql: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"selection\.sql .*{message}"):
        select(filled, tmp_path, sql)


def test_a_missing_file_names_the_key(filled: Warehouse, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no selection at .*none\.sql; set `selection`"):
        select_samples(filled, tmp_path / "none.sql", PARAMS, None)


def table(inputs: list[str]) -> pa.Table:
    return pa.table({"id": pa.array(range(len(inputs)), pa.int64()), "input": pa.array(inputs, pa.string())})


SPACE = st.text(" \t\n\u00a0\u3000", min_size=1, max_size=3)


@given(words=st.lists(st.text(min_size=1, max_size=6), min_size=1), gaps=st.data(), fraction=st.floats(0, 1))
def test_equal_inputs_fall_on_the_same_side(words: list[str], gaps: st.DataObject, fraction: float) -> None:
    words = [word for text in words for word in text.split()]
    variant = gaps.draw(SPACE) + "".join(word + gaps.draw(SPACE) for word in words)
    train, val = split(table([" ".join(words), variant, variant.casefold(), variant.upper().casefold()][:3]), fraction)
    assert 0 in (train.num_rows, val.num_rows)


@given(inputs=st.lists(st.text(max_size=8), max_size=20), fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_split_is_a_partition_that_grows_with_its_fraction(inputs: list[str], fractions: tuple[float, float]) -> None:
    small, large = sorted(fractions)
    rows = table(inputs)
    train, val = split(rows, small)
    assert sorted(train.column("id").to_pylist() + val.column("id").to_pylist()) == list(range(len(inputs)))
    for side in (train, val):
        assert side.column("id").to_pylist() == sorted(side.column("id").to_pylist())
    assert set(val.column("id").to_pylist()) <= set(split(rows, large)[1].column("id").to_pylist())
    alone = split(rows.slice(0, 1), small)
    assert alone[1].num_rows == (1 if 0 in val.column("id").to_pylist() else 0), "no row decides about another"


def test_the_share_is_the_fraction_and_never_changes() -> None:
    inputs = [f"query {n}" for n in range(4000)]
    train, val = split(table(inputs), 0.15)
    assert abs(val.num_rows - 600) < 3 * 23, "three standard deviations of a binomial"
    assert val.column("id").to_pylist()[:5] == split(table(inputs), 0.15)[1].column("id").to_pylist()[:5]
    assert split(table(inputs), 0.0)[1].num_rows == 0
    assert split(table(inputs), 1.0)[0].num_rows == 0
    assert train.num_rows + val.num_rows == 4000
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="not between 0 and 1"):
            split(table([]), fraction)
