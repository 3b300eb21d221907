import time
from dataclasses import replace

import pytest

from noria.contracts.call import CallTokens
from noria.contracts.sequence import RewardedSequence
from noria.contracts.trajectory import Step, Trajectory
from noria.rollout.integrity import DropReason, Rule, check_sequences, select_for_batch

VERSION = "shop.router.r00002"


def row(group: int = 0, member: int = 0, advantage: float = 1.0, **changes: object) -> RewardedSequence:
    made = RewardedSequence(
        round="shop.router.r00003",
        sample_id=group,
        group=group,
        member=member,
        trace_id=f"{group:016x}{member:016x}",
        policy_version=VERSION,
        prompt_ids=(1, 2),
        completion_ids=(3, 4, 5),
        loss_mask=(1, 0, 1),
        logprobs=(-0.5, 0.0, 0.0),
        advantages=(advantage, 0.0, advantage),
        reward=1.0,
        weight=1.0,
        components={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def check(*rows: RewardedSequence, vocabulary: int | None = 6) -> set[Rule]:
    return {violation.rule for violation in check_sequences(rows, allowed_versions={VERSION}, vocabulary=vocabulary)}


PAIR = (row(0, 0, 1.0), row(0, 1, -1.0))


def test_a_good_batch_has_no_violation() -> None:
    assert check(*PAIR, row(1, 0, 0.0), row(1, 1, 0.0)) == set()
    assert check() == set()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"loss_mask": (1, 0)}, Rule.LENGTHS),
        ({"logprobs": (-0.5,)}, Rule.LENGTHS),
        ({"advantages": ()}, Rule.LENGTHS),
        ({"prompt_ids": ()}, Rule.LENGTHS),
        ({"completion_ids": (), "loss_mask": (), "logprobs": (), "advantages": ()}, Rule.LENGTHS),
        ({"loss_mask": (1, 0, 2)}, Rule.MASK),
        ({"loss_mask": (0, 0, 0), "logprobs": (0.0,) * 3, "advantages": (0.0,) * 3}, Rule.TRAINED),
        ({"completion_ids": (3, 4, 6)}, Rule.IDS),
        ({"prompt_ids": (-1, 2)}, Rule.IDS),
        ({"logprobs": (0.1, 0.0, 0.0)}, Rule.LOGPROBS),
        ({"logprobs": (float("nan"), 0.0, 0.0)}, Rule.LOGPROBS),
        ({"logprobs": (float("-inf"), 0.0, 0.0)}, Rule.LOGPROBS),
        ({"advantages": (float("nan"), 0.0, 1.0)}, Rule.ADVANTAGES),
        ({"reward": float("inf")}, Rule.ADVANTAGES),
        ({"weight": float("nan")}, Rule.ADVANTAGES),
        ({"logprobs": (-0.5, -0.5, 0.0)}, Rule.OUTSIDE_MASK),
        ({"advantages": (1.0, 1.0, 1.0)}, Rule.OUTSIDE_MASK),
        ({"policy_version": "shop.router.r00001"}, Rule.VERSION),
    ],
)
def test_each_rule_finds_its_row(changes: dict[str, object], rule: Rule) -> None:
    bad = row(0, 0, 1.0, **changes)
    assert check(bad, row(0, 1, -1.0)) - {Rule.GROUP_MEAN} == {rule}
    found = check_sequences([bad, row(0, 1, -1.0)], allowed_versions={VERSION}, vocabulary=6)
    assert found[0].trace_id == bad.trace_id
    assert found[0].detail


def test_without_a_vocabulary_ids_have_no_upper_bound() -> None:
    assert check(row(0, 0, 0.0, prompt_ids=(10**6,)), vocabulary=None) == set()


def test_the_cold_start_has_many_names() -> None:
    rows = [row(0, 0, 0.0, policy_version="base")]
    assert check_sequences(rows, allowed_versions={"shop.router.r00000"}, vocabulary=None) == []


