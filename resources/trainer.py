"""The Pipes client of the trainer: a process group of its own, watched, with its training log as a live curve."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from noria.contracts.errors import TrainingFailed

POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""How long a trainer that was told to stop may take before it is killed."""


class Trainer(dg.ConfigurableResource[object]):
    """Launches a training process through Dagster Pipes.

    Dagster's own subprocess client interrupts only its direct child. A DeepSpeed job is a launcher with one child per
    rank, so the process gets its own session here and the whole group is ended when the run is cancelled. When the run
    is killed outright, the trainer's watch on its parent ends it (`training/parent.py`).
    """

    def run(
        self,
        context: dg.AssetExecutionContext,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        log: Path,
    ) -> list[dict[str, Any]]:
        """Run `command` to its end and return the lines of its training log.

        Each new line of `log` (JSON) becomes an asset observation while the process runs. Raises `TrainingFailed` with
        the exit code when the process fails; its own output stands in the run's compute logs.
        """
        with dg.open_pipes_session(
            context=context,
            context_injector=dg.PipesTempFileContextInjector(),
            message_reader=dg.PipesTempFileMessageReader(),
        ) as session:
            process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env={**os.environ, **environment, **session.get_bootstrap_env_vars()},
                start_new_session=True,
            )
            tail = Tail(log)
            try:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
                    _observe(context, tail.new_records())
            finally:
                _end_group(process)
            _observe(context, tail.new_records())
        if process.returncode != 0:
            raise TrainingFailed(
                f"the trainer ended with exit code {process.returncode}; its last lines are in this run's stderr. "
                "Materialize this station again to resume from the last saved state"
            )
        return tail.records


class Tail:
    """Reads the complete lines that were appended to a JSON-lines file since the last look.

    A training that resumes puts a new file in the old one's place; then `records` begins again with that file, and only
    its lines of steps that have not been seen are new.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._file: int | None = None
        self._offset = 0
        self._seen: list[dict[str, Any]] = []

    def new_records(self) -> Iterator[dict[str, Any]]:
        """The records that have come since the last call."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._file:
                self._file, self._offset = number, 0
                self._seen, self.records = self.records, []
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record = json.loads(line)
                self.records.append(record)
                if record not in self._seen:
                    yield record


def _observe(context: dg.AssetExecutionContext, records: Iterator[dict[str, Any]]) -> None:
    for record in records:
        metadata = {key: float(value) for key, value in record.items() if isinstance(value, int | float)}
        context.log_event(
            dg.AssetObservation(
                asset_key=context.asset_key,
                partition=context.partition_key if context.has_partition_key else None,
                metadata=metadata,
            )
        )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the process group, politely first."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if not _group_alive(process.pid):
            break
    process.wait()


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
