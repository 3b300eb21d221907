"""Which weights a round starts from: the newest healthy checkpoint, and the live version after failed gates."""

from pathlib import Path

import pytest

from noria.contracts.errors import NotFound
from noria.contracts.round import Round, Target
from noria.release.chain import CHECKPOINT, choose_parent, failed_gates_in_a_row, plan_round, read_plan, round_numbers
from noria.stores.artifacts import Artifacts

TARGET = Target("shop", "a")
LIVE = "shop.a.r00000"


def round_(number: int) -> Round:
    return Round(TARGET, number)


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path)


def plan(artifacts: Artifacts, number: int, *, seed: int = 0) -> str:
    return plan_round(
        artifacts,
        round_(number),
        seed=seed,
        versions={"calls": number},
        cursor=10 * number,
        live=LIVE,
        failures_before_restart=3,
    ).parent


def finish(artifacts: Artifacts, number: int, *, healthy: bool = True, verdict: str | None = "inconclusive") -> None:
    folder = artifacts.round_dir(round_(number).key)
    artifacts.mark_complete(f"{folder}/{CHECKPOINT}", {"healthy": healthy})
    if verdict is not None:
        artifacts.write_json(f"{folder}/report.json", {"verdict": verdict, "reason": ""})


def test_the_first_round_starts_from_what_is_live(artifacts: Artifacts) -> None:
    assert plan(artifacts, 1) == LIVE


def test_without_anything_live_it_is_the_cold_start(artifacts: Artifacts) -> None:
    parent, _, restarted = choose_parent(artifacts, round_(1), live=None, failures_before_restart=3)
    assert (parent, restarted) == ("shop.a.r00000", False)


@pytest.mark.parametrize("verdict", ["pass", "inconclusive", "fail"])
def test_the_next_round_starts_from_the_newest_checkpoint_whatever_its_verdict(
    artifacts: Artifacts, verdict: str
) -> None:
    plan(artifacts, 1)
    finish(artifacts, 1, verdict=verdict)
    assert plan(artifacts, 2) == round_(1).key


def test_a_broken_checkpoint_is_skipped(artifacts: Artifacts) -> None:
    for number, healthy in ((1, True), (2, False)):
        plan(artifacts, number)
        finish(artifacts, number, healthy=healthy, verdict=None)
    assert plan(artifacts, 3) == round_(1).key


def test_after_three_failed_gates_the_chain_starts_again_from_the_live_version_once(artifacts: Artifacts) -> None:
    for number in (1, 2, 3):
        assert plan(artifacts, number) != LIVE or number == 1
        finish(artifacts, number, verdict="fail")
    assert failed_gates_in_a_row(artifacts, round_(4)) == 3
    assert plan(artifacts, 4) == LIVE
    assert read_plan(artifacts, round_(4)).restarted
    finish(artifacts, 4, verdict="fail")
    assert failed_gates_in_a_row(artifacts, round_(5)) == 1  # counted from the restart
    assert plan(artifacts, 5) == round_(4).key


def test_a_gate_that_does_not_fail_ends_the_count(artifacts: Artifacts) -> None:
    for number, verdict in ((1, "fail"), (2, "fail"), (3, "inconclusive"), (4, "fail")):
        plan(artifacts, number)
        finish(artifacts, number, verdict=verdict)
    assert failed_gates_in_a_row(artifacts, round_(5)) == 1


def test_a_plan_is_made_once(artifacts: Artifacts) -> None:
    plan(artifacts, 1, seed=7)
    first = read_plan(artifacts, round_(1))
    plan(artifacts, 1, seed=8)
    assert read_plan(artifacts, round_(1)) == first
    assert (first.seed, first.cursor, first.versions) == (7, 10, {"calls": 1})


def test_a_round_that_has_not_begun_says_what_to_materialize(artifacts: Artifacts) -> None:
    with pytest.raises(NotFound, match="materialize its train_set first"):
        read_plan(artifacts, round_(1))


def test_rounds_of_other_targets_do_not_count(artifacts: Artifacts) -> None:
    plan(artifacts, 2)
    artifacts.write_json("rounds/shop.ab.r00007/round.json", {})
    assert round_numbers(artifacts, TARGET) == [2]
