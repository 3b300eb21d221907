"""Versions of the model: found by name, loaded beside running traffic, kept while they are used."""

import asyncio
import inspect
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from noria.contracts.errors import InvalidRecord, NotFound, PolicyUnavailable

log = logging.getLogger(__name__)

Resolve = Callable[[str], Path]
"""From a version's name to the folder of its weights; raises `NotFound`."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Version:
    """One set of weights with its tokenizer, ready to answer.

    `path`: a folder that transformers loads; float32 on a CPU, bfloat16 on a GPU. Raises `PolicyUnavailable` if the
    folder cannot be loaded.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        # Here and not above: the server answers /healthz while transformers is still being imported.
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        verbosity: Any = transformers_logging
        verbosity.disable_progress_bar()  # a server's log is no terminal
        self.path = path
        self.device = torch.device(device)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
            self.model: Any = model.to(self.device).eval()
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:
            log.exception("the weights in %s cannot be loaded", path)
            raise PolicyUnavailable(
                f"the weights in {path} cannot be loaded ({type(error).__name__}: {error}); "
                "remove the folder and materialize its checkpoint again"
            ) from error
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        self._backend: Any = backend
        accepted = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._positioned = "position_ids" in accepted
        # Recurrent layers keep no rows that could be selected, and left padding would run through their state.
        self.batchable = all(hasattr(layer, "batch_select_indices") for layer in self.new_cache().layers)
        self.eos_ids = _eos_ids(self.model, self.tokenizer)
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        self.context = _context(self.model, self.tokenizer)
        """The most tokens that prompt and answer may have together."""
        self._byte_of = _byte_level(backend)
        self._pieces: dict[int, tuple[str, bytes]] = {}

    def new_cache(self) -> Any:
        """An empty KV cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits of the last position, (rows, vocabulary).

        `ids`: (rows, new tokens); `mask`: (rows, tokens so far), 1 for tokens and 0 for left padding, None without
        padding; `positions`: (rows, new tokens); the cache grows in place.
        """
        arguments: dict[str, Any] = {self._cache_argument: cache, **self._extra}
        if self._positioned:
            arguments["position_ids"] = positions
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **arguments).logits
        return logits[:, -1]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation, by the tokenizer's chat template.

        Raises `InvalidRecord` if there is no template or if it refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise InvalidRecord(
                f"the tokenizer in {self.path} has no chat template; add chat_template.jinja to the model's folder"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **(template_arguments or {}),
            )
        except Exception as error:  # a template raises whatever jinja, or the template itself, has to say
            raise InvalidRecord(f"the chat template refuses these messages: {error}") from error
        # The template has written all special tokens already.
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=True)
            return text
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def piece(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and its bytes, special tokens too; the bytes are exact where the text is half a character."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def _read_piece(self, token_id: int) -> tuple[str, bytes]:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return "", b""  # a row of the embedding that the tokenizer does not use
        if match := _BYTE_TOKEN.fullmatch(token):
            raw = bytes([int(match[1], 16)])
            return raw.decode(errors="replace"), raw
        special = token_id in self.tokenizer.all_special_ids or token_id in self.tokenizer.added_tokens_decoder
        if self._byte_of and not special and all(letter in self._byte_of for letter in token):
            raw = bytes(self._byte_of[letter] for letter in token)
            return raw.decode(errors="replace"), raw
        text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        return text, text.encode()


def _warm() -> None:
    """Import what a load needs (seconds), so that the first request does not wait for it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer, wherever the model's folder names it."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


def _context(model: Any, tokenizer: Any) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit or tokenizer.model_max_length)


def _byte_level(backend: Any) -> dict[str, int]:
    """GPT-2's table from letters to bytes, if the tokenizer writes bytes that way; else empty."""
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(eq=False)
class _Slot:
    load: "asyncio.Future[Version]"
    users: int = 0
    names: set[str] = field(default_factory=set)


class Versions:
    """The versions in memory, at most `capacity` unless more are in use; the least recently used one goes first.

    Loading happens in one thread of its own, so answers of other versions go on. Names that resolve to the same folder
    share one model. A folder that is rewritten after it was loaded is not read again: a version's weights never change.
    """

    def __init__(self, resolve: Resolve, capacity: int, device: str = "cpu") -> None:
        self._resolve = resolve
        self._capacity = capacity
        self._device = device
        self._slots: OrderedDict[Path, _Slot] = OrderedDict()
        self._paths: dict[str, Path] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="noria-policy-loader")
        self._loader.submit(_warm)

    @property
    def loaded(self) -> dict[str, Path]:
        """The names under which a version in memory has been asked for, and its folder."""
        return {
            name: path
            for path, slot in self._slots.items()
            if slot.load.done() and not slot.load.cancelled() and slot.load.exception() is None
            for name in sorted(slot.names)
        }

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Version]:
        """Lend a version, loading it first if need be; it stays in memory until given back.

        Raises `NotFound` if nothing of that name exists, `PolicyUnavailable` if it cannot be loaded.
        """
        path = self._paths.get(name)
        if path is None:
            path = await asyncio.to_thread(self._find, name)
        slot = self._slots.get(path)
        if slot is None:
            self._make_room(1)
            loop = asyncio.get_running_loop()
            slot = self._slots[path] = _Slot(loop.run_in_executor(self._loader, self._load, name, path))
        self._slots.move_to_end(path)
        slot.users += 1
        try:
            try:
                # Shielded: a client that goes away must not cancel the load for those who wait with it.
                version = await asyncio.shield(slot.load)
            except Exception:
                if self._slots.get(path) is slot:
                    self._drop(path)  # the next request tries again
                raise
            slot.names.add(name)
            self._paths[name] = path
            yield version
        finally:
            slot.users -= 1
            self._make_room(0)

    def close(self) -> None:
        """End the loader thread after the load it is at."""
        self._loader.shutdown(wait=True, cancel_futures=True)

    def _find(self, name: str) -> Path:
        path = self._resolve(name)
        if not path.is_dir():
            raise NotFound(f"version {name!r} should be in {path}, which is no folder; materialize its checkpoint")
        return path.resolve()

    def _load(self, name: str, path: Path) -> Version:
        begin = time.monotonic()
        version = Version(path, self._device)
        log.info("loaded %s from %s in %.1f s", name, path, time.monotonic() - begin)
        return version

    def _make_room(self, incoming: int) -> None:
        idle = [path for path, slot in self._slots.items() if slot.users == 0]
        for path in idle[: max(0, len(self._slots) + incoming - self._capacity)]:
            self._drop(path)

    def _drop(self, path: Path) -> None:
        for name in self._slots.pop(path).names:
            self._paths.pop(name, None)
