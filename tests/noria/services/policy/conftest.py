"""A tiny random model with a byte-level tokenizer, and the policy server around it on loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web

from noria.config import PolicyConfig
from noria.contracts.errors import NotFound
from noria.services.policy.app import create_app
from noria.services.policy.versions import Version

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 2048

Serve = Callable[..., AbstractAsyncContextManager[str]]


def build(folder: Path, seed: int, vocabulary: int = 400) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the river turns the wheel and the wheel lifts the river's water"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,  # wide enough that the random model has preferences
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "base", seed=1)


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "other", seed=2)


@pytest.fixture(scope="session")
def mismatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer knows more tokens than the model has embeddings for, so the model fails on them."""
    return build(tmp_path_factory.mktemp("model") / "mismatched", seed=3, vocabulary=100)


@pytest.fixture(scope="session")
def version(model_dir: Path) -> Version:
    return Version(model_dir)


@pytest.fixture
def serve(model_dir: Path, other_dir: Path) -> Serve:
    """`async with serve(max_batch=4) as url`; `extra` adds versions by name."""

    @asynccontextmanager
    async def start(extra: dict[str, Path] | None = None, **settings: object) -> AsyncIterator[str]:
        known = {"base": model_dir, "a.b.r00000": model_dir, "a.b.r00001": other_dir, **(extra or {})}

        def resolve(name: str) -> Path:
            if name not in known:
                raise NotFound(f"version {name!r} is not there; materialize its checkpoint")
            return known[name]

        app = create_app(PolicyConfig.model_validate(settings), resolve, lambda: known)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    return start
