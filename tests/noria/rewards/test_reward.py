import json
import subprocess
import sys
from pathlib import Path

import pytest

from noria.contracts.errors import ConfigError
from noria.loading import load_function
from noria.rewards.reward import Attempt, load_reward

ROOT = Path(__file__).resolve().parents[3]
ATTEMPT = Attempt("router", json.dumps({"messages": [{"role": "user", "content": "hi"}]}), "out")


def write(folder: Path, body: str, name: str = "rules.py") -> str:
    (folder / name).write_text(body)
    return f"{name}:judge"


def test_a_number_is_the_total(tmp_path):
    reward = load_reward(write(tmp_path, "def judge(attempt):\n    return len(attempt.output)\n"), tmp_path)
    rewarded = reward(ATTEMPT)
    assert (rewarded.total, rewarded.components) == (3.0, {"reward": 3.0})
    assert reward.name == "rules.py:judge"
    assert len(reward.version) == 12


def test_parts_add_up_unless_the_total_is_stated(tmp_path):
    reward = load_reward(write(tmp_path, "def judge(attempt):\n    return {'a': 0.5, 'b': True}\n"), tmp_path)
    assert (reward(ATTEMPT).total, reward(ATTEMPT).components) == (1.5, {"a": 0.5, "b": 1.0})
    stated = load_reward(write(tmp_path, "def judge(attempt):\n    return {'a': 0.5, 'reward': 2}\n", "b.py"), tmp_path)
    assert (stated(ATTEMPT).total, stated(ATTEMPT).components) == (2.0, {"a": 0.5})


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "None", "'1'", "{}", "{'a': None}", "[1, 2]", "1j"])
def test_anything_but_finite_numbers_is_refused(tmp_path, value):
    reward = load_reward(write(tmp_path, f"def judge(attempt):\n    return {value}\n"), tmp_path)
    with pytest.raises(ConfigError, match=r"rules\.py:judge returned .* finite number"):
        reward(ATTEMPT)


def test_a_reward_that_raises_says_on_what(tmp_path):
    reward = load_reward(write(tmp_path, "def judge(attempt):\n    return attempt.reference['x']\n"), tmp_path)
    with pytest.raises(ConfigError, match=r"raised KeyError: 'x' on an attempt of node 'router' with output 'out'"):
        reward(ATTEMPT)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rules.py", "not of the form"),
        ("rules:judge", "not of the form"),
        ("rules.py:no such", "not of the form"),
        ("missing.py:judge", "cannot read"),
        ("rules.py:judges", r"has no function 'judges' \(it has: judge\)"),
        ("broken.py:judge", "loading broken.py failed: SyntaxError"),
        ("raising.py:judge", "loading raising.py failed: ValueError: no"),
    ],
)
def test_a_bad_spec_is_one_clear_error(tmp_path, spec, message):
    write(tmp_path, "def judge(attempt):\n    return 1\n")
    write(tmp_path, "def judge(:\n", "broken.py")
    write(tmp_path, "raise ValueError('no')\n", "raising.py")
    with pytest.raises(ConfigError, match=message):
        load_reward(spec, tmp_path)


def test_an_edited_file_is_loaded_anew_with_another_version(tmp_path):
    spec = write(tmp_path, "def judge(attempt):\n    return 0\n")
    first = load_reward(spec, tmp_path)
    assert load_reward(spec, tmp_path) == first
    write(tmp_path, "def judge(attempt):\n    return 1\n")
    second = load_reward(spec, tmp_path)
    assert (first(ATTEMPT).total, second(ATTEMPT).total) == (0.0, 1.0)
    assert first.version != second.version


def test_a_file_may_hold_dataclasses_and_import_its_neighbours(tmp_path):
    (tmp_path / "noria_test_neighbour.py").write_text("VALUE = 4\n")
    body = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from noria_test_neighbour import VALUE\n\n@dataclass(slots=True)\nclass A:\n    x: int\n\n"
        "def judge(n):\n    return A(n + VALUE).x\n"
    )
    before = list(sys.path)
    try:
        assert load_function(write(tmp_path, body), tmp_path)(n=1) == 5
        assert sys.path == [*before, str(tmp_path)]
    finally:
        sys.path[:] = before


def test_messages_are_read_from_a_body_or_a_list():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert Attempt("n", json.dumps({"messages": messages}), "").last_user_text == "q"
    assert Attempt("n", json.dumps(messages), "").messages == messages
    assert Attempt("n", "no json", "").messages == []
    assert Attempt("n", "3", "").last_user_text == ""


def test_the_room_loads_nothing_heavy():
    code = (
        "import sys, pkgutil, importlib, noria.rewards as room\n"
        "for module in pkgutil.iter_modules(room.__path__): importlib.import_module(f'noria.rewards.{module.name}')\n"
        "print(sorted({'torch', 'transformers', 'dagster', 'great_expectations'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
