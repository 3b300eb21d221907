"""Any causal model that transformers loads is served the same way."""

import queue
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from noria.services.policy.engine import Engine
from noria.services.policy.row import Progress, Row
from noria.services.policy.sampling import Settings
from noria.services.policy.versions import Version

COMMON = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES = {
    "llama": COMMON,  # SmolLM2's
    "mistral": {**COMMON, "sliding_window": 8},  # the cache forgets
    "gemma2": {**COMMON, "sliding_window": 8, "head_dim": 16},  # half of the layers forget
    "gpt2": {"vocab_size": 400, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3, "eos_token_id": 2},
    "mamba": {**COMMON, "state_size": 4},  # recurrent: cannot be padded, so each row is answered alone
}


@pytest.mark.parametrize("kind", SHAPES)
def test_greedy_answers_of_a_mixed_batch_are_those_of_generate(kind: str, model_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **SHAPES[kind])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir / name, tmp_path)
    version = Version(tmp_path)
    assert version.batchable == (kind != "mamba")
    stream = random.Random(4)
    prompts = [[stream.randrange(3, 400) for _ in range(length)] for length in (1, 5, 20, 33, 5)]
    got: queue.Queue[tuple[int, Progress]] = queue.Queue()
    engine = Engine(batch_wait_ms=20)
    engine.submit(
        [
            Row(version, prompt, Settings(4 + 4 * i, 0.0), lambda progress, i=i: got.put((i, progress)))
            for i, prompt in enumerate(prompts)
        ]
    )
    answers = dict(got.get(timeout=60) for _ in prompts)
    engine.close()
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = version.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4 + 4 * i, do_sample=False, pad_token_id=0
        )
        assert answers[i].error is None, answers[i].error
        assert answers[i].token_ids == expected[0, len(prompt) :].tolist()
