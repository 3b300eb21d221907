"""Checkpoint folders: weights, their hash and health, and the marker that is written last."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from training.spec import MARKER


def prepare_process(threads: int | None, accelerator: str) -> None:
    """Set what must be set before torch, DeepSpeed and transformers start: offline, quiet, no compiler.

    threads       CPU threads, or None to leave it to torch
    accelerator   `cpu` or `cuda`
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["DS_ACCELERATOR"] = accelerator
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def quiet(trainer: Any) -> None:
    """Take the trainer's own printing away: the log file and one progress bar say it all."""
    from transformers import PrinterCallback, ProgressCallback

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


def all_finite(model: Any) -> bool:
    """Whether every weight is a finite number."""
    import torch

    return all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def save_model(model: Any, tokenizer: Any, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Write weights (safetensors) and tokenizer to `folder` by rename; `state` overrides the model's own tensors."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=state)
    tokenizer.save_pretrained(temporary)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the safetensors files of `folder`, in the order of their names."""
    import hashlib

    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def mark_complete(folder: Path, info: dict[str, Any]) -> None:
    """Write the marker by rename, after everything else in the folder has reached the disk."""
    temporary = folder / f".{MARKER}.{os.getpid()}"
    with temporary.open("w") as file:
        json.dump(info, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARKER)
