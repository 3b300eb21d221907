"""Station 0: the weights that every target begins with."""

import json
import sys
from pathlib import Path

import dagster as dg

from assets.checkpoint import read_log
from assets.pictures import figure, picture, png_of
from noria.config import Config
from noria.contracts.round import Round, Target
from noria.loading import load_function, locate_model
from noria.stores.artifacts import Artifacts
from resources.registry import Releases
from resources.stores import Stores
from resources.trainer import Trainer
from training.spec import LOG_FILE, MODEL_DIR, ColdStartSpec, LoraSpec

BASE = "base"


def spec_of(config: Config, artifacts: Artifacts) -> ColdStartSpec:
    """What the cold start is told; its examples are written beside the weights, where they can be read."""
    directory = artifacts.local(BASE)
    model = config.model
    examples: Path | None = None
    if model.cold_start.examples is not None:
        examples = directory / "examples.jsonl"
        rows = load_function(model.cold_start.examples, config.root).function(seed=config.seed)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        artifacts.write_bytes(str(examples), lines.encode())
    return ColdStartSpec(
        output=str(directory),
        source=model.source,
        path=str(locate_model(model.path, config.root)) if model.path else None,
        examples=str(examples) if examples else None,
        steps=model.cold_start.steps,
        batch_size=model.cold_start.batch_size,
        learning_rate=model.cold_start.learning_rate,
        seed=config.seed,
        hidden_size=model.hidden_size,
        layers=model.layers,
        vocabulary=model.vocabulary,
        lora=LoraSpec(model.lora.r, model.lora.alpha, model.lora.target_modules) if model.lora else None,
        accelerator=config.training.accelerator,
    )


# A multi-asset of one: it gives the op a name of its own, and the job may be called `cold_start` like the asset.
@dg.multi_asset(
    name="make_base_weights",
    specs=[
        dg.AssetSpec(
            "cold_start",
            group_name="training",
            kinds={"pytorch", "huggingface"},
            description=(
                "**Where every target begins.** The base weights, fine-tuned on the logs that you have, however "
                "imperfect. Made once and kept; each enabled target that serves nothing yet is released with them."
            ),
        )
    ],
)
def cold_start(
    context: dg.AssetExecutionContext, stores: Stores, releases: Releases, trainer: Trainer
) -> dg.MaterializeResult:
    """Make the base weights if they are not there, and release them where nothing is live."""
    config = stores.settings.config
    artifacts = stores.artifacts
    directory = artifacts.local(BASE)
    marker = artifacts.completed(str(directory))
    reused = marker is not None
    if marker is None:
        spec = spec_of(config, artifacts)
        spec_path = spec.write(directory / "spec.json")
        trainer.run(
            context,
            command=[sys.executable, "-m", "training.cold_start", "--spec", str(spec_path)],
            environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            cwd=config.root,
            log=directory / LOG_FILE,
        )
        marker = artifacts.completed(str(directory)) or {}
    released = [name for name in config.enabled_targets if releases.registry.current(name) is None]
    for name in released:
        releases.registry.promote(
            name,
            Round(Target.parse(name), 0).key,
            f"{BASE}/{MODEL_DIR}",
            by="cold_start",
            why="the first weights: nothing was live",
        )
    records = read_log(directory) if (directory / LOG_FILE).exists() else []
    curve = {"loss_curve": picture(_loss_curve(records), "loss of the cold start")} if records else {}
    return dg.MaterializeResult(
        metadata={
            "source": config.model.source,
            "parameters": int(marker.get("parameters", 0)),
            "weights": dg.MetadataValue.path(str(directory / MODEL_DIR)),
            "released": ", ".join(released) or "nothing: every target already serves a version",
            "seconds": float(marker.get("seconds", 0.0)),
            "already_there": reused,
            **curve,
        }
    )


def _loss_curve(records: list[dict[str, float]]) -> bytes:
    fig = figure()
    axis = fig.subplots()
    axis.plot([record["step"] for record in records], [record["loss"] for record in records])
    axis.set(xlabel="optimizer step", ylabel="loss", title="supervised cold start")
    return png_of(fig)
