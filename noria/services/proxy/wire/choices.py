"""What chat and text completions share: a response with choices, each of which grows chunk by chunk."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from noria.services.proxy.wire.api import Answer, error_type_of
from noria.services.proxy.wire.merge import Merger

ERROR_IN_STREAM = "error_in_stream"


class ChoicesAssembler(ABC):
    """Folds chunks into one response; a subclass says how a choice grows and what it looks like in the end."""

    object_name = ""

    def __init__(self, request: Mapping[str, Any]) -> None:
        wanted = request.get("n")
        self._wanted = wanted if isinstance(wanted, int) else 1
        self._top: Answer = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._error: str | None = None
        self._merger = Merger()

    @property
    def error(self) -> str | None:
        """The type of the error that the upstream reported in mid-stream."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether every choice that was asked for has said why it ended."""
        return len(self._choices) >= self._wanted and all(
            choice.get("finish_reason") for choice in self._choices.values()
        )

    @property
    def over(self) -> bool:
        """No chunk says so; `[DONE]` does."""
        return False

    def add(self, name: str, chunk: dict[str, Any]) -> None:
        """Take one parsed chunk in."""
        if (
            name == "error" or chunk.get("object") == "error"
        ):  # as some servers say it, vLLM's older versions among them
            self._error = error_type_of(chunk.get("error") or chunk, ERROR_IN_STREAM)
            self._top.setdefault("error", chunk.get("error") or chunk)
            return
        for key, value in chunk.items():
            if key == "choices":
                for part in value or ():
                    index = part.get("index")
                    self._grow(self._choices.setdefault(index if isinstance(index, int) else 0, {}), part)
            elif value is not None or key not in self._top:
                self._top[key] = value
                if key == "error" and value is not None:
                    self._error = error_type_of(value, ERROR_IN_STREAM)

    def answer(self) -> Answer:
        """The response so far."""
        self._merger.settle()
        choices = [{"index": index, **self._whole(choice)} for index, choice in sorted(self._choices.items())]
        return {**self._top, "object": self.object_name, "choices": choices}

    @abstractmethod
    def _grow(self, choice: dict[str, Any], part: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]: ...

    def _grow_beside(self, choice: dict[str, Any], key: str, value: Any) -> None:
        """Take a field beside the text in: logprobs and token ids grow, all others are said once."""
        if key in ("logprobs", "token_ids"):
            self._merger.grow(choice, {key: value})
        elif value is not None or key not in choice:
            choice[key] = value


def fault(answer: Mapping[str, Any]) -> str | None:
    """`no_choices` where a response has none; some upstreams report errors with status 200."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and all(isinstance(choice, dict) for choice in choices):
        return None
    return error_type_of(answer.get("error"), "no_choices")


def finish_reasons(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Why each choice ended, in the order of the choices."""
    return tuple(str(choice["finish_reason"]) for choice in _choices(answer) if choice.get("finish_reason"))


def usage(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """At the top as the API has it; in the first choice (Moonshot) or under `x_groq` as others stream it."""
    places = [answer, *_choices(answer), answer.get("x_groq")]
    for place in places:
        found = place.get("usage") if isinstance(place, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return None


def _choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
