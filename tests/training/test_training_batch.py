from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.errors import IntegrityError, TrainingFailed
from training.batch import Row, Schedule, collate, read_rows

schedules = st.builds(
    Schedule,
    rows=st.integers(1, 300),
    batch_size=st.integers(1, 80),
    micro_batch_size=st.integers(1, 40),
    ranks=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
)


@given(schedules)
@settings(max_examples=150, deadline=None)
def test_each_epoch_deals_every_row_once_and_evenly(schedule):
    for epoch in range(schedule.epochs):
        steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
        dealt = [schedule.rows_of(step) for step in steps]
        assert sorted(row for rows in dealt for row in rows) == list(range(schedule.rows))
        sizes = [len(rows) for rows in dealt]
        assert max(sizes) <= schedule.batch_size
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= 2 * min(sizes)


@given(schedules)
@settings(max_examples=150, deadline=None)
def test_ranks_and_forward_passes_split_a_step_without_loss(schedule):
    for step in {0, schedule.steps - 1}:
        slots = [
            slot
            for rank in range(schedule.ranks)
            for micro in range(schedule.accumulation)
            for slot in schedule.micro_batch(step, rank, micro)
        ]
        assert len(slots) == schedule.ranks * schedule.accumulation * schedule.slots
        assert sorted(row for row in slots if row is not None) == sorted(schedule.rows_of(step))
        assert schedule.slots <= schedule.micro_batch_size + 1


def test_a_schedule_depends_on_its_seed_alone():
    schedule = Schedule(rows=100, batch_size=16, micro_batch_size=16, seed=1)
    assert schedule.rows_of(3) == replace(schedule).rows_of(3)
    assert schedule.rows_of(3) != replace(schedule, seed=2).rows_of(3)


rows = st.integers(1, 7).flatmap(
    lambda length: st.builds(
        Row,
        prompt_ids=st.lists(st.integers(6, 200), min_size=1, max_size=6),
        completion_ids=st.lists(st.integers(6, 200), min_size=length, max_size=length),
        loss_mask=st.lists(st.integers(0, 1), min_size=length, max_size=length),
        logprobs=st.lists(st.floats(-9, 0, width=32), min_size=length, max_size=length),
        advantages=st.lists(st.floats(-3, 3, width=32), min_size=length, max_size=length),
        reward=st.floats(0, 1),
    )
)


@given(st.lists(st.one_of(st.none(), rows), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_tensors_hold_each_row_between_its_padding(batch):
    tensors = collate(batch, pad_id=0)
    for number, row in enumerate(batch):
        at = {name: tensor[number] for name, tensor in tensors.items()}
        if row is None:
            assert at["tool_mask"].sum() == 0
            assert at["prompt_mask"].sum() == 1
            assert at["completion_mask"].sum() == 1
            continue
        prompt, completion = len(row.prompt_ids), len(row.completion_ids)
        assert at["prompt_ids"][-prompt:].tolist() == row.prompt_ids
        assert at["prompt_mask"].tolist() == [0] * (len(at["prompt_mask"]) - prompt) + [1] * prompt
        assert at["completion_ids"][:completion].tolist() == row.completion_ids
        assert at["completion_mask"].tolist() == [1] * completion + [0] * (len(at["completion_mask"]) - completion)
        for name, values in [
            ("tool_mask", row.loss_mask),
            ("advantages", row.advantages),
            ("old_per_token_logps", row.logprobs),
        ]:
            assert at[name][:completion].tolist() == values
            assert at[name][completion:].abs().sum() == 0


def test_rows_come_from_the_parquet_file_with_their_weight_in_the_advantage(tmp_path: Path, sequence, write_batch):
    path = write_batch(tmp_path / "b.parquet", [replace(sequence(1, advantage=0.5), weight=2.0), sequence(2)])
    read = read_rows(path, max_sequence_tokens=64)
    assert set(read.rows[0].advantages) == {1.0}
    assert read.rows[1].completion_ids == list(sequence(2).completion_ids)
    assert (read.too_long, read.untrainable) == (0, 0)


def test_rows_that_cannot_be_trained_on_are_counted(tmp_path: Path, sequence, write_batch):
    empty = replace(sequence(1), loss_mask=(0,) * len(sequence(1).loss_mask))
    long = replace(sequence(2), prompt_ids=(7,) * 100)
    path = write_batch(tmp_path / "b.parquet", [empty, long, sequence(4)])
    read = read_rows(path, max_sequence_tokens=64)
    assert (len(read.rows), read.too_long, read.untrainable) == (1, 1, 1)


def test_a_batch_with_nothing_to_train_on_says_why(tmp_path: Path, sequence, write_batch):
    path = write_batch(tmp_path / "b.parquet", [replace(sequence(2), prompt_ids=(7,) * 100)])
    with pytest.raises(TrainingFailed, match="1 longer than"):
        read_rows(path, max_sequence_tokens=64)
    with pytest.raises(TrainingFailed, match="materialize rewarded_batch"):
        read_rows(tmp_path / "none.parquet", max_sequence_tokens=64)


@pytest.mark.parametrize(
    "broken",
    [{"loss_mask": (1,)}, {"prompt_ids": ()}, {"reward": 1.0, "weight": float("nan")}],
    ids=["lengths", "no prompt", "nan"],
)
def test_a_malformed_row_is_an_integrity_error(tmp_path: Path, sequence, write_batch, broken):
    path = write_batch(tmp_path / "b.parquet", [sequence(2), replace(sequence(1), **broken)])
    with pytest.raises(IntegrityError, match="row 1"):
        read_rows(path, max_sequence_tokens=64)
