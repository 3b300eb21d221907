"""Station 6: the update, on the accelerator, in a process of its own."""

import json
from pathlib import Path
from typing import Any

import dagster as dg

from assets.partitions import round_of, rounds
from assets.pictures import learning_curve, picture
from assets.rewarded_batch import batch_path
from noria.config import Config
from noria.contracts.errors import StationFailed
from noria.contracts.round import Round
from noria.release.chain import CHECKPOINT, RoundPlan, read_plan
from noria.stores.artifacts import Artifacts
from resources.stores import Stores
from resources.trainer import Trainer
from training.launch import command, environment
from training.spec import LOG_FILE, MODEL_DIR, STATE_DIR, LoraSpec, TrainSpec

HEALTHY = "finite losses and weights, no collapse"


def checkpoint_dir(artifacts: Artifacts, round_: Round) -> str:
    """Where the round's checkpoint stands."""
    return f"{artifacts.round_dir(round_.key)}/{CHECKPOINT}"


def spec_of(config: Config, artifacts: Artifacts, round_: Round, plan: RoundPlan) -> TrainSpec:
    """What the trainer is told: the round's batch moves the parent's weights, with the settings of noria.toml."""
    training = config.training
    lora = config.model.lora
    parent_state: str | None = None
    if training.keep_optimizer and lora is None and Round.parse(plan.parent).number > 0:
        state = artifacts.local(f"{checkpoint_dir(artifacts, Round.parse(plan.parent))}/{STATE_DIR}")
        parent_state = str(state) if state.is_dir() else None
    return TrainSpec(
        round=round_.key,
        batch=str(artifacts.local(batch_path(artifacts, round_))),
        parent=str(artifacts.version_dir(plan.parent)),
        parent_state=parent_state,
        output=str(artifacts.local(checkpoint_dir(artifacts, round_))),
        seed=plan.seed,
        temperature=config.target(str(round_.target)).temperature,
        loss_type=training.loss_type,
        importance_sampling_level=training.importance_sampling_level,
        learning_rate=training.learning_rate,
        batch_size=training.batch_size,
        micro_batch_size=training.micro_batch_size,
        epochs=training.epochs,
        beta=training.beta,
        epsilon=training.epsilon,
        max_grad_norm=training.max_grad_norm,
        max_sequence_tokens=training.max_sequence_tokens,
        save_steps=training.save_steps,
        ranks=training.ranks,
        zero_stage=training.zero_stage,
        accelerator=training.accelerator,
        lora=LoraSpec(lora.r, lora.alpha, lora.target_modules) if lora else None,
    )


def read_log(directory: Path) -> list[dict[str, Any]]:
    """The training log, one record an optimizer step."""
    return [json.loads(line) for line in (directory / LOG_FILE).read_text().splitlines()]


def _last_finite(records: list[dict[str, Any]], name: str) -> float | None:
    """The newest value of a column; a value that was not finite stands as null in the log."""
    return next((float(record[name]) for record in reversed(records) if record.get(name) is not None), None)


@dg.asset(
    deps=["rewarded_batch"],
    partitions_def=rounds,
    group_name="training",
    kinds={"deepspeed", "pytorch"},
    description=(
        "**The new weights.** DeepSpeed moves the parent's weights along the batch (GSPO by default). Loss and reward "
        "appear here step by step while it runs; a trainer that was killed resumes from its last saved state."
    ),
)
def checkpoint(context: dg.AssetExecutionContext, stores: Stores, trainer: Trainer) -> dg.MaterializeResult:
    """Launch the trainer through Dagster Pipes and follow it to its end."""
    round_ = round_of(context)
    artifacts = stores.artifacts
    directory = artifacts.local(checkpoint_dir(artifacts, round_))
    marker = artifacts.completed(str(directory))
    reused = marker is not None
    if marker is None:
        plan = read_plan(artifacts, round_)
        spec = spec_of(stores.settings.config, artifacts, round_, plan)
        spec_path = spec.write(directory / "spec.json")
        trainer.run(
            context,
            command=command(spec_path),
            environment=environment(spec),
            cwd=stores.settings.config.root,
            log=directory / LOG_FILE,
        )
        marker = artifacts.completed(str(directory))
        if marker is None:
            raise StationFailed(
                f"the trainer ended without a complete checkpoint in {directory}; its output is in this run's stderr"
            )
    records = read_log(directory)
    return dg.MaterializeResult(
        metadata={
            "learning_curve": picture(learning_curve(records, round_.key), f"learning curve of {round_.key}"),
            "steps": len(records),
            "loss": _last_finite(records, "loss"),
            "entropy": _last_finite(records, "entropy"),
            "reward": float(marker["mean_reward"]),
            "healthy": bool(marker["healthy"]),
            "health": marker["reason"] or HEALTHY,
            "optimizer": str(marker["optimizer"]),
            "train_seconds": float(marker["seconds"]),
            "update_seconds": sum(float(record["seconds"]) for record in records),
            "weights_sha256": str(marker["weights_sha256"]),
            "weights": dg.MetadataValue.path(str(directory / MODEL_DIR)),
            "already_there": reused,
        }
    )


@dg.asset_check(
    asset=checkpoint, blocking=True, description="Finite weights and losses, no collapse, files match their hash."
)
def checkpoint_is_healthy(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
    """A broken checkpoint goes no further, and no later round starts from it."""
    return health_result(stores.artifacts, checkpoint_dir(stores.artifacts, round_of(context)))


def health_result(artifacts: Artifacts, directory: str) -> dg.AssetCheckResult:
    """Failed when the trainer called its checkpoint unhealthy, or the weights are not those that it wrote."""
    marker = artifacts.completed(directory)
    if marker is None:
        return dg.AssetCheckResult(passed=False, description=f"no complete checkpoint in {directory}")
    actual = artifacts.sha256_dir(f"{directory}/{MODEL_DIR}")
    if actual != marker["weights_sha256"]:
        return dg.AssetCheckResult(
            passed=False,
            description=f"the weights have hash {actual[:12]}, the trainer wrote {marker['weights_sha256'][:12]}: "
            "delete the checkpoint's folder and materialize the station again",
        )
    return dg.AssetCheckResult(passed=bool(marker["healthy"]), description=marker["reason"] or HEALTHY)
