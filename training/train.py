"""One round's update: rewarded batch and parent weights in, checkpoint out. Run under DeepSpeed by `training.launch`.

Reads a `TrainSpec` and writes, below its `output`:

    train_log.jsonl   one line per optimizer step, as it happens
    state/            the resumable state; a trainer that was killed continues from here to the same weights
    model/            the consolidated weights (adapters merged) and the tokenizer
    COMPLETE.json     last: {"healthy", "reason", "steps", "seconds", "weights_sha256", …}

A complete folder is left as it is. The optimizer continues the parent's state where it fits (full fine-tuning, the same
ranks, ZeRO stage and accelerator), and starts afresh otherwise. What this leaves out of an RL trainer: generating and
scoring, which the real agent and the judge have done.
"""

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from noria.contracts.errors import NoriaError
from training import checkpoint, parent
from training.batch import RewardedRows, Schedule, read_rows
from training.spec import LOG_FILE, MODEL_DIR, STATE_DIR, TrainSpec


def train(spec: TrainSpec) -> dict[str, Any]:
    """Write the checkpoint folder that `spec.output` names and return what its marker says.

    Every rank runs this; rank 0 writes. Raises `TrainingFailed` if there is nothing to train on. A loss or weights
    that are not finite, and a collapsed policy, are no error: the marker says `healthy: false` and why.
    """
    output = Path(spec.output).resolve()
    if (done := checkpoint.completed(output)) is not None:
        return done
    began = time.monotonic()
    batch = read_rows(spec.batch, max_sequence_tokens=spec.max_sequence_tokens)
    schedule = Schedule(
        rows=len(batch.rows),
        batch_size=spec.batch_size,
        micro_batch_size=spec.micro_batch_size,
        ranks=spec.ranks,
        epochs=spec.epochs,
        seed=spec.seed,
    )
    checkpoint.prepare_process(spec.threads, spec.accelerator)
    checkpoint.join_ranks(spec.accelerator)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from training.health import HealthWatch
    from training.progress import StepLog
    from training.trainer import FedTrainer, SaveEvery, grpo_config, newest_state

    work = output / STATE_DIR
    resumed = newest_state(work, spec)
    inherited = None
    if resumed is None and spec.parent_state is not None and spec.lora is None:
        inherited = newest_state(Path(spec.parent_state), spec)
    start_step = resumed[1]["start_step"] if resumed else inherited[1]["step"] if inherited else 0
    max_steps = start_step + schedule.steps
    # The arguments come before the model: with ZeRO-3 they make transformers load it in shards.
    arguments = grpo_config(spec, schedule, work=work, max_steps=max_steps)
    dtype = torch.bfloat16 if spec.accelerator == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(spec.parent, padding_side="left")
    health = HealthWatch(start=start_step)
    log = StepLog(output / LOG_FILE, steps=schedule.steps, title=spec.round, start=start_step)
    saving = SaveEvery(spec.save_steps, start=start_step, last=max_steps)
    trainer = FedTrainer(
        model,
        tokenizer,
        spec,
        batch.rows,
        schedule,
        arguments=arguments,
        start_step=start_step,
        callbacks=[saving, health, log],
    )
    log.extra = lambda step: {"reward": round(trainer.reward_of(step - 1), 6)}
    checkpoint.quiet(trainer)
    source = resumed or inherited
    startup = time.monotonic() - began
    trainer.train(resume_from_checkpoint=str(source[0]) if source else None)

    weights = checkpoint.consolidated(trainer)
    info: dict[str, Any] = {}
    if trainer.accelerator.is_main_process:
        reason = health.verdict(weights, spec.min_entropy)
        checkpoint.write_weights(weights, tokenizer, spec, output / MODEL_DIR)
        info = {
            "healthy": reason is None,
            "reason": reason,
            "steps": schedule.steps,
            "seconds": round(time.monotonic() - began, 3),
            "startup_seconds": round(startup, 3),
            "weights_sha256": checkpoint.weights_sha256(output / MODEL_DIR),
            **_origin(spec, batch, resumed_from=resumed[1]["step"] - start_step if resumed else 0),
            "optimizer": "continued" if inherited or (resumed and start_step) else "fresh",
        }
        checkpoint.mark_complete(output, info)
    trainer.accelerator.wait_for_everyone()
    return info


def _origin(spec: TrainSpec, batch: RewardedRows, *, resumed_from: int) -> dict[str, Any]:
    """Where a checkpoint comes from, for its marker."""
    return {
        "round": spec.round,
        "seed": spec.seed,
        "rows": len(batch.rows),
        "rows_too_long": batch.too_long,
        "rows_untrainable": batch.untrainable,
        "mean_reward": round(sum(row.reward for row in batch.rows) / len(batch.rows), 6),
        "resumed_from_step": resumed_from,
        "ranks": spec.ranks,
        "zero_stage": spec.zero_stage,
        "accelerator": spec.accelerator,
    }


def _report(info: dict[str, Any], pipes: Any) -> None:
    """Hand the marker's facts to Dagster."""
    if pipes.is_asset_step and len(pipes.asset_keys) == 1:
        pipes.report_asset_materialization(metadata={name: value for name, value in info.items() if value is not None})
    else:
        pipes.report_custom_message(info)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of each rank; 0 when the checkpoint is complete, 2 with one line on stderr when it cannot be made."""
    parent.watch()
    parser = argparse.ArgumentParser(description="One round's update.")
    parser.add_argument("--spec", required=True, help="JSON file of a TrainSpec")
    options = parser.parse_args(arguments)
    try:
        with ExitStack() as stack:
            pipes = None
            if "DAGSTER_PIPES_CONTEXT" in os.environ and os.environ.get("RANK", "0") == "0":
                from dagster_pipes import open_dagster_pipes

                pipes = stack.enter_context(open_dagster_pipes())
            info = train(TrainSpec.read(options.spec))
            if pipes is not None:
                _report(info, pipes)
    except NoriaError as error:
        sys.stderr.write(f"train: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
