"""docs/peer_scenarios.md says which test stands behind each scenario."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[5]


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "peer_scenarios.md").read_text()))
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(named) > 50
    assert named - defined == set()


def test_every_test_of_this_folder_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "peer_scenarios.md").read_text()
    here = {
        node.name
        for path in Path(__file__).parent.glob("test_proxy_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    assert {name for name in here if f"`{name}`" not in page} == set()
