"""What the spool keeps, as frames: exchanges as they crossed the wire, calls that are known whole, and scores."""

import json
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

import orjson

from noria.contracts.call import Arm, Call, Score, ScoreSource
from noria.contracts.call_json import call_from_json, call_to_json
from noria.contracts.errors import InvalidRecord
from noria.services.proxy.exchange import Ending, Exchange, Kind, Wants
from noria.services.proxy.segments import Frame

Record = Exchange | Call | Score

_BODIES = frozenset({"request", "response"})
_NAMES = tuple(field.name for field in fields(Exchange) if field.name not in _BODIES)


def encode(record: Record) -> Frame:
    """One record as a frame. Raises `TypeError` for attributes that JSON cannot say."""
    if isinstance(record, Exchange):
        facts: dict[str, Any] = {name: getattr(record, name) for name in _NAMES}
        return Frame(_dumps({"exchange": facts}), record.request, record.response)
    if isinstance(record, Call):
        return Frame(_dumps({"call": call_to_json(record)}))
    return Frame(_dumps({"score": {**asdict(record), "at": record.at.isoformat()}}))


def decode(frame: Frame) -> Record:
    """Read what `encode` wrote. Raises `ValueError`, `KeyError` or `TypeError`, `InvalidRecord` among them."""
    try:
        entry = orjson.loads(frame.text)
    except ValueError:
        entry = json.loads(frame.text)
    if "exchange" in entry:
        return _exchange(entry["exchange"], frame)
    if "call" in entry:
        return call_from_json(entry["call"])
    if "score" not in entry:
        raise InvalidRecord(f"a frame of the spool holds an exchange, a call or a score, not {sorted(entry)}")
    score = entry["score"]
    return Score(**{**score, "source": ScoreSource(score["source"]), "at": datetime.fromisoformat(score["at"])})


def _exchange(facts: dict[str, Any], frame: Frame) -> Exchange:
    facts["kind"] = Kind(facts["kind"])
    facts["ending"] = Ending(facts["ending"])
    facts["arm"] = Arm(facts["arm"])
    for name in ("request_time", "response_time"):
        facts[name] = datetime.fromisoformat(facts[name])
    if facts["wants"] is not None:
        facts["wants"] = Wants(**facts["wants"])
    return Exchange(**facts, request=frame.request, response=frame.response)


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # Half a surrogate pair, or an integer beyond 64 bits, which orjson does not write and JSON can say.
        return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Wants):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
