"""Held-out suites, frozen: the items on which versions are compared, in a file that is named by their hash."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from noria.contracts.errors import ConfigError, IntegrityError, NotFound
from noria.stores.artifacts import Artifacts

_SCHEMA = pa.schema(
    [
        pa.field("item", pa.string(), nullable=False),
        pa.field("input", pa.string(), nullable=False),
        pa.field("reference", pa.string(), nullable=False),
    ]
)
_NAME_DIGITS = 16


@dataclass(frozen=True, slots=True)
class SuiteItem:
    """One request that is put to each version, and what a reward is told about the right answer.

    `input` is the JSON text of a request body with `messages`; `reference` has the shape that rewards know from
    feedback: {score name: {"value": …, "explanation": …}}.
    """

    item: str
    input: str
    reference: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Suite:
    """A frozen suite: its path relative to the artifact root, the hash of its content, and its items by name."""

    path: str
    sha256: str
    items: tuple[SuiteItem, ...]


def freeze(items: Iterable[Mapping[str, Any]], artifacts: Artifacts, target: str) -> Suite:
    """Write the suite once, as `suites/{target}/{hash}.parquet`; freezing the same items again changes nothing.

    Each item is a mapping with `item` (its name), `input` (a request body, as JSON text or mapping) and `reference` (as
    JSON text or mapping). The hash is over the content, not the file, so that another version of the Parquet writer
    gives the same name. Raises `ConfigError` for no items, a name that stands twice, or an item of another shape, and
    `IntegrityError` if a file of that name holds something else.
    """
    rows = sorted((_row(item, index) for index, item in enumerate(items)), key=lambda row: row["item"])
    if not rows:
        raise ConfigError(f"the suite of {target} has no items; see the function that its key suite names")
    for row, following in itertools.pairwise(rows):
        if row["item"] == following["item"]:
            raise ConfigError(f"the suite of {target} has item {row['item']!r} twice; each name must be unique")
    sha256 = _hash(rows)
    path = f"suites/{target}/{sha256[:_NAME_DIGITS]}.parquet"
    if artifacts.exists(path):
        return load_suite(artifacts, path)
    artifacts.write_parquet(path, pa.Table.from_pylist(rows, schema=_SCHEMA), {"sha256": sha256, "target": target})
    return Suite(path, sha256, _items(rows))


def load_suite(artifacts: Artifacts, path: str) -> Suite:
    """Read a frozen suite. Raises `NotFound`, or `IntegrityError` if its content does not have the hash in its name."""
    if not artifacts.exists(path):
        raise NotFound(f"no suite at {path} below the artifact root; materialize the station that freezes it")
    wanted = path.rpartition("/")[2].removesuffix(".parquet")
    mend = "remove the file and freeze the suite again"
    try:
        rows = artifacts.read_parquet(path).select(_SCHEMA.names).to_pylist()
        items = _items(rows)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise IntegrityError(f"suite {path} cannot be read: {error}; {mend}") from error
    sha256 = _hash(rows)
    if sha256[:_NAME_DIGITS] != wanted:
        raise IntegrityError(f"suite {path} holds content with hash {sha256[:_NAME_DIGITS]}; {mend}")
    return Suite(path, sha256, items)


def _row(item: Mapping[str, Any], index: int) -> dict[str, str]:
    where = f"suite item {index}"
    missing = [key for key in _SCHEMA.names if key not in item]
    if missing:
        raise ConfigError(f"{where} lacks {missing[0]!r}: it needs item, input and reference, and has {sorted(item)}")
    name = item["item"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} has the name {name!r}; it must be a string that is not empty")
    body = _json_object(item["input"], f"input of {where} ({name!r})")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"input of {where} ({name!r}) has no messages; it must be a chat completions request body")
    return {
        "item": name,
        "input": _canonical(body),
        "reference": _canonical(_json_object(item["reference"], f"reference of {where} ({name!r})")),
    }


def _json_object(value: object, what: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{what} is not JSON: {error}: {str(value)[:80]!r}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {type(value).__name__}; it must be a JSON object")
    return value


def _canonical(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a suite holds JSON only: {error}: {str(value)[:80]}") from error


def _hash(rows: Sequence[Mapping[str, str]]) -> str:
    text = "\n".join(_canonical([row["item"], row["input"], row["reference"]]) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def _items(rows: Sequence[Mapping[str, str]]) -> tuple[SuiteItem, ...]:
    return tuple(SuiteItem(row["item"], row["input"], json.loads(row["reference"])) for row in rows)
