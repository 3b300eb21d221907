"""Rows of `calls` and their large content: moved to files before a row is written, put back when a call is read."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from noria.contracts.call import Call
from noria.stores.bodies import Bodies, externalize, has_large, restore
from noria.stores.tables import LARGE


def move_out(bodies: Bodies, rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Move strings of more than `limit` bytes to files and leave references to them in the rows, which are changed.

    A row with references says so in its attributes: "large" has the true `input_bytes` and `output_bytes` and the
    `sha256` of each file. Returns the rows of `call_bodies`, their call named by `uid`. Raises OSError.
    """
    references: list[dict[str, Any]] = []
    for row in rows:
        if not (has_large(row["input"], limit) or has_large(row["output"], limit)):
            continue
        kept = _Kept(bodies)
        true_bytes = {f"{name}_bytes": len(row[name].encode()) for name in ("input", "output")}
        for name in ("input", "output"):
            row[name] = externalize(row[name], limit, kept.put)
        attributes = {**json.loads(row["attributes"]), LARGE: {**true_bytes, "sha256": list(kept.sizes)}}
        row["attributes"] = json.dumps(attributes)
        references += [{"uid": row["uid"], "sha256": sha256, "bytes": size} for sha256, size in kept.sizes.items()]
    return references


def require_all(bodies: Bodies, references: Sequence[dict[str, Any]]) -> None:
    """Raise FileNotFoundError if a file of `move_out` is gone; to be asked in the writers' turn, before the commit.

    Retention deletes files that no row refers to while it has that turn, so what is there now stays. The error is an
    OSError: the store is away for a moment, and writing again puts the file back.
    """
    for sha256 in {row["sha256"] for row in references}:
        if not bodies.has(sha256):
            raise FileNotFoundError(f"the content file {bodies.path(sha256)} has just been deleted; write again")


def put_back(bodies: Bodies, call: Call) -> Call:
    """The call with its input and output byte for byte as they were. Raises `IntegrityError` for a missing file."""
    hashes = frozenset(call.attributes[LARGE]["sha256"])
    return replace(call, input=restore(call.input, hashes, bodies.get), output=restore(call.output, hashes, bodies.get))


class _Kept:
    """The files of one row: their sizes by hash."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.sizes: dict[str, int] = {}

    def put(self, data: bytes) -> str:
        sha256 = self._bodies.put(data)
        self.sizes[sha256] = len(data)
        return sha256
