"""`Call` as a JSON object: a line of the proxy's spool, an item of its HTTP answers.

One key a field, under the field's name. Times are ISO 8601 in UTC with microseconds, enums their values, `tokens` an
object or null. `call_from_json(call_to_json(call)) == call` for every call, through any JSON encoder.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from typing import Any

from noria.contracts.call import Arm, Call, CallStatus, CallTokens
from noria.contracts.errors import InvalidRecord


def call_to_json(call: Call) -> dict[str, Any]:
    """The call as a dict that any JSON encoder takes. Raises `InvalidRecord` for a time without a timezone."""
    return {
        "id": call.id,
        "uid": call.uid,
        "tenant": call.tenant,
        "app": call.app,
        "process_node": call.process_node,
        "trace_id": call.trace_id,
        "model_name": call.model_name,
        "policy_version": call.policy_version,
        "arm": call.arm.value,
        "input": call.input,
        "output": call.output,
        "status": call.status.value,
        "error_type": call.error_type,
        "finish_reasons": list(call.finish_reasons),
        "usage": None if call.usage is None else dict(call.usage),
        "agent_version": call.agent_version,
        "subject": call.subject,
        "consent": call.consent,
        "reward_score": call.reward_score,
        "attributes": dict(call.attributes),
        "request_time": _write_time(call.request_time, "request_time"),
        "response_time": _write_time(call.response_time, "response_time"),
        "duration_ms": call.duration_ms,
        "tokens": None if call.tokens is None else _write_tokens(call.tokens),
    }


def call_from_json(record: Mapping[str, Any]) -> Call:
    """Read what `call_to_json` wrote. Raises `InvalidRecord` that names the first field that breaks the contract."""
    if not isinstance(record, Mapping):
        raise InvalidRecord(f"a call is a JSON object, not {_short(record)}")
    where = f"call {record.get('uid', '(no uid)')}"
    unknown = sorted(record.keys() - _READERS.keys())
    if unknown:
        raise InvalidRecord(f"{where}: unknown field {unknown[0]!r}; the fields are those of noria.contracts.call.Call")
    missing = sorted(_REQUIRED - record.keys())
    if missing:
        raise InvalidRecord(f"{where}: field {missing[0]!r} is missing")
    values: dict[str, Any] = {}
    for name, value in record.items():
        try:
            values[name] = _READERS[name](value)
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidRecord(f"{where}: {name} is {_short(value)}: {error}") from error
    return Call(**values)


def _write_time(time: datetime, name: str) -> str:
    if time.tzinfo is None:
        raise InvalidRecord(f"{name} {time.isoformat()} has no timezone; times are aware and in UTC")
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def _write_tokens(tokens: CallTokens) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(tokens.prompt_token_ids),
        "completion_token_ids": list(tokens.completion_token_ids),
        "logprobs": list(tokens.logprobs),
    }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # a JSON true is an int to isinstance
            raise TypeError(f"it must be {kind.__name__}, not {type(value).__name__}")
        return value

    return read


def _nullable(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read_list(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"it must be a list, not {type(value).__name__}")
        return tuple(map(read, value))

    return read_list


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"it must be a number, not {type(value).__name__}")
    return float(value)


def _time(value: Any) -> datetime:
    time = datetime.fromisoformat(_text(value))
    if time.tzinfo is None:
        raise ValueError("it must carry a timezone")
    return time.astimezone(UTC)


def _tokens(value: Any) -> CallTokens:
    record = _object(value)
    names = {"prompt_token_ids", "completion_token_ids", "logprobs"}
    if record.keys() != names:
        raise ValueError(f"its keys must be {', '.join(sorted(names))}")
    tokens = CallTokens(
        prompt_token_ids=_list_of(_int)(record["prompt_token_ids"]),
        completion_token_ids=_list_of(_int)(record["completion_token_ids"]),
        logprobs=_list_of(_number)(record["logprobs"]),
    )
    if len(tokens.completion_token_ids) != len(tokens.logprobs):
        raise ValueError(
            f"{len(tokens.completion_token_ids)} completion_token_ids have {len(tokens.logprobs)} logprobs; "
            "each token has one"
        )
    return tokens


_text = _exactly(str)
_int = _exactly(int)
_object = _exactly(dict)

_READERS: Mapping[str, Callable[[Any], Any]] = {
    "id": _nullable(_int),
    "uid": _text,
    "tenant": _text,
    "app": _text,
    "process_node": _text,
    "trace_id": _text,
    "model_name": _text,
    "policy_version": _nullable(_text),
    "arm": Arm,
    "input": _text,
    "output": _text,
    "status": CallStatus,
    "error_type": _nullable(_text),
    "finish_reasons": _list_of(_text),
    "usage": _nullable(_object),
    "agent_version": _nullable(_text),
    "subject": _nullable(_text),
    "consent": _exactly(bool),
    "reward_score": _nullable(_number),
    "attributes": _object,
    "request_time": _time,
    "response_time": _time,
    "duration_ms": _number,
    "tokens": _nullable(_tokens),
}
_REQUIRED = {f.name for f in fields(Call) if f.default is MISSING and f.default_factory is MISSING}
