"""Load the weights of a GGUF file as ordinary ones (dequantized to float32)."""

from pathlib import Path
from typing import Any


def load_gguf(file: Path) -> tuple[Any, Any]:
    """The causal model, in float32, and the tokenizer that a GGUF file holds; quantized weights are dequantized."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model, tokenizer
