"""Each blocking check fails on a bad fixture, passes on a good one, and says what is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

from assets.checkpoint import health_result
from assets.eval_report import report_result
from assets.quality import check_result
from assets.rewarded_batch import RULES as BATCH_RULES
from assets.rewarded_batch import batch_profile, integrity_result
from assets.sets import RULES as SET_RULES
from assets.sets import leak_result
from assets.trajectories import controlled_result
from assets.warehouse_calls import RULES as CALL_RULES
from noria.contracts.report import EvalReport, Interval, PairedScore, Verdict
from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Step, Trajectory
from noria.release.suite import freeze
from noria.rollout.integrity import check_sequences
from noria.stores.artifacts import Artifacts
from noria.stores.quality import validate
from pipelines.learning import defs

VERSION = "shop.a.r00001"

CALL = {"id": 1, "trace_id": "0" * 32, "status": "ok", "duration_ms": 1.0, "input": "{}"}
BAD_CALLS = {
    "a call is in the warehouse once": [CALL, CALL],
    "a call has a trace": [{**CALL, "trace_id": None}],
    "a trace id is 32 hexadecimal digits": [{**CALL, "trace_id": "xyz"}],
    "the status is one that the contract knows": [{**CALL, "status": "fine"}],
    "no negative latency": [{**CALL, "duration_ms": -0.1}],
    "the request is kept": [{**CALL, "input": None}],
}


def test_sound_calls_pass() -> None:
    assert check_result(validate(pa.Table.from_pylist([CALL]), CALL_RULES, id_column="id")).passed


@pytest.mark.parametrize("meaning", BAD_CALLS)
def test_a_call_that_breaks_its_contract_fails(meaning: str) -> None:
    report = validate(pa.Table.from_pylist(BAD_CALLS[meaning]), CALL_RULES, id_column="id")
    result = check_result(report)
    assert not result.passed
    assert meaning in (result.description or "")
    assert any(breach.meaning == meaning and breach.ids for breach in report.breaches)


@pytest.mark.parametrize(
    ("rows", "meaning"),
    [
        ([], "the set is not empty"),
        ([(1, "a"), (1, "b")], "a call is selected once"),
        ([(1, "a"), (2, "a")], "an input is selected once"),
        ([(1, None)], "every sample has an input"),
    ],
)
def test_a_set_that_breaks_its_contract_fails(rows: list[tuple[int, str]], meaning: str) -> None:
    table = pa.table(
        {"id": pa.array([r[0] for r in rows], pa.int64()), "input": pa.array([r[1] for r in rows], pa.string())}
    )
    result = check_result(validate(table, SET_RULES, id_column="id"))
    assert not result.passed
    assert meaning in (result.description or "")


def test_a_sound_set_passes() -> None:
    assert check_result(validate(pa.table({"id": [1, 2], "input": ["a", "b"]}), SET_RULES, id_column="id")).passed


def test_a_validation_input_that_is_trained_on_fails() -> None:
    train, val = pa.table({"id": [1, 2], "input": ["a", "b"]}), pa.table({"id": [3, 4], "input": ["b", "c"]})
    result = leak_result(train, val)
    assert not result.passed
    assert "[3]" in (result.description or "")
    assert leak_result(train, pa.table({"id": [4], "input": ["c"]})).passed


def step(node: str, version: str | None, pinned: str | None) -> Step:
    return Step(
        node=node,
        call_uid="u",
        observation="[]",
        thought="",
        action="x",
        tool_result="",
        sampled=pinned is None,
        pinned=pinned,
        policy_version=version,
        finish_reason="stop",
    )


def trajectory(*steps: Step, error: str | None = None) -> Trajectory:
    return Trajectory(
        round="shop.a.r00002",
        sample_id=1,
        group=0,
        member=0,
        trace_id="t" * 32,
        origin_trace_id="o" * 32,
        policy_version=VERSION,
        origin_request="{}",
        origin_response="{}",
        steps=steps,
        seed=0,
        error=error,
    )


def test_a_controlled_trajectory_passes_and_one_in_error_is_not_looked_at() -> None:
    good = trajectory(step("a", VERSION, None), step("b", None, "exact"))
    failed = trajectory(step("a", "shop.a.r00000", None), error="the agent answered 500")
    assert controlled_result([good, failed], VERSION, "a").passed


@pytest.mark.parametrize(
    "bad",
    [
        trajectory(step("a", "shop.a.r00000", None)),
        trajectory(step("a", VERSION, None), step("b", None, None)),
    ],
    ids=["another version answered", "another node was not pinned"],
)
def test_a_difference_with_two_causes_fails(bad: Trajectory) -> None:
    result = controlled_result([bad], VERSION, "a")
    assert not result.passed
    assert "t" * 32 in (result.description or "")


ROW = RewardedSequence(
    round="shop.a.r00002",
    sample_id=1,
    group=0,
    member=0,
    trace_id="t1",
    policy_version=VERSION,
    prompt_ids=(1, 2),
    completion_ids=(3, 4),
    loss_mask=(1, 1),
    logprobs=(-0.5, -0.25),
    advantages=(1.0, 1.0),
    reward=1.0,
    weight=1.0,
    components={"right": 1.0},
)
OTHER = replace(ROW, trace_id="t2", member=1, reward=0.0, advantages=(-1.0, -1.0))


def test_a_whole_batch_passes() -> None:
    assert integrity_result(check_sequences([ROW, OTHER], allowed_versions={VERSION})).passed
    assert check_result(validate(batch_profile([ROW, OTHER]), BATCH_RULES, id_column="trace_id")).passed


@pytest.mark.parametrize(
    "bad",
    [
        replace(ROW, logprobs=(-0.5,)),
        replace(ROW, logprobs=(-0.5, 0.1)),
        replace(ROW, logprobs=(-0.5, float("nan"))),
        replace(ROW, loss_mask=(0, 0)),
        replace(ROW, policy_version="shop.a.r00000"),
        replace(ROW, advantages=(float("inf"), 1.0)),
        replace(ROW, completion_ids=(3, -4)),
    ],
    ids=["lengths", "positive logprob", "NaN logprob", "nothing sampled", "stale policy", "advantage", "token id"],
)
def test_a_batch_with_a_token_that_was_not_sampled_fails(bad: RewardedSequence) -> None:
    result = integrity_result(check_sequences([bad, OTHER], allowed_versions={VERSION}))
    assert not result.passed


@pytest.mark.parametrize(
    ("rows", "meaning"),
    [
        ([], "the batch is not empty"),
        ([replace(ROW, reward=float("nan"))], "every sequence has a reward"),
        ([replace(ROW, loss_mask=(0, 0))], "every sequence has a token that the policy sampled"),
        ([replace(ROW, logprobs=(-0.5,))], "as many log-probabilities as completion tokens"),
        ([replace(ROW, logprobs=(-0.5, 0.5))], "log-probabilities are <= 0"),
    ],
)
def test_a_batch_that_breaks_its_contract_fails(rows: list[RewardedSequence], meaning: str) -> None:
    result = check_result(validate(batch_profile(rows), BATCH_RULES, id_column="trace_id"))
    assert not result.passed
    assert meaning in (result.description or "")


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path)


def checkpoint(artifacts: Artifacts, *, healthy: bool = True) -> None:
    artifacts.write_bytes("checkpoint/model/model.safetensors", b"weights")
    sha256 = artifacts.sha256_dir("checkpoint/model")
    reason = None if healthy else "loss was nan at step 3"
    artifacts.mark_complete("checkpoint", {"healthy": healthy, "reason": reason, "weights_sha256": sha256})


def test_a_healthy_checkpoint_passes(artifacts: Artifacts) -> None:
    checkpoint(artifacts)
    assert health_result(artifacts, "checkpoint").passed


def test_an_unhealthy_checkpoint_fails_with_the_trainer_s_reason(artifacts: Artifacts) -> None:
    checkpoint(artifacts, healthy=False)
    result = health_result(artifacts, "checkpoint")
    assert not result.passed
    assert result.description == "loss was nan at step 3"


def test_a_checkpoint_without_its_marker_fails(artifacts: Artifacts) -> None:
    artifacts.write_bytes("checkpoint/model/model.safetensors", b"weights")
    assert not health_result(artifacts, "checkpoint").passed


def test_weights_that_were_touched_fail(artifacts: Artifacts) -> None:
    checkpoint(artifacts)
    artifacts.write_bytes("checkpoint/model/model.safetensors", b"other weights")
    result = health_result(artifacts, "checkpoint")
    assert not result.passed
    assert "hash" in (result.description or "")


def report(artifacts: Artifacts) -> EvalReport:
    body = json.dumps({"messages": [{"role": "user", "content": "q"}]})
    suite = freeze([{"item": name, "input": body, "reference": {}} for name in ("i1", "i2")], artifacts, "shop.a")
    interval = Interval(0.0, 0.0, 0.0, 0.95)
    return EvalReport(
        round=VERSION,
        target="shop.a",
        candidate=VERSION,
        baseline="shop.a.r00000",
        suite=suite.path,
        suite_sha256=suite.sha256,
        scorer="r",
        scorer_version="1",
        pairs=tuple(PairedScore(name, 1.0, 0.0, "a", "b") for name in ("i1", "i2")),
        candidate_score=interval,
        baseline_score=interval,
        difference=interval,
        margin=0.0,
        guardrails=(),
        verdict=Verdict.PASS,
        reason="",
        seed=0,
    )


def test_a_whole_report_passes(artifacts: Artifacts) -> None:
    assert report_result(artifacts, report(artifacts)).passed


def test_a_report_with_an_item_missing_fails(artifacts: Artifacts) -> None:
    whole = report(artifacts)
    result = report_result(artifacts, replace(whole, pairs=whole.pairs[:1]))
    assert not result.passed
    assert "i2" in (result.description or "")


def test_a_report_on_another_suite_fails(artifacts: Artifacts) -> None:
    assert not report_result(artifacts, replace(report(artifacts), suite_sha256="0" * 64)).passed


def test_every_check_beside_a_station_blocks() -> None:
    specs = {spec.name: spec for checks in defs.asset_checks or [] for spec in checks.check_specs}
    assert set(specs) == {
        "warehouse_calls_are_sound",
        "train_set_is_sound",
        "val_set_is_not_trained_on",
        "trajectories_are_controlled",
        "rewarded_batch_is_whole",
        "rewarded_batch_is_sound",
        "checkpoint_is_healthy",
        "eval_report_is_whole",
    }
    assert all(spec.blocking for spec in specs.values())


def test_a_blocking_check_stops_the_stations_behind_it() -> None:
    assert isinstance(defs.resolve_job_def("turn"), dg.JobDefinition)
    turn = defs.resolve_job_def("turn")
    for check, behind in (
        ("train_set_train_set_is_sound", "trajectories"),
        ("trajectories_trajectories_are_controlled", "rewarded_batch"),
        ("rewarded_batch_rewarded_batch_is_whole", "checkpoint"),
        ("checkpoint_checkpoint_is_healthy", "eval_report"),
        ("eval_report_eval_report_is_whole", "promoted_model"),
    ):
        upstream = {
            output.node_name
            for outputs in turn.dependency_structure.input_to_upstream_outputs_for_node(behind).values()
            for output in outputs
        }
        assert check in upstream, (behind, upstream)