def test_a_row_that_stands_twice_is_found() -> None:
    assert check(*PAIR, PAIR[0]) == {Rule.DUPLICATE}


def test_a_member_that_was_rolled_out_twice_is_found() -> None:
    assert check(*PAIR, row(0, 0, 1.0, trace_id="f" * 32), row(0, 1, -1.0, trace_id="e" * 32)) == {Rule.DUPLICATE}


def test_one_trace_in_two_groups_is_found() -> None:
    assert check(*PAIR, row(1, 0, 1.0, trace_id=PAIR[0].trace_id), row(1, 1, -1.0)) == {Rule.DUPLICATE}


def test_several_rows_of_one_trace_are_right() -> None:
    assert check(*PAIR, row(0, 0, 1.0, prompt_ids=(5,))) == set()


def test_a_group_that_lost_a_member_after_its_advantages_were_made_is_found() -> None:
    assert check(row(0, 0, 1.0), row(0, 1, -0.5)) == {Rule.GROUP_MEAN}
    assert check(row(0, 0, 1.0), row(0, 1, -0.5), row(0, 2, -0.5)) == set()


def test_the_group_mean_is_over_members_not_over_rows_or_tokens() -> None:
    twice = row(0, 0, 1.0, prompt_ids=(5,))
    longer = row(0, 1, -1.0, loss_mask=(1, 1, 1), logprobs=(-0.1,) * 3, advantages=(-1.0,) * 3)
    assert check(row(0, 0, 1.0), twice, longer) == set()


def test_ten_thousand_rows_are_checked_in_seconds() -> None:
    rows = [
        row(
            group,
            member,
            0.7 if member % 2 else -0.7,
            prompt_ids=tuple(range(100)),
            completion_ids=tuple(range(60)),
            loss_mask=(1,) * 60,
            logprobs=(-0.5,) * 60,
            advantages=(0.7 if member % 2 else -0.7,) * 60,
        )
        for group in range(1250)
        for member in range(8)
    ]
    start = time.perf_counter()
    assert check(*rows, vocabulary=2048) == set()
    assert time.perf_counter() - start < 10.0


def trajectory(group: int, member: int, **changes: object) -> Trajectory:
    step = Step("router", "u", "[]", "", "x", "", True, None, VERSION, "stop", CallTokens((1,), (2,), (-0.1,)))
    made = Trajectory(
        "shop.router.r00003", group, group, member, f"{group}-{member}", "o", VERSION, "", "", (step,), seed=0
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_what_must_not_be_learned_from_is_left_out_with_its_reason() -> None:
    good = [trajectory(0, member) for member in range(3)]
    bad = [
        (trajectory(0, 3, error="the agent is down"), DropReason.ERROR),
        (trajectory(0, 4, diverged=True, pinned_misses=2), DropReason.DIVERGED),
        (trajectory(0, 5, steps=()), DropReason.NOTHING_SAMPLED),
        (trajectory(0, 1, trace_id="again"), DropReason.REPEATED),
    ]
    selection = select_for_batch([*good, *(t for t, _ in bad)], 2)
    assert selection.kept == tuple(good)
    assert selection.dropped == tuple(bad)


def test_a_group_that_lost_too_many_members_goes_whole() -> None:
    lost = [trajectory(0, 0), trajectory(0, 1), trajectory(0, 2, error="down")]
    whole = [trajectory(1, member) for member in range(3)]
    selection = select_for_batch([*lost, *whole], 3)
    assert selection.kept == tuple(whole)
    assert [reason for _, reason in selection.dropped] == [DropReason.SMALL_GROUP] * 2 + [DropReason.ERROR]


def test_truncated_answers_stay_unless_told_otherwise() -> None:
    group = [trajectory(0, 0), trajectory(0, 1), trajectory(0, 2, truncated=True)]
    assert len(select_for_batch(group, 2).kept) == 3
    selection = select_for_batch(group, 2, keep_truncated=False)
    assert selection.kept == tuple(group[:2])
    assert selection.dropped == ((group[2], DropReason.TRUNCATED),)
