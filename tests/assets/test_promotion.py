"""The release station acts on the report alone, once, and only on weights that are what the trainer wrote."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from assets.promoted_model import is_due, over_rounds, release_by_report, reports_until
from noria.contracts.errors import IntegrityError, ReleaseConflict
from noria.contracts.report import EvalReport, Interval, PairedScore, Verdict
from noria.contracts.round import Round
from noria.release.gate import report_to_json
from noria.release.registry import Registry
from noria.release.suite import freeze
from noria.stores.artifacts import Artifacts
from noria.stores.online import OnlineStore

ROUND = Round.parse("shop.a.r00001")
BASE = "shop.a.r00000"


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    made = Artifacts(tmp_path / "artifacts")
    folder = f"{made.round_dir(ROUND.key)}/checkpoint"
    made.write_bytes(f"{folder}/model/model.safetensors", b"weights")
    made.mark_complete(folder, {"healthy": True, "reason": None, "weights_sha256": made.sha256_dir(f"{folder}/model")})
    return made


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    store.upgrade()
    opened = Registry(store)
    opened.promote("shop.a", BASE, "base/model", by="cold_start", why="the first weights")
    return opened


def write_report(artifacts: Artifacts, verdict: Verdict, baseline: str = BASE) -> EvalReport:
    body = json.dumps({"messages": [{"role": "user", "content": "q"}]})
    suite = freeze([{"item": "i", "input": body, "reference": {}}], artifacts, "shop.a")
    interval = Interval(0.5, 0.4, 0.6, 0.95)
    report = EvalReport(
        round=ROUND.key,
        target="shop.a",
        candidate=ROUND.key,
        baseline=baseline,
        suite=suite.path,
        suite_sha256=suite.sha256,
        scorer="r",
        scorer_version="1",
        pairs=(PairedScore("i", 1.0, 0.0, "a", "b"),),
        candidate_score=interval,
        baseline_score=interval,
        difference=interval,
        margin=0.0,
        guardrails=(),
        verdict=verdict,
        reason="Better by a lot.",
        seed=0,
    )
    artifacts.write_bytes(f"{artifacts.round_dir(ROUND.key)}/report.json", report_to_json(report).encode())
    return report


def live(registry: Registry) -> str:
    release = registry.current("shop.a")
    assert release is not None
    return release.version


def test_a_round_that_passed_goes_live_with_its_report_s_hash(artifacts: Artifacts, registry: Registry) -> None:
    write_report(artifacts, Verdict.PASS)
    release_by_report(artifacts, registry, ROUND)
    assert live(registry) == ROUND.key
    event = registry.events("shop.a")[-1]
    assert event.report_sha256 == artifacts.sha256(f"{artifacts.round_dir(ROUND.key)}/report.json")
    assert event.why == "Better by a lot."


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_any_other_verdict_changes_nothing(artifacts: Artifacts, registry: Registry, verdict: Verdict) -> None:
    write_report(artifacts, verdict)
    events = registry.events("shop.a")
    release_by_report(artifacts, registry, ROUND)
    assert registry.events("shop.a") == events


def test_acting_twice_changes_nothing_even_after_a_later_release(artifacts: Artifacts, registry: Registry) -> None:
    write_report(artifacts, Verdict.PASS)
    assert is_due(artifacts, registry, ROUND)
    release_by_report(artifacts, registry, ROUND)
    assert not is_due(artifacts, registry, ROUND)
    registry.promote("shop.a", "shop.a.r00002", "elsewhere", by="test", why="a later round")
    events = registry.events("shop.a")
    release_by_report(artifacts, registry, ROUND)
    assert registry.events("shop.a") == events
    assert live(registry) == "shop.a.r00002"


def test_evidence_against_another_baseline_is_refused(artifacts: Artifacts, registry: Registry) -> None:
    write_report(artifacts, Verdict.PASS)
    registry.promote("shop.a", "shop.a.r00009", "elsewhere", by="test", why="somebody was faster")
    with pytest.raises(ReleaseConflict, match="make the eval_report again"):
        release_by_report(artifacts, registry, ROUND)
    assert live(registry) == "shop.a.r00009"


def test_weights_that_were_touched_are_not_released(artifacts: Artifacts, registry: Registry) -> None:
    write_report(artifacts, Verdict.PASS)
    artifacts.write_bytes(f"{artifacts.round_dir(ROUND.key)}/checkpoint/model/model.safetensors", b"others")
    with pytest.raises(IntegrityError, match="is not released"):
        release_by_report(artifacts, registry, ROUND)
    assert live(registry) == BASE


def test_the_rounds_are_drawn(artifacts: Artifacts) -> None:
    report = write_report(artifacts, Verdict.PASS)
    assert reports_until(artifacts, ROUND) == [report]
    assert reports_until(artifacts, Round.parse("shop.a.r00000")) == []
    second = replace(report, round="shop.a.r00002", verdict=Verdict.INCONCLUSIVE)
    assert over_rounds([report, second]).startswith(b"\x89PNG")
