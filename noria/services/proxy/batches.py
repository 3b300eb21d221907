"""From frames of the spool to rows of the store: assemble, write one transaction, put aside what cannot be stored."""

import base64
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from noria.contracts.call import Call, Score
from noria.contracts.call_json import call_to_json
from noria.services.proxy.exchange import Exchange
from noria.services.proxy.otlp_doubles import without_doubles
from noria.services.proxy.records import decode
from noria.services.proxy.segments import Frame, Spoilt, read_batch
from noria.services.proxy.wire.to_call import to_call
from noria.stores.online import OnlineStore
from noria.stores.online_errors import is_away

REJECTED = "rejected.jsonl"
"""Beside the segments: the records that could not be stored, each with the reason."""

_log = logging.getLogger("noria.services.proxy")


class StoreAway(Exception):
    """The store does not take records now; they stay in the spool."""


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one batch: its bytes and records, how many of them were put aside, and the calls by status."""

    size: int
    records: int
    rejected: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict[str, int])
    spans_dropped: int = 0
    """Spans that were not sent, since the writer began."""


class Spans(Protocol):
    """Where recorded calls are told as spans."""

    dropped: int

    def export(self, calls: Sequence[Call]) -> None:
        """Take over calls that are in the store."""


class Batches:
    """Brings batches of frames into one store. Not for several threads at once."""

    def __init__(self, store: OnlineStore, folder: Path, spans: Spans | None = None) -> None:
        self._store = store
        self._folder = folder
        self._spans = spans
        self._ready = False

    def write(self, path: Path, start: int, end: int) -> Written:
        """Store the next frames of a segment, at most up to byte `end`.

        Raises `StoreAway`; anything that is wrong with single records is put aside and holds up nobody.
        """
        try:
            self._check_schema()
            fd = os.open(path, os.O_RDONLY)
            try:
                batch = read_batch(fd, start, end)
            finally:
                os.close(fd)
            try:
                return self._store_frames(batch.frames, batch.size)
            except Exception as error:
                if is_away(error):
                    raise
                _log.exception("a batch cannot be stored as a whole, its records are tried one by one")
                return self._store_singly(batch.frames, batch.size)
        except Exception as error:
            if is_away(error) or isinstance(error, OSError):
                self._ready = False
                raise StoreAway(f"{type(error).__name__}: {error}") from error
            raise

    def _store_singly(self, frames: Sequence[Frame | Spoilt], size: int) -> Written:
        """The last resort: whatever a record does to its batch, it does to itself alone."""
        rejected = 0
        statuses: Counter[str] = Counter()
        for frame in frames:
            try:
                written = self._store_frames([frame], 0)
            except Exception as error:
                if is_away(error):
                    raise
                data = frame.data if isinstance(frame, Spoilt) else b"".join(frame)
                self._put_aside([(_bytes(data), f"{type(error).__name__}: {error}")])
                rejected += 1
            else:
                rejected += written.rejected
                statuses.update(written.statuses)
        return Written(size, len(frames), rejected, dict(statuses))

    def _check_schema(self) -> None:
        if self._ready:
            return
        problem = self._store.schema_problem()
        if problem is not None:
            raise StoreAway(problem)
        self._ready = True

    def _store_frames(self, frames: Sequence[Frame | Spoilt], size: int) -> Written:
        calls: list[Call] = []
        scores: list[Score] = []
        rejected: list[tuple[Any, str]] = []
        for frame in frames:
            if isinstance(frame, Spoilt):
                rejected.append((_bytes(frame.data), frame.reason))
                continue
            try:
                record = decode(frame)
            except (ValueError, KeyError, TypeError) as error:
                rejected.append((_bytes(b"".join(frame)), f"{type(error).__name__}: {error}"))
                continue
            if isinstance(record, Score):
                scores.append(record)
            else:
                calls.append(to_call(record) if isinstance(record, Exchange) else record)
        # Not whole: a content file that is missing must not hold up what has nothing to do with it.
        calls = without_doubles(calls, lambda trace_id, tenant: self._store.trace(trace_id, tenant=tenant, whole=False))
        stored, refused = self._store_calls(calls)
        rejected += refused
        rejected += self._store_scores(scores)
        if rejected:
            self._put_aside(rejected)
        if self._spans is not None:
            self._spans.export(stored)
        statuses = dict(Counter(call.status.value for call in stored))
        dropped = self._spans.dropped if self._spans is not None else 0
        return Written(size, len(frames), len(rejected), statuses, dropped)

    def _store_calls(self, calls: list[Call]) -> tuple[list[Call], list[tuple[Any, str]]]:
        if not calls:
            return [], []
        try:
            self._store.add_calls(calls)
            return calls, []
        except Exception as error:
            if is_away(error):
                raise
        stored: list[Call] = []
        rejected: list[tuple[Any, str]] = []
        for call in calls:  # one of them cannot be stored: find out which
            try:
                self._store.add_calls([call])
                stored.append(call)
            except Exception as error:
                if is_away(error):
                    raise
                rejected.append(({"call": call_to_json(call)}, f"{type(error).__name__}: {error}"))
        return stored, rejected

    def _store_scores(self, scores: list[Score]) -> list[tuple[Any, str]]:
        if not scores:
            return []
        try:
            self._store.add_scores(scores)
            return []
        except Exception as error:
            if is_away(error):
                raise
        rejected: list[tuple[Any, str]] = []
        for score in scores:
            try:
                self._store.add_scores([score])
            except Exception as error:
                if is_away(error):
                    raise
                rejected.append(({"score": repr(score)}, f"{type(error).__name__}: {error}"))
        return rejected

    def _put_aside(self, rejected: Sequence[tuple[Any, str]]) -> None:
        with open(self._folder / REJECTED, "a") as file:
            for record, reason in rejected:
                _log.error("a record was put aside in %s: %s", REJECTED, reason[:500])
                file.write(json.dumps({"reason": reason, "record": record}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _bytes(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}
