"""Checkpoint folders: weights, their hash and health, and the marker that is written last."""

import os
import shutil
from pathlib import Path
from typing import Any

from noria.stores.artifacts import Artifacts
from training.spec import LoraSpec, TrainSpec


def prepare_process(threads: int | None, accelerator: str) -> None:
    """Set what must be set before torch, DeepSpeed and transformers start: offline, quiet, no compiler.

    threads       CPU threads, or None to leave it to torch
    accelerator   `cpu` or `cuda`
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported; see launch.environment
    os.environ["DS_ACCELERATOR"] = accelerator
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def join_ranks(accelerator: str) -> None:
    """Connect the ranks, before a model is loaded: ZeRO-3 shards it over as many as are connected by then.

    DeepSpeed's shared-memory op for CPUs is left out: compiling it takes over a minute and a compiler.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if accelerator == "cpu" else "nccl", verbose=False)


def quiet(trainer: Any) -> None:
    """Take the trainer's own printing away: the log file and one progress bar say it all."""
    from transformers import PrinterCallback, ProgressCallback

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


def all_finite(model: Any) -> bool:
    """Whether every weight is a finite number."""
    import torch

    return all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def consolidated(trainer: Any) -> dict[str, Any]:
    """All trained weights of a `FedTrainer` on rank 0, whatever the ZeRO stage; of adapters, the adapters alone.

    A collective: every rank must call it.
    """
    from peft import get_peft_model_state_dict

    state = dict(trainer.accelerator.get_state_dict(trainer.model_wrapped) or {})
    if trainer.spec.lora is None or not trainer.accelerator.is_main_process:
        return state
    return dict(get_peft_model_state_dict(trainer.accelerator.unwrap_model(trainer.model), state_dict=state))


def write_weights(weights: dict[str, Any], tokenizer: Any, spec: TrainSpec, folder: Path) -> None:
    """Write a round's consolidated weights as a model folder; adapters are merged into the parent's weights."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else ZeRO-3 would load this model in shards too
    dtype = next(iter(weights.values())).dtype
    model = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=dtype)
    if spec.lora is None:
        model.load_state_dict(weights)
    else:
        from peft import get_peft_model, set_peft_model_state_dict

        adapted = get_peft_model(model, lora_config(spec.lora))
        set_peft_model_state_dict(adapted, weights)
        model = adapted.merge_and_unload()
    save_model(model, tokenizer, folder)


def lora_config(lora: LoraSpec) -> Any:
    """PEFT's settings for low-rank adapters."""
    from peft import LoraConfig

    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights (safetensors) and tokenizer to `folder` by rename."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the names and contents of the files of a model folder."""
    return Artifacts(folder.parent).sha256_dir(folder.name)


def completed(folder: Path) -> dict[str, Any] | None:
    """What the marker of `folder` says, None where there is none."""
    return Artifacts(folder.parent).completed(folder.name)


def mark_complete(folder: Path, info: dict[str, Any]) -> None:
    """Write the marker after everything else in the folder has reached the disk."""
    Artifacts(folder.parent).mark_complete(folder.name, info)
