"""The loss that the fed trainer computes is GSPO's, written here by hand."""

import warnings
from dataclasses import replace

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from training.batch import Schedule, read_rows
    from training.trainer import FedTrainer, grpo_config


@pytest.fixture
def trainer_for(base, batch, tmp_path, spec_for):
    def build(**changes):
        spec = spec_for(base, batch, tmp_path / "out", **changes)
        rows = read_rows(batch, max_sequence_tokens=64).rows
        schedule = Schedule(
            rows=len(rows), batch_size=spec.batch_size, micro_batch_size=spec.micro_batch_size, seed=spec.seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = grpo_config(spec, schedule, work=tmp_path / "state", max_steps=schedule.steps, deepspeed=False)
            trainer = FedTrainer(
                AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
                AutoTokenizer.from_pretrained(base),
                spec,
                rows,
                schedule,
                arguments=arguments,
            )
        trainer.current_gradient_accumulation_steps = schedule.accumulation
        trainer.model.train()
        return trainer

    return build


def by_hand(trainer, step, temperature, epsilon):
    """GSPO (Zheng et al. 2025), row by row and without padding: the mean over rows of the clipped sequence ratio."""
    losses = []
    for index in trainer.schedule.rows_of(step):
        row = trainer.rows[index]
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logits = trainer.model.model(input_ids=ids).last_hidden_state @ trainer.model.lm_head.weight.T
        logprobs = torch.log_softmax(logits[0, len(row.prompt_ids) - 1 : -1] / temperature, dim=-1)
        new = logprobs[range(len(row.completion_ids)), row.completion_ids]
        mask = torch.tensor(row.loss_mask, dtype=torch.float32)
        ratio = ((new - torch.tensor(row.logprobs)) * mask).sum().div(mask.sum()).exp()
        advantages = torch.tensor(row.advantages)
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
        losses.append(-(objective * mask).sum() / mask.sum())
    return torch.stack(losses).mean()


def by_trainer(trainer, step):
    return sum(
        trainer._compute_loss(trainer.model, trainer.batch(step, micro))
        for micro in range(trainer.schedule.accumulation)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"micro_batch_size": 2},
        {"batch_size": 7, "micro_batch_size": 3},  # 32 rows in 5 steps of 6 or 7: some slots stay empty
        {"epsilon": 0.01},
    ],
    ids=["plain", "temperature", "accumulated", "uneven", "clipped"],
)
def test_loss_and_gradient_are_gspo(trainer_for, changes):
    trainer = trainer_for(**changes)
    for step in (0, trainer.schedule.steps - 1):
        expected = by_hand(trainer, step, trainer.spec.temperature, trainer.spec.epsilon)
        wanted = torch.autograd.grad(expected, trainer.model.lm_head.weight)[0]
        loss = by_trainer(trainer, step)
        got = torch.autograd.grad(loss, trainer.model.lm_head.weight)[0]
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        assert torch.allclose(got, wanted, atol=1e-6)


def test_only_the_policys_own_tokens_count(trainer_for):
    trainer = trainer_for()
    before = by_trainer(trainer, 0).item()
    changed = []
    for row in trainer.rows:
        moved = [-1.0 if on == 0 else value for on, value in zip(row.loss_mask, row.logprobs, strict=True)]
        changed.append(replace(row, logprobs=moved))
    trainer.rows = changed
    assert by_trainer(trainer, 0).item() == pytest.approx(before, abs=1e-7)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "dapo"])
def test_empty_slots_change_no_objective(trainer_for, loss_type):
    """A step cut into forward passes with empty slots has the gradient of the same rows in one pass (bnpo by pass)."""
    whole = trainer_for(loss_type=loss_type, importance_sampling_level="token", batch_size=7, micro_batch_size=8)
    loss = by_trainer(whole, 4)  # 6 or 7 rows in 8 slots
    whole.schedule = replace(whole.schedule)
    filled = [index for index in whole.schedule.micro_batch(4, 0, 0) if index is not None]
    inputs = whole.batch(4, 0)
    exact = {
        name: value[: len(filled)] if torch.is_tensor(value) and value.dim() else value
        for name, value in inputs.items()
    }
    exact["slots_per_row"] = 1.0
    assert loss.item() == pytest.approx(whole._compute_loss(whole.model, exact).item(), abs=1e-6)


def test_the_kl_term_is_zero_at_the_parent_and_positive_away_from_it(trainer_for):
    trainer = trainer_for(beta=0.1)
    by_trainer(trainer, 0)
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)
    by_trainer(trainer, 0)
    assert trainer._metrics["train"]["kl"][-1] > 1e-4
