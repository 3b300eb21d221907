"""The OpenAI chat completions wire format, with vLLM's fields for token ids: what is read and what is written.

https://platform.openai.com/docs/api-reference/chat and https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from noria.contracts.errors import InvalidRecord, NotFound
from noria.services.policy.row import Progress
from noria.services.policy.sampling import Settings

Stop = Annotated[str, StringConstraints(min_length=1)]
JsonObject = dict[str, Any]


class RequestRefused(InvalidRecord):
    """A request that breaks the wire format; `param` names the field and `code` is OpenAI's, if it has one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Message(BaseModel):
    """One message of a conversation; whatever else it carries goes to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[JsonObject] | None = None
    tool_calls: list[JsonObject] | None = None


class StreamOptions(BaseModel):
    """`stream_options` of a streamed request."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of `POST /v1/chat/completions`. Fields that are not listed are ignored, and null means absent."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | list[Stop] = Field(default_factory=list[Stop], max_length=64)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    return_token_ids: bool = False
    deterministic: bool = False
    tools: list[JsonObject] = Field(default_factory=list[JsonObject])
    chat_template_kwargs: JsonObject = Field(default_factory=dict[str, Any])

    def settings(self, member: int, max_tokens: int, *, deterministic: bool) -> Settings:
        """How the `member`-th of the `n` answers is sampled: each with its own seed, `seed + member`.

        `max_tokens` is the most that server and context allow. A deterministic answer without a seed takes seed 0.
        """
        deterministic = deterministic or self.deterministic
        seed = 0 if deterministic and self.seed is None else self.seed
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return Settings(
            max_tokens=max_tokens if asked is None else min(asked, max_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=None if seed is None else seed + member,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            top_logprobs=self.top_logprobs if self.logprobs else 0,
            deterministic=deterministic,
        )

    def conversation(self) -> list[JsonObject]:
        """The messages as chat templates expect them: text content as one string, tool arguments as objects."""
        return [_template_message(i, message) for i, message in enumerate(self.messages)]


def read_object(body: bytes) -> JsonObject:
    """The JSON object of a request's body. Raises `RequestRefused`."""
    try:
        value = json.loads(body)
    except ValueError as error:  # UnicodeDecodeError too
        raise RequestRefused(f"the body is not valid JSON ({error}); send one JSON object") from error
    if not isinstance(value, dict):
        raise RequestRefused(f"the body is a JSON {type(value).__name__}; send one JSON object")
    return value


def read_chat(body: bytes) -> ChatRequest:
    """Read and check a chat request. Raises `RequestRefused` for the first thing that is wrong."""
    value = read_object(body)
    try:
        request = ChatRequest.model_validate({key: item for key, item in value.items() if item is not None})
    except ValidationError as error:
        raise _refusal(error) from error
    if request.top_logprobs and not request.logprobs:
        raise RequestRefused(
            f"top_logprobs is {request.top_logprobs} but logprobs is not set; send logprobs: true", "top_logprobs"
        )
    return request


def _refusal(error: ValidationError) -> RequestRefused:
    first = error.errors()[0]
    field = str(first["loc"][0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        mends = {
            "messages": 'send a list such as [{"role": "user", "content": "…"}]',
            "model": "send the name of a version, as GET /v1/models lists them",
        }
        return RequestRefused(f"{where} is missing; {mends.get(field, 'send it')}", field)
    value = json.dumps(first["input"], ensure_ascii=False, default=str)
    shown = value if len(value) <= 80 else value[:77] + "…"
    rule = first["msg"][0].lower() + first["msg"][1:]
    return RequestRefused(f"{where} is {shown}, but {rule}; change it or leave it out", field)


def _template_message(position: int, message: Message) -> JsonObject:
    out = message.model_dump(exclude_none=True)
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestRefused(
                    f"messages.{position}.content has a part of type {part.get('type')!r}, but this model reads text "
                    'only; send parts {"type": "text", "text": "…"}',
                    "messages",
                )
        content = "".join(part["text"] for part in content)
    out["content"] = content or ""
    for call in out.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # On the wire arguments are JSON text; templates render objects, and would quote a string a second time.
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                continue  # a model wrote it, so it may be any text: the template sees it as it is
    return out


class Pieces(Protocol):
    """What knows the text and bytes of single tokens (`versions.Version`)."""

    def piece(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and its exact bytes."""
        ...


def logprobs_content(pieces: Pieces, progress: Progress) -> JsonObject:
    """`choices[i].logprobs`: one entry for each sampled token."""

    def entry(token_id: int, logprob: float) -> JsonObject:
        text, raw = pieces.piece(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    rows = zip(progress.token_ids, progress.logprobs, progress.top_logprobs, strict=True)
    content = [entry(i, logprob) | {"top_logprobs": [entry(*pair) for pair in top]} for i, logprob, top in rows]
    return {"content": content, "refusal": None}


def usage(prompt: int, completion: int) -> JsonObject:
    """Token counts; the completion's include its end-of-sequence token."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Answer:
    """Writes the objects of one answer, streamed or whole."""

    def __init__(
        self, request: ChatRequest, pieces: Pieces, prompt_ids: Sequence[int], answer_id: str, created: int
    ) -> None:
        self._request = request
        self._pieces = pieces
        self._prompt_ids = list(prompt_ids)
        self._head = {"id": answer_id, "created": created, "model": request.model}

    def whole(self, answers: Sequence[Progress]) -> JsonObject:
        """The `chat.completion` object."""
        completion = sum(len(answer.token_ids) for answer in answers)
        body: JsonObject = {**self._head, "object": "chat.completion"}
        body["choices"] = [
            self._choice(i, {"message": {"role": "assistant", "content": answer.text}}, answer)
            for i, answer in enumerate(answers)
        ]
        body["usage"] = usage(len(self._prompt_ids), completion)
        return body | self._prompt()

    def opening(self) -> list[JsonObject]:
        """The first chunk of each choice: its role, and once the prompt ids if they were asked for."""
        delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks = [self._chunk([{"index": i, **delta, "logprobs": None}]) for i in range(self._request.n)]
        chunks[0] |= self._prompt()
        return chunks

    def delta(self, index: int, progress: Progress) -> JsonObject | None:
        """The chunk of what a choice has gained; None if the caller would see nothing new in it."""
        shown = progress.text or progress.finish_reason or self._request.logprobs or self._request.return_token_ids
        if not shown:
            return None
        delta = {"content": progress.text} if progress.text or progress.finish_reason is None else {}
        return self._chunk([self._choice(index, {"delta": delta}, progress)])

    def closing(self, completion: int) -> JsonObject:
        """The chunk of `stream_options.include_usage`."""
        return self._chunk([]) | {"usage": usage(len(self._prompt_ids), completion)}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return chunk | {"usage": None} if self._request.stream_options.include_usage else chunk

    def _choice(self, index: int, said: JsonObject, progress: Progress) -> JsonObject:
        choice: JsonObject = {"index": index, **said, "finish_reason": progress.finish_reason}
        choice["logprobs"] = logprobs_content(self._pieces, progress) if self._request.logprobs else None
        if self._request.return_token_ids:
            choice["token_ids"] = progress.token_ids
        return choice

    def _prompt(self) -> JsonObject:
        return {"prompt_token_ids": self._prompt_ids} if self._request.return_token_ids else {}


def error_body(error: Exception, status: int) -> JsonObject:
    """OpenAI's error object."""
    kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "invalid_request_error"}
    code = (
        error.code if isinstance(error, RequestRefused) else "model_not_found" if isinstance(error, NotFound) else None
    )
    param = error.param if isinstance(error, RequestRefused) else "model" if isinstance(error, NotFound) else None
    return {
        "error": {"message": str(error), "type": kinds.get(status, "server_error"), "param": param, "code": code},
    }
