"""TRL's `GRPOTrainer`, fed with rewarded sequences of the real agent instead of generating and scoring by itself.

Every objective of TRL stays as it is; only where its batches come from changes. DeepSpeed's settings are made here too.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import use_adapter

from training import checkpoint
from training.batch import Row, Schedule, collate
from training.spec import TrainSpec

STATE_MARKER = "noria.json"
"""In a state folder: written last, says how far it is and what it fits."""
_PREFIX = "checkpoint-"


def deepspeed_config(spec: TrainSpec, schedule: Schedule) -> dict[str, Any]:
    """DeepSpeed's settings for a spec: ZeRO stage, batch sizes, bf16 on a GPU and float32 on a CPU."""
    return {
        "train_micro_batch_size_per_gpu": schedule.slots,
        "gradient_accumulation_steps": schedule.accumulation,
        "train_batch_size": schedule.slots * schedule.accumulation * spec.ranks,
        "gradient_clipping": spec.max_grad_norm,
        "zero_optimization": {"stage": spec.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": spec.accelerator == "cuda"},
        "steps_per_print": 1_000_000_000,
    }


def grpo_config(
    spec: TrainSpec, schedule: Schedule, *, work: Path, max_steps: int, deepspeed: bool = True
) -> GRPOConfig:
    """TRL's settings for a spec; `max_steps` counts from the first step of the optimizer's state."""
    return GRPOConfig(
        output_dir=str(work),
        max_steps=max_steps,
        per_device_train_batch_size=schedule.slots,
        gradient_accumulation_steps=schedule.accumulation,
        num_generations=2,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=spec.max_grad_norm,
        loss_type=spec.loss_type,
        importance_sampling_level=spec.importance_sampling_level,
        epsilon=spec.epsilon,
        beta=spec.beta,
        temperature=spec.temperature,
        max_completion_length=spec.max_sequence_tokens,
        activation_checkpointing=False,
        use_cpu=spec.accelerator == "cpu",
        bf16=spec.accelerator == "cuda",
        dataloader_pin_memory=spec.accelerator == "cuda",
        deepspeed=deepspeed_config(spec, schedule) if deepspeed else None,
        seed=spec.seed,
        ignore_data_skip=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class FedTrainer(GRPOTrainer):
    """`GRPOTrainer` whose optimizer step k consumes what the schedule deals for step k.

    model        a causal model, or the folder of one
    rows         the round's batch
    start_step   the optimizer's step number before this round's first step
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: TrainSpec,
        rows: Sequence[Row],
        schedule: Schedule,
        *,
        arguments: GRPOConfig,
        start_step: int = 0,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        super().__init__(
            model=model,
            reward_funcs=_already_rewarded,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
            peft_config=checkpoint.lora_config(spec.lora) if spec.lora else None,
            callbacks=list(callbacks),
        )
        self.spec = spec
        self.rows = rows
        self.schedule = schedule
        self.start_step = start_step
        # An even share of a step's rows in each slot: TRL's mean over slots becomes a mean over rows.
        self._means_over_slots = spec.loss_type in ("grpo", "dr_grpo")

    def get_train_dataloader(self) -> Any:
        """One empty item per forward pass: `_prepare_inputs` knows from the step number what is due."""
        return _Ticks(self.args.max_steps * self.schedule.accumulation)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        step = self.state.global_step - self.start_step
        # TRL counts forward passes from the start of the process, which is always the start of an optimizer step.
        micro = self._step % self.schedule.accumulation
        return self.batch(step, micro)

    def batch(self, step: int, micro: int) -> dict[str, Any]:
        """The tensors of forward pass `micro` of optimizer step `step` (both from 0) on this rank."""
        slots = self.schedule.micro_batch(step, self.accelerator.process_index, micro)
        tensors = collate(
            [None if index is None else self.rows[index] for index in slots], pad_id=self._tokenizer.pad_token_id
        )
        inputs = {name: tensor.to(self.accelerator.device) for name, tensor in tensors.items()}
        dealt = self.schedule.rows_of(step)
        trained = sum(sum(self.rows[index].loss_mask) for index in dealt)
        inputs["num_items_in_batch"] = torch.tensor(float(trained), device=self.accelerator.device)
        inputs["slots_per_row"] = self.schedule.slots * self.schedule.accumulation * self.spec.ranks / len(dealt)
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = self._reference_logprobs(inputs)
        return inputs

    def _reference_logprobs(self, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        # With adapters the reference is the model without them, else TRL's own copy of the parent.
        without = (
            use_adapter(self.accelerator.unwrap_model(self.model), adapter_name=None)
            if self.ref_model is None
            else contextlib.nullcontext()
        )
        with torch.no_grad(), without:
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                self.ref_model or self.model, ids, mask, inputs["completion_ids"].size(1)
            )
        return logprobs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        return loss * inputs["slots_per_row"] if self._means_over_slots else loss

    def reward_of(self, step: int) -> float:
        """Mean reward of the rows of optimizer step `step` (from 0)."""
        dealt = self.schedule.rows_of(step)
        return sum(self.rows[index].reward for index in dealt) / len(dealt)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Leave the weights out of a state folder: DeepSpeed's own state holds them in full precision."""
        if not _internal_call:
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Not TRL's: it writes a model card. The marker comes when every rank has written its part.
        self.state.log_history = []
        Trainer._save_checkpoint(self, model, trial)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            folder = Path(self.args.output_dir) / f"{_PREFIX}{self.state.global_step}"
            mark_state(folder, fits(self.spec), start_step=self.start_step, step=self.state.global_step)
            for older in states(folder.parent):
                if older != folder:
                    shutil.rmtree(older)
        self.accelerator.wait_for_everyone()


class SaveEvery(TrainerCallback):
    """Asks for a state every `every` steps of the round and at its last step.

    start, last   the trainer's step numbers before the round's first step and after its last
    """

    def __init__(self, every: int, *, start: int, last: int) -> None:
        self.every = every
        self.start = start
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Set the flag that the trainer looks at after logging."""
        done = state.global_step - self.start
        control.should_save = done % self.every == 0 or state.global_step == self.last
        return control


class _Ticks:
    """As many empty items as there are forward passes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({} for _ in range(self.count))


def _already_rewarded(**_: Any) -> list[float]:
    raise AssertionError("the rows come with their advantages; TRL has nothing to score")


def fits(spec: TrainSpec) -> dict[str, Any]:
    """What an optimizer state must share with a training that continues it."""
    return {"ranks": spec.ranks, "zero_stage": spec.zero_stage, "accelerator": spec.accelerator}


def states(folder: Path) -> list[Path]:
    """The state folders in `folder`, the furthest last; one whose writing was interrupted is among them."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def mark_state(folder: Path, fit: dict[str, Any], *, start_step: int, step: int) -> None:
    """Write a state folder's marker by rename."""
    temporary = folder / f".{STATE_MARKER}"
    temporary.write_text(json.dumps({**fit, "start_step": start_step, "step": step}))
    temporary.replace(folder / STATE_MARKER)


def newest_state(folder: Path, spec: TrainSpec) -> tuple[Path, dict[str, Any]] | None:
    """The furthest whole state in `folder` that fits `spec`, with what its marker says; None if there is none."""
    for path in reversed(states(folder)):
        marker = path / STATE_MARKER
        if marker.exists():
            said = json.loads(marker.read_text())
            if fits(spec).items() <= said.items():
                return path, said
    return None
