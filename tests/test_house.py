"""The rules that keep the house a house."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipelines import learning, operations

ROOT = Path(__file__).parent.parent
ROOMS = ("noria", "training", "resources", "assets", "pipelines")


def modules(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def test_a_room_imports_only_from_rooms_below_it() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout


def test_what_exists_without_dagster_does_not_import_it() -> None:
    offenders = {
        path.name: name
        for path in modules("noria", "training")
        for name in imported_names(path)
        if name.split(".")[0] in ("dagster", "dagster_webserver", "assets", "pipelines", "resources")
    }
    assert offenders == {}


def test_only_training_entry_points_speak_pipes() -> None:
    users = {path.name for path in modules(*ROOMS) if "dagster_pipes" in imported_names(path)}
    assert users <= {"train.py", "cold_start.py", "progress.py"}


@pytest.mark.parametrize("location", ["pipelines.learning", "pipelines.operations"])
def test_loading_a_code_location_loads_no_heavy_library(location: str) -> None:
    program = (
        f"import sys, {location} as location; location.defs\n"
        "heavy = {'torch', 'transformers', 'trl', 'deepspeed', 'great_expectations', 'matplotlib.pyplot'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("location", "jobs"),
    [
        (learning.defs, {"cold_start", "ingest", "turn"}),
        (operations.defs, {"compact_warehouse", "prune_online_store", "roll_back"}),
    ],
    ids=["learning", "operations"],
)
def test_a_code_location_loads_as_dagster_loads_it(location: dg.Definitions, jobs: set[str]) -> None:
    repository = location.get_repository_def()
    repository.load_all_definitions()
    assert {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")} == jobs


def test_contracts_need_only_the_standard_library_and_pydantic() -> None:
    allowed = set(sys.stdlib_module_names) | {"noria", "pydantic"}
    outside = {
        (path.name, name)
        for path in modules("noria/contracts")
        for name in imported_names(path)
        if name.split(".")[0] not in allowed
    }
    assert outside == set()


def test_packages_are_named_explicitly_and_all_of_them() -> None:
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert named == found


def test_every_public_docstring_rule_and_type_rule_is_switched_on() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["mypy"]["strict"] is True
    assert "D" in tool["ruff"]["lint"]["select"]
    assert tool["pytest"]["ini_options"]["filterwarnings"][0] == "error"


def test_every_locked_dependency_is_locked_exactly() -> None:
    locked = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in locked if "==" not in line] == []
    names = {canonicalize_name(line.split("==")[0]) for line in locked}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        canonicalize_name(Requirement(requirement).name)
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    }
    assert wanted - names == set()
