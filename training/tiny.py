"""A model small enough to learn on two CPU cores: Qwen3 architecture, byte-level BPE tokenizer, chat template.

The default size (192 wide, 4 layers, 2,048 tokens) has 1.9 million parameters. Every message is rendered on its own,
`<|role|>content<|end|>`, so the tokens of a conversation are a prefix of the tokens of its continuation.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
MAX_POSITIONS = 4096
_HEAD_DIM = 32

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' -}}
{%- generation -%}
{{- message.content or '' -}}
{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}
{{- '<|end|>' -}}
{%- endgeneration -%}
{%- elif message.role in ('system', 'developer') -%}
{{- '<|system|>' + (message.content or '') + '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|tool|>' + (message.content or '') + '<|end|>' -}}
{%- else -%}
{{- '<|user|>' + (message.content or '') + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016) that gives back any text it encodes.

    Words end at white space only, so that a name such as `"Movies_3_FindMovies"}` can become one token. With the usual
    split at punctuation it is eight, and a policy this small explores names that do not exist (docs/log.md).

    texts        what the model will read and write
    vocabulary   most tokens it may have, at least 300: 256 bytes and the special tokens come first
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[^\s]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    """A randomly initialized Qwen3 model in float32 whose embedding fits the tokenizer.

    hidden_size   a multiple of 32, the width of one attention head; raises ValueError otherwise
    """
    if hidden_size % _HEAD_DIM:
        raise ValueError(f"hidden_size is {hidden_size}, which is no multiple of {_HEAD_DIM}; set model.hidden_size")
    heads = hidden_size // _HEAD_DIM
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def build_tiny(
    path: str | Path,
    texts: Iterable[str],
    *,
    seed: int = 0,
    hidden_size: int = 192,
    layers: int = 4,
    vocabulary: int = 2048,
) -> Path:
    """Write a random model and the tokenizer trained on `texts` into the folder `path`, and return it."""
    tokenizer = build_tokenizer(texts, vocabulary=vocabulary)
    model = build_model(tokenizer, seed=seed, hidden_size=hidden_size, layers=layers)
    path = Path(path)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
