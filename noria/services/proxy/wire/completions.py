"""`POST /v1/completions`, the legacy text completions of OpenAI, which vLLM serves too."""

from collections.abc import Iterator, Mapping
from typing import Any

from noria.services.proxy.wire import choices
from noria.services.proxy.wire.api import Answer, Api, event
from noria.services.proxy.wire.chat import wants_usage
from noria.services.proxy.wire.choices import ChoicesAssembler
from noria.services.proxy.wire.sse import DONE


class CompletionAssembler(ChoicesAssembler):
    """Folds chunks into the `text_completion` object that an unstreamed call would have returned."""

    object_name = "text_completion"

    def _grow(self, choice: dict[str, Any], part: Mapping[str, Any]) -> None:
        for key, value in part.items():
            if key == "text" and isinstance(value, str):
                self._merger.grow(choice, {key: value})
            elif key != "index":
                self._grow_beside(choice, key, value)

    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {"text": "", **choice, "finish_reason": choice.get("finish_reason")}


def unfold(answer: Answer, request: Mapping[str, Any]) -> Iterator[bytes]:
    """The events, `[DONE]` included, that stream a recorded response: each text, why it ended, usage."""
    shared = {key: value for key, value in answer.items() if key not in ("choices", "usage")}
    with_usage = wants_usage(request) and answer.get("usage") is not None
    open_usage = {"usage": None} if with_usage else {}
    for choice in answer.get("choices") or ():
        index = choice.get("index", 0)
        said = {**choice, "finish_reason": None}
        yield event({**shared, "choices": [said], **open_usage})
        ending = {"index": index, "text": "", "finish_reason": choice.get("finish_reason")}
        if "logprobs" in choice:
            ending["logprobs"] = None
        yield event({**shared, "choices": [ending], **open_usage})
    if with_usage:
        yield event({**shared, "choices": [], "usage": answer["usage"]})
    yield b"data: " + DONE + b"\n\n"


API = Api(CompletionAssembler, unfold, choices.fault, choices.finish_reasons, choices.usage)
