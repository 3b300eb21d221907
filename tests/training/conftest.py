import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noria.contracts.sequence import RewardedSequence
from training.spec import TrainSpec

TEXTS = [f"where is the {thing} of {place}" for thing in ("film", "song", "home") for place in ("Oslo", "Lima", "Rome")]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 32 dimensions, built in a process of its own."""
    folder = tmp_path_factory.mktemp("base") / "model"
    code = (
        "import json, sys; from training.tiny import build_tiny;"
        "build_tiny(sys.argv[1], json.loads(sys.argv[2]), seed=3, hidden_size=32, layers=2, vocabulary=300)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(TEXTS)], check=True, timeout=120)
    return folder


def _sequence(number: int, *, seed: int = 0, advantage: float | None = None) -> RewardedSequence:
    """A row with made-up tokens; every third has an environment's tokens in the middle of its completion."""
    rng = random.Random(f"{seed}/{number}")
    length = rng.randint(2, 9)
    mask = [1] * length
    if number % 3 == 0 and length > 3:
        mask[1:3] = [0, 0]
    value = rng.uniform(-1, 1) if advantage is None else advantage
    return RewardedSequence(
        round="app.node.r00001",
        sample_id=number // 4,
        group=number // 4,
        member=number % 4,
        trace_id=f"{number:032x}",
        policy_version="base",
        prompt_ids=tuple(rng.randrange(6, 290) for _ in range(rng.randint(1, 8))),
        completion_ids=tuple(rng.randrange(6, 290) for _ in range(length)),
        loss_mask=tuple(mask),
        logprobs=tuple(-5.7 + rng.uniform(-0.2, 0.2) if on else 0.0 for on in mask),
        advantages=tuple(value if on else 0.0 for on in mask),
        reward=rng.random(),
        weight=1.0,
        components={"reward": 1.0},
    )


def _write_batch(path: Path, rows: list[RewardedSequence]) -> Path:
    records = [{**asdict(row), "components": json.dumps(row.components)} for row in rows]
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    return _write_batch(tmp_path / "rewarded.parquet", [_sequence(number) for number in range(32)])


@pytest.fixture(scope="session")
def sequence() -> Callable[..., RewardedSequence]:
    return _sequence


@pytest.fixture(scope="session")
def write_batch() -> Callable[[Path, list[RewardedSequence]], Path]:
    return _write_batch


@pytest.fixture(scope="session")
def spec_for() -> Callable[..., TrainSpec]:
    return _spec_for


@pytest.fixture(scope="session")
def difference() -> Callable[[Path, Path], float]:
    return _difference


def _spec_for(base: Path, batch: Path, output: Path, **changes: object) -> TrainSpec:
    """Four steps of eight rows, one thread, unless changed."""
    values: dict[str, object] = {
        "round": "app.node.r00001",
        "batch": str(batch),
        "parent": str(base),
        "output": str(output),
        "batch_size": 8,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "threads": 1,
        "seed": 5,
    }
    return TrainSpec.from_dict({**values, **changes})


def _weights(folder: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def _difference(left: Path, right: Path) -> float:
    """The largest difference between two weights of the same name; infinite if the names differ."""
    a, b = _weights(left), _weights(right)
    return max(float((a[name] - b[name]).abs().max()) for name in a) if a.keys() == b.keys() else math.inf
