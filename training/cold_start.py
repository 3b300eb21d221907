"""Make the first weights: build or load a model, then imitate logged answers (supervised, loss on the answers only).

    python -m training.cold_start --spec cold.json

reads a `ColdStartSpec` and writes `model/`, `train_log.jsonl` and, last, `COMPLETE.json`. A complete folder is left as
it is. Logs of imperfect answers give an imperfect model: that is what the wheel then improves.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noria.contracts.errors import ConfigError, NoriaError, TrainingFailed
from noria.loading import locate_model
from training import checkpoint, parent
from training.gguf import load_gguf
from training.spec import LOG_FILE, MODEL_DIR, ColdStartSpec

Example = dict[str, list[dict[str, Any]]]


def read_examples(path: str | Path) -> list[Example]:
    """Rows {"prompt": [message, …], "completion": [message, …]} of a JSON lines file; raises `ConfigError`."""
    rows: list[Example] = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the cold start's examples: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict) or not row.get("prompt") or not row.get("completion"):
            raise ConfigError(f"{path}:{number}: a row needs the message lists 'prompt' and 'completion': {line[:120]}")
        rows.append({"prompt": row["prompt"], "completion": row["completion"]})
    if not rows:
        raise ConfigError(f"{path} holds no examples; see model.cold_start.examples")
    return rows


def texts(rows: list[Example]) -> Iterator[str]:
    """Every message's content: what a tokenizer is trained on."""
    for row in rows:
        for message in (*row["prompt"], *row["completion"]):
            if message.get("content"):
                yield message["content"]


def starting_point(spec: ColdStartSpec, rows: list[Example]) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer before any training."""
    if spec.source == "tiny":
        from training.tiny import build_model, build_tokenizer

        if not rows:
            raise ConfigError("model.source is 'tiny', which learns to speak from model.cold_start.examples; set it")
        tokenizer = build_tokenizer(texts(rows), vocabulary=spec.vocabulary)
        return build_model(tokenizer, seed=spec.seed, hidden_size=spec.hidden_size, layers=spec.layers), tokenizer
    if spec.path is None:
        raise ConfigError(f"model.source is {spec.source!r}, which needs model.path")
    place = locate_model(spec.path)
    if spec.source == "gguf":
        return load_gguf(place)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32), AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {place} is no model that transformers can load: {error}") from error


def imitate(model: Any, tokenizer: Any, rows: list[Example], spec: ColdStartSpec, log: Path, work: Path) -> Any:
    """Fine-tune on the completions with TRL's `SFTTrainer`; returns the model, adapters merged."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from training.progress import StepLog

    datasets.disable_progress_bars()
    arguments = SFTConfig(
        output_dir=str(work),
        max_steps=spec.steps,
        per_device_train_batch_size=spec.batch_size,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(10, spec.steps // 10),
        max_length=spec.max_sequence_tokens,
        completion_only_loss=True,
        activation_checkpointing=False,
        use_cpu=spec.accelerator == "cpu",
        bf16=spec.accelerator == "cuda",
        dataloader_pin_memory=spec.accelerator == "cuda",
        seed=spec.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=checkpoint.lora_config(spec.lora) if spec.lora else None,
        callbacks=[StepLog(log, steps=spec.steps, title="cold start")],
    )
    checkpoint.quiet(trainer)
    trainer.train()
    trained = trainer.accelerator.unwrap_model(trainer.model)
    return trained.merge_and_unload() if spec.lora is not None else trained


def cold_start(spec: ColdStartSpec) -> dict[str, Any]:
    """Write the folder that `spec.output` names and return what its marker says; a complete one is left as it is."""
    output = Path(spec.output).resolve()
    if (done := checkpoint.completed(output)) is not None:
        return done
    began = time.monotonic()
    checkpoint.prepare_process(spec.threads, spec.accelerator)
    output.mkdir(parents=True, exist_ok=True)
    rows = read_examples(spec.examples) if spec.examples else []
    (output / LOG_FILE).touch()
    model, tokenizer = starting_point(spec, rows)
    parameters = sum(weight.numel() for weight in model.parameters())
    if rows:
        work = output / ".work"
        model = imitate(model, tokenizer, rows, spec, output / LOG_FILE, work)
        shutil.rmtree(work, ignore_errors=True)
    if not checkpoint.all_finite(model):
        raise TrainingFailed(
            f"the cold start ended with weights that are not finite; lower model.cold_start.learning_rate "
            f"({spec.learning_rate:g})"
        )
    model.config.use_cache = True
    checkpoint.save_model(model, tokenizer, output / MODEL_DIR)
    info = {
        "healthy": True,
        "reason": None,
        "steps": spec.steps if rows else 0,
        "seconds": round(time.monotonic() - began, 3),
        "weights_sha256": checkpoint.weights_sha256(output / MODEL_DIR),
        "parameters": parameters,
        "examples": len(rows),
        "seed": spec.seed,
        "source": spec.source,
    }
    checkpoint.mark_complete(output, info)
    return info


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 when the folder is complete, 2 with one line on stderr when it cannot be made."""
    parent.watch()
    parent.watch()
    parser = argparse.ArgumentParser(description="Make the first weights.")
    parser.add_argument("--spec", required=True, help="JSON file of a ColdStartSpec")
    options = parser.parse_args(arguments)
    try:
        info = cold_start(ColdStartSpec.read(options.spec))
    except NoriaError as error:
        sys.stderr.write(f"cold start: {error}\n")
        return 2
    sys.stderr.write(f"cold start: {info['parameters']:,} parameters, {info['steps']} steps, {info['seconds']:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
