"""Close what a killed machine left open: `python -m pipelines.mend`, run by `noria up` before Dagster starts.

`noria up` holds the home and has ended every process that a killed one left behind, so a run that still counts as
started has no process. Dagster's default launcher cannot see that across a restart: without this the run would count as
turning for ever, and its target would wait.
"""

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

WITHOUT_PROCESS = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]


def fail_orphaned_runs(instance: DagsterInstance) -> list[str]:
    """Report every started run as failed; returns their ids. Queued runs stay: the daemon launches them."""
    orphaned = instance.get_runs(RunsFilter(statuses=WITHOUT_PROCESS))
    for run in orphaned:
        instance.report_run_failed(run, "The process of this run was gone when Noria started; the round resumes.")
    return [run.run_id for run in orphaned]


if __name__ == "__main__":
    with DagsterInstance.get() as opened:
        fail_orphaned_runs(opened)
