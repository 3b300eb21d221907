"""A round's update in processes of its own, as the wheel starts them."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from training.launch import command, environment

pytestmark = pytest.mark.slow


def start(spec, folder: Path) -> subprocess.Popen[str]:
    path = spec.write(folder / "spec.json")
    return subprocess.Popen(
        command(path),
        env={**os.environ, **environment(spec)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=240)
    return said


def run(spec, folder: Path) -> dict:
    process = start(spec, folder)
    said = finish(process)
    assert process.returncode == 0, said
    return marker(spec)


def marker(spec) -> dict:
    return json.loads((Path(spec.output) / "COMPLETE.json").read_text())


def log_of(spec) -> list[dict]:
    return [json.loads(line) for line in (Path(spec.output) / "train_log.jsonl").read_text().splitlines()]


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def processes_of(folder: Path) -> list[int]:
    """The living processes whose command line names `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder) in words and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def long_batch(tmp_path_factory, sequence, write_batch) -> Path:
    return write_batch(tmp_path_factory.mktemp("batch") / "rewarded.parquet", [sequence(n) for n in range(64)])


@pytest.fixture(scope="module")
def first(base, long_batch, tmp_path_factory, spec_for):
    """Round 1 of the training chain: sixteen steps under ZeRO-1."""
    folder = tmp_path_factory.mktemp("first")
    spec = spec_for(base, long_batch, folder / "checkpoint", batch_size=4)
    return spec, run(spec, folder)


def test_a_round_leaves_weights_state_log_and_marker(base, first, difference):
    spec, info = first
    assert info["healthy"] is True
    assert info["steps"] == 16
    assert info["optimizer"] == "fresh"
    lines = log_of(spec)
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert {"loss", "reward", "entropy", "grad_norm", "clip_ratio", "seconds"} <= lines[0].keys()
    assert 0 < difference(base, Path(spec.output) / "model") < 1
    assert [path.name for path in (Path(spec.output) / "state").iterdir()] == ["checkpoint-16"]
    assert sorted(path.name for path in Path(spec.output).iterdir()) == [
        "COMPLETE.json",
        "model",
        "state",
        "train_log.jsonl",
    ]


def test_a_complete_checkpoint_is_left_as_it_is(first, tmp_path):
    spec, info = first
    before = (Path(spec.output) / "model" / "model.safetensors").stat().st_mtime_ns
    assert run(spec, tmp_path) == info
    assert (Path(spec.output) / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_a_killed_round_resumes_to_the_same_weights(first, long_batch, tmp_path, spec_for, difference):
    """Round 2 continues round 1's optimizer; killed in its middle and started again, it ends as if it never was."""
    parent, _ = first

    def second(name: str):
        return spec_for(
            Path(parent.output) / "model",
            long_batch,
            tmp_path / name / "checkpoint",
            batch_size=4,
            seed=6,
            parent_state=str(Path(parent.output) / "state"),
        )

    killed, whole = second("killed"), second("whole")
    undisturbed = start(whole, tmp_path / "whole")
    process = start(killed, tmp_path / "killed")
    # Sixteen steps of the parent, and four of its own.
    wait_for(
        lambda: (Path(killed.output) / "state" / "checkpoint-20" / "noria.json").exists() or process.poll() is not None
    )
    process.kill()
    finish(process)
    assert not (Path(killed.output) / "COMPLETE.json").exists()
    assert not (Path(killed.output) / "model").exists()
    finish(undisturbed)
    again = run(killed, tmp_path / "killed")
    assert again["resumed_from_step"] >= 4
    assert again["optimizer"] == marker(whole)["optimizer"] == "continued"
    assert [line["step"] for line in log_of(killed)] == list(range(1, 17))
    assert [line["loss"] for line in log_of(killed)] == [line["loss"] for line in log_of(whole)]
    assert difference(Path(killed.output) / "model", Path(whole.output) / "model") <= 1e-6


def test_no_trainer_outlives_the_process_that_was_started(base, long_batch, tmp_path, spec_for):
    spec = spec_for(base, long_batch, tmp_path / "checkpoint", batch_size=4, ranks=2, epochs=50)
    process = start(spec, tmp_path)
    wait_for(
        lambda: (Path(spec.output) / "state" / "checkpoint-2" / "noria.json").exists() or process.poll() is not None
    )
    assert len(processes_of(tmp_path)) == 4  # DeepSpeed's two launchers and two ranks
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    wait_for(lambda: not processes_of(tmp_path), seconds=8)
    assert not (Path(spec.output) / "COMPLETE.json").exists()


def test_no_trainer_outlives_the_one_who_started_it(base, long_batch, tmp_path, spec_for):
    """As when Dagster is killed: the trainer's parent dies, not the trainer."""
    spec = spec_for(base, long_batch, tmp_path / "checkpoint", batch_size=4, epochs=50)
    path = spec.write(tmp_path / "spec.json")
    code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    parent = subprocess.Popen(
        [*command(path)[:1], "-c", code, *command(path)],
        env={**os.environ, **environment(spec)},
        stderr=subprocess.DEVNULL,
    )
    wait_for(
        lambda: (Path(spec.output) / "state" / "checkpoint-2" / "noria.json").exists() or parent.poll() is not None
    )
    assert len(processes_of(tmp_path)) == 2
    parent.kill()
    parent.wait()
    wait_for(lambda: not processes_of(tmp_path), seconds=5)


def test_adapters_are_merged_and_a_broken_round_says_so(base, long_batch, tmp_path, spec_for, difference):
    adapted = spec_for(
        base,
        long_batch,
        tmp_path / "lora" / "checkpoint",
        batch_size=32,
        zero_stage=0,
        lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    )
    broken = spec_for(base, long_batch, tmp_path / "broken" / "checkpoint", batch_size=32, learning_rate=1e30)
    processes = [start(adapted, tmp_path / "lora"), start(broken, tmp_path / "broken")]
    for process in processes:
        said = finish(process)
        assert process.returncode == 0, said
    assert marker(adapted)["healthy"] is True
    assert 0 < difference(base, Path(adapted.output) / "model") < 0.1
    assert marker(broken)["healthy"] is False
    assert "learning_rate" in marker(broken)["reason"]


def test_nothing_to_train_on_is_one_line_and_code_2(base, tmp_path, spec_for, sequence, write_batch):
    batch = write_batch(tmp_path / "rewarded.parquet", [sequence(1)])
    spec = spec_for(base, batch, tmp_path / "checkpoint", max_sequence_tokens=8).write(tmp_path / "spec.json")
    done = subprocess.run(command(spec), capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train:")]
    assert done.returncode == 2
    assert len(lines) == 1
    assert "none to train on" in lines[0]
