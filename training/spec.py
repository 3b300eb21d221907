"""What a training process is told: frozen dataclasses, read from and written to JSON. Importing this loads no torch."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from noria.contracts.errors import ConfigError

MODEL_DIR = "model"
"""Folder of the consolidated weights and the tokenizer, in Hugging Face's layout."""
STATE_DIR = "state"
"""Folder of the resumable state: optimizer, step, random generators."""
LOG_FILE = "train_log.jsonl"
"""One JSON object per optimizer step, flushed as it happens."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Low-rank adapters (Hu et al. 2021), merged into the weights at the end."""

    r: int = 16
    alpha: int = 32
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Json:
    """Reading from and writing to one JSON file."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; raises `ConfigError` that names a key which is unknown or missing."""
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"{cls.__name__}: unknown key {unknown[0]!r}; valid keys: {', '.join(sorted(known))}")
        given = dict(values)
        if isinstance(given.get("lora"), Mapping):
            lora = dict(given["lora"])
            lora["target_modules"] = tuple(lora["target_modules"])
            given["lora"] = LoraSpec(**lora)
        try:
            return cls(**given)
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the JSON file at `path`."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"cannot read the spec {path}: {error}") from error

    def write(self, path: str | Path) -> Path:
        """Write to the JSON file at `path` by rename, and return it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self), indent=2))  # type: ignore[call-overload]
        return temporary.replace(path)


@dataclass(frozen=True, slots=True)
class ColdStartSpec(_Json):
    """How the first weights are made.

    output     folder that gets `model/`, `train_log.jsonl` and `COMPLETE.json`
    source     `tiny` builds a model and its tokenizer; `pretrained` loads a folder; `gguf` dequantizes a GGUF file
    path       that folder or file; `package:file` finds a file inside an installed Python package
    examples   JSON lines of {"prompt": messages, "completion": messages}; None takes the model as it is
    threads    CPU threads; None leaves it to torch
    """

    output: str
    source: Literal["tiny", "pretrained", "gguf"] = "tiny"
    path: str | None = None
    examples: str | None = None
    steps: int = 200
    batch_size: int = 32
    learning_rate: float = 1e-3
    seed: int = 0
    hidden_size: int = 192
    layers: int = 4
    vocabulary: int = 2048
    lora: LoraSpec | None = None
    max_sequence_tokens: int = 1024
    accelerator: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class TrainSpec(_Json):
    """One round's update: which batch moves which weights, how, and where to.

    round             the round's key, for messages
    batch             parquet file of `RewardedSequence` rows
    parent            folder of the weights to start from (Hugging Face's layout, tokenizer included)
    parent_state      `state/` of the parent's checkpoint, or None to start with a fresh optimizer
    output            checkpoint folder: `model/`, `state/`, `train_log.jsonl`, `COMPLETE.json`
    temperature       temperature at which the batch was sampled; the trainer's logprobs use the same
    batch_size        sequences per optimizer step over all ranks, at most; the rows are dealt evenly over the steps
    micro_batch_size  sequences per forward pass on one rank, at most
    epochs            how many times the batch is gone through
    save_steps        a killed trainer resumes from the last multiple of this
    min_entropy       a policy whose mean entropy per token (nats) ends below this has collapsed; 0 never says so
    threads           CPU threads per rank; None shares the cores evenly
    """

    round: str
    batch: str
    parent: str
    output: str
    parent_state: str | None = None
    seed: int = 0
    temperature: float = 1.0
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    importance_sampling_level: Literal["token", "sequence"] = "sequence"
    learning_rate: float = 3e-4
    batch_size: int = 64
    micro_batch_size: int = 64
    epochs: int = 1
    beta: float = 0.0
    epsilon: float = 0.2
    max_grad_norm: float = 1.0
    max_sequence_tokens: int = 1024
    save_steps: int = 8
    ranks: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 1
    accelerator: Literal["cpu", "cuda"] = "cpu"
    lora: LoraSpec | None = None
    min_entropy: float = 1e-4
    threads: int | None = None
