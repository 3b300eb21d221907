"""Load the weights of a GGUF file as ordinary ones (dequantized to float32)."""

import importlib.util
from pathlib import Path
from typing import Any

from noria.contracts.errors import ConfigError


def locate(path: str) -> Path:
    """The file or folder that `model.path` names: a path, or `package:file` inside an installed Python package.

    Raises `ConfigError` if the package is not installed or nothing is there.
    """
    package, colon, inside = path.partition(":")
    if colon and not Path(path).exists():
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise ConfigError(f"model.path is {path!r}, but the Python package {package!r} is not installed")
        place = Path(next(iter(found.submodule_search_locations))) / inside
    else:
        place = Path(path)
    if not place.exists():
        raise ConfigError(f"model.path is {path!r}, but there is nothing at {place}")
    return place


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
