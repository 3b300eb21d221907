"""Run a job of the wheel in this process, with a progress bar instead of Dagster's log lines.

python -m pipelines.execute JOB [PARTITION]
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import dagster as dg
from tqdm import tqdm

from noria.contracts.errors import NoriaError, StationFailed

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""The event log in DAGSTER_HOME has everything; the terminal is for people."""


def execute(defs: dg.Definitions, instance: dg.DagsterInstance, job: str, partition: str | None = None) -> str:
    """Run one job and return its run id. Raises `StationFailed` with the station and its reason when the run fails."""
    run_id = str(uuid4())
    with step_progress(instance, run_id, partition or job):
        result = defs.resolve_job_def(job).execute_in_process(
            instance=instance, partition_key=partition, raise_on_error=False, run_id=run_id, run_config=QUIET
        )
    if not result.success:
        failures = [f"{event.step_key}: {reason(event)}" for event in result.all_events if event.is_step_failure]
        raise StationFailed(f"{partition or job} failed at {failures[0] if failures else 'an unknown station'}")
    return run_id


def reason(event: dg.DagsterEvent) -> str:
    """Why a step failed, as the error said it that the user's code raised."""
    error = event.step_failure_data.error
    if error is None:
        return (event.message or "no reason was given").strip()
    return (error.cause or error).message.strip()


@contextmanager
def step_progress(instance: dg.DagsterInstance, run_id: str, name: str) -> Iterator[None]:
    """A bar over the finished steps of the run; shown on a terminal only."""
    done = threading.Event()
    bar = tqdm(total=None, desc=name, unit=" steps", disable=not sys.stderr.isatty(), leave=False)

    def watch() -> None:
        while not done.wait(0.5):
            finished = [stats for stats in instance.get_run_step_stats(run_id) if stats.end_time]
            bar.n = len(finished)
            bar.set_postfix_str(finished[-1].step_key if finished else "")
            bar.refresh()

    watcher = threading.Thread(target=watch, daemon=True)
    if not bar.disable:
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if watcher.ident is not None:
            watcher.join()
        bar.close()


def main() -> int:
    """Run the job that the command line names."""
    from pipelines.learning import defs

    job, partition = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    try:
        with dg.DagsterInstance.get() as instance:
            execute(defs, instance, job, partition)
    except NoriaError as error:
        sys.stderr.write(f"noria: {error}\n")
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
