"""The interface of a reward: a plain function from an attempt to a number, or to named parts of one."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from noria.contracts.errors import ConfigError
from noria.loading import LoadedFunction, load_function

TOTAL = "reward"
"""The key under which a reward function may state its total; without it the total is the sum of the parts."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a reward function is shown: one answer of the policy, and what is known about it.

    node       the node of the agent that asked
    input      JSON text of the request body, which has `messages`, or of the list of messages itself
    output     the assistant's content, or the JSON text of its tool calls
    response   what the agent answered in the end; None on a suite, where no agent runs
    reference  what was said about the origin: {score name: {"value": float, "explanation": parsed JSON or text}}
    """

    node: str
    input: str
    output: str
    response: str | None = None
    reference: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the request; empty if `input` holds none."""
        try:
            body = json.loads(self.input)
        except ValueError:
            return []
        messages = body.get("messages") if isinstance(body, dict) else body
        return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []

    @property
    def last_user_text(self) -> str:
        """Content of the last message of role `user`; the empty string if there is none."""
        for message in reversed(self.messages):
            if message.get("role") == "user":
                content = message.get("content")
                return content if isinstance(content, str) else json.dumps(content)
        return ""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The total that the trainer sees, and the parts that explain it; every number is finite."""

    total: float
    components: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function that noria.toml names, checked on every call.

    `name` is its spec `path.py:function`; `version` the first 12 hex digits of the SHA-256 of its file.
    """

    name: str
    version: str
    function: LoadedFunction

    def __call__(self, attempt: Attempt) -> Rewarded:
        """Judge one attempt. Raises `ConfigError` if the function raises, or returns no finite number."""
        try:
            returned = self.function(attempt)
        except Exception as error:
            raise ConfigError(
                f"reward {self.name} raised {type(error).__name__}: {error} on an attempt of node {attempt.node!r} "
                f"with output {attempt.output[:80]!r}; a reward function must judge any output"
            ) from error
        if not isinstance(returned, Mapping):
            total = self._number(TOTAL, returned)
            return Rewarded(total, {TOTAL: total})
        if not returned:
            self._refuse("an empty mapping")
        parts = {str(key): self._number(str(key), value) for key, value in returned.items()}
        total = parts.get(TOTAL, math.fsum(parts.values()))
        return Rewarded(total, {key: value for key, value in parts.items() if key != TOTAL} or {TOTAL: total})

    def _number(self, key: str, value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type]  # numpy scalars and 0-d tensors are numbers too
        except (TypeError, ValueError):
            self._refuse(f"{value!r} for {key!r}")
        if isinstance(value, str) or not math.isfinite(number):
            self._refuse(f"{value!r} for {key!r}")
        return number

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"reward {self.name} returned {what}; it must return a finite number, or a mapping of names to such"
        )


def load_reward(spec: str, root: Path) -> Reward:
    """The reward function `"path.py:function"`, its path taken from `root`. Raises `ConfigError` if it is not there."""
    loaded = load_function(spec, root)
    return Reward(spec, loaded.version, loaded)
