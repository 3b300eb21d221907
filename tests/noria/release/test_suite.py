import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from noria.contracts.errors import ConfigError, IntegrityError, InvalidRecord, NotFound
from noria.release.suite import freeze, load_suite
from noria.stores.artifacts import Artifacts

ITEMS = [
    {
        "item": f"q{k}",
        "input": {"messages": [{"role": "user", "content": f"frage {k} ü"}]},
        "reference": {"right_function": {"value": 1.0, "explanation": {"expected": "t"}}},
    }
    for k in (2, 0, 1)
]


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path)


def test_a_frozen_suite_is_read_back_as_it_was(artifacts: Artifacts) -> None:
    suite = freeze(ITEMS, artifacts, "shop.router")
    assert suite.path == f"suites/shop.router/{suite.sha256[:16]}.parquet"
    assert load_suite(artifacts, suite.path) == suite
    assert [item.item for item in suite.items] == ["q0", "q1", "q2"]
    assert json.loads(suite.items[0].input) == ITEMS[1]["input"]
    assert suite.items[0].reference == ITEMS[1]["reference"]


def test_the_hash_is_of_the_content_not_of_order_or_spelling(artifacts: Artifacts) -> None:
    suite = freeze(ITEMS, artifacts, "shop.router")
    as_text = [
        {
            "item": item["item"],
            "input": json.dumps(item["input"], indent=2),
            "reference": json.dumps(item["reference"]),
        }
        for item in reversed(ITEMS)
    ]
    before = artifacts.local(suite.path).stat().st_mtime_ns
    assert freeze(as_text, artifacts, "shop.router") == suite
    assert artifacts.local(suite.path).stat().st_mtime_ns == before, "written once"
    assert freeze(ITEMS[:2], artifacts, "shop.router").sha256 != suite.sha256


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "no items"),
        ([ITEMS[0], ITEMS[0]], "'q2' twice"),
        ([{"item": "a", "input": {}}], "lacks 'reference'"),
        ([{**ITEMS[0], "item": 3}], "must be a string"),
        ([{**ITEMS[0], "item": ""}], "must be a string"),
        ([{**ITEMS[0], "input": "route this"}], "is not JSON"),
        ([{**ITEMS[0], "input": [1]}], "must be a JSON object"),
        ([{**ITEMS[0], "input": {"messages": []}}], "no messages"),
        ([{**ITEMS[0], "reference": {"x": float("nan")}}], "holds JSON only"),
        ([{**ITEMS[0], "reference": {"x": object()}}], "holds JSON only"),
    ],
)
def test_items_of_another_shape_are_told(artifacts: Artifacts, items: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        freeze(items, artifacts, "shop.router")
    assert artifacts.list_dir("suites/shop.router") == []


def test_a_suite_that_was_changed_is_told(artifacts: Artifacts) -> None:
    suite = freeze(ITEMS, artifacts, "shop.router")
    rows = artifacts.read_parquet(suite.path).to_pylist()
    rows[0]["reference"] = "{}"
    artifacts.write_parquet(suite.path, pa.Table.from_pylist(rows), {"sha256": suite.sha256})
    with pytest.raises(IntegrityError, match="holds content with hash"):
        load_suite(artifacts, suite.path)
    with pytest.raises(IntegrityError, match="freeze the suite again"):
        freeze(ITEMS, artifacts, "shop.router")


@pytest.mark.parametrize("data", [b"", b"PAR1 not parquet PAR1"])
def test_a_file_that_is_no_suite_is_told(artifacts: Artifacts, data: bytes) -> None:
    suite = freeze(ITEMS, artifacts, "shop.router")
    artifacts.write_bytes(suite.path, data)
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_suite(artifacts, suite.path)


def test_a_table_with_other_columns_is_told(artifacts: Artifacts) -> None:
    artifacts.write_parquet("suites/shop.router/x.parquet", pa.table({"a": [1]}))
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_suite(artifacts, "suites/shop.router/x.parquet")


def test_a_suite_that_is_not_there_is_told(artifacts: Artifacts) -> None:
    with pytest.raises(NotFound, match="no suite at"):
        load_suite(artifacts, "suites/shop.router/none.parquet")
    with pytest.raises(InvalidRecord, match="leaves the artifact folder"):
        load_suite(artifacts, "../secret.parquet")
