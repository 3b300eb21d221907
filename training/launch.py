"""Start a round's trainer under DeepSpeed.

    python -m training.launch --spec spec.json

turns into the trainer: with one rank into `training.train` itself, with several into DeepSpeed's launcher. By exec, so
the process that was started is the head of the launch, and killing it ends every rank (see parent.py). Importing this
loads no torch.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from noria.contracts.errors import ConfigError, NoriaError
from training import parent
from training.spec import TrainSpec

TRAIN_MODULE = "training.train"


def command(spec_path: str | Path) -> list[str]:
    """What starts the trainer of the spec at `spec_path`; run it in the environment that `environment` gives."""
    return [sys.executable, "-m", "training.launch", "--spec", str(Path(spec_path).resolve())]


def environment(spec: TrainSpec) -> dict[str, str]:
    """Environment variables that the trainer needs beside those of the process that starts it."""
    threads = spec.threads or max(1, _cores() // spec.ranks)
    return {
        "DS_ACCELERATOR": spec.accelerator,
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait by spinning made a step 20 times slower on cores that others used too (docs/log.md).
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_MININTERVAL": "1",
        "PYTHONPATH": os.pathsep.join(
            part for part in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if part
        ),
    }


def trainer_command(spec: TrainSpec, spec_path: str | Path, *, port: int) -> list[str]:
    """What `training.launch` turns into.

    One rank needs none of DeepSpeed's launchers: they would import torch twice more before the trainer does.
    """
    train = ["--spec", str(spec_path)]
    if spec.ranks == 1:
        return [sys.executable, "-m", TRAIN_MODULE, *train]
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        str(spec.ranks),
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(port),
        "--no_local_rank",
        "--module",
        TRAIN_MODULE,
        *train,
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: list[str] | None = None) -> int:
    """Entry point: turns into the trainer; 2, with one line on stderr, for a spec that cannot be used."""
    parser = argparse.ArgumentParser(description="Start a round's trainer under DeepSpeed.")
    parser.add_argument("--spec", required=True, help="JSON file of a TrainSpec")
    options = parser.parse_args(arguments)
    try:
        spec = TrainSpec.read(options.spec)
        if not Path(spec.parent).is_dir():
            raise ConfigError(f"the parent's weights are not at {spec.parent}; materialize its checkpoint")
    except NoriaError as error:
        sys.stderr.write(f"train: {error}\n")
        return 2
    return _become_trainer(spec, options.spec)


def _become_trainer(spec: TrainSpec, spec_path: str) -> NoReturn:
    parent.die_with_parent()
    port = _free_port()
    variables = {**os.environ, **environment(spec)}
    variables[parent.HEAD] = parent.identity(os.getpid()) or ""
    if spec.ranks == 1:
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = trainer_command(spec, spec_path, port=port)
    sys.stderr.flush()
    os.execve(argv[0], argv, variables)


if __name__ == "__main__":
    sys.exit(main())
