"""Real users' requests and the tools that answer them, from the Berkeley Function Calling Leaderboard (live split).

Read in place from the installed package `bfcl-eval` (Apache-2.0), whose code and dependencies are never imported. Of
its single-call tasks the twelve most frequent right tools are kept. A query is held out for evaluation when the first
byte of the SHA-256 of its normalized text is below 4d (77 of 256: 30 %); all others are traffic. sql/router.sql states
the same rule in SQL.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOOL_COUNT = 12
HELD_OUT_BELOW = "4d"
PACKAGE = "bfcl_eval"
FILES = ("BFCL_v4_live_simple.json", "BFCL_v4_live_multiple.json")

# BFCL writes Python's type names; OpenAI's schemas are JSON Schema.
_JSON_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "str": "string",
    "int": "integer",
}


class DataMissing(RuntimeError):
    """The package that carries the queries is not installed, or not in the form that this example reads."""


@dataclass(frozen=True, slots=True)
class Query:
    """What one user wrote, the tool that is right for it, and {argument: accepted values}, `""` meaning optional."""

    text: str
    tool: str
    arguments_accepted: Mapping[str, tuple[Any, ...]]

    @property
    def held_out(self) -> bool:
        """Whether this query is for evaluation only."""
        return is_held_out(self.text)


def normalized(text: str) -> str:
    """The text by which two queries count as one: lower case, ASCII white space collapsed."""
    return re.sub(r"[ \t\n\f\r]+", " ", text).strip(" ").lower()


def is_held_out(text: str) -> bool:
    """Whether a text belongs to the fixed 30 % that is never trained on."""
    return hashlib.sha256(normalized(text).encode()).hexdigest()[:2] < HELD_OUT_BELOW


def traffic() -> tuple[Query, ...]:
    """The queries that the users of the example send."""
    return tuple(query for query in queries() if not query.held_out)


def held_out() -> tuple[Query, ...]:
    """The queries that are kept for evaluation."""
    return tuple(query for query in queries() if query.held_out)


@lru_cache(maxsize=1)
def queries() -> tuple[Query, ...]:
    """All distinct queries whose right tool is one of `tool_names()`, in the package's order.

    A query for which two of the tools are right is left out: the business system could not say which it wanted.
    """
    names = set(tool_names())
    found: dict[str, list[Query]] = {}
    for task in _tasks():
        if task.tool in names:
            found.setdefault(normalized(task.text), []).append(Query(task.text, task.tool, task.arguments))
    return tuple(same[0] for same in found.values() if len({query.tool for query in same}) == 1)


@lru_cache(maxsize=1)
def tool_names() -> tuple[str, ...]:
    """The twelve tools that are right most often, the most frequent first; equal counts in the order of their names."""
    counts = Counter(task.tool for task in _tasks())
    return tuple(sorted(counts, key=lambda name: (-counts[name], name))[:TOOL_COUNT])


def tools() -> list[dict[str, Any]]:
    """The twelve tools as OpenAI tool schemas.

    BFCL words a tool's description anew in each task; the most frequent wording is taken. OpenAI allows no dot in a
    name, so `cmd_controller.execute` is `cmd_controller_execute` here.
    """
    wordings: dict[str, Counter[str]] = {name: Counter() for name in tool_names()}
    for task in _tasks():
        for function in task.functions:
            if function["name"] in wordings:
                wordings[function["name"]][json.dumps(function, sort_keys=True)] += 1
    schemas = []
    for counts in wordings.values():
        function = json.loads(min(counts, key=lambda wording: (-counts[wording], wording)))
        function["name"] = function["name"].replace(".", "_")
        function["parameters"] = _json_schema(function["parameters"])
        schemas.append({"type": "function", "function": function})
    return schemas


@dataclass(frozen=True, slots=True)
class _Task:
    text: str
    tool: str
    arguments: Mapping[str, tuple[Any, ...]]
    functions: list[dict[str, Any]]


@lru_cache(maxsize=1)
def _tasks() -> tuple[_Task, ...]:
    return tuple(_read_tasks(data_folder()))


def data_folder() -> Path:
    """Where the installed package keeps its data. Raises `DataMissing` with the command that installs it."""
    spec = find_spec(PACKAGE)  # of a top-level package: found without running any of its code
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "data"
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise DataMissing(f"the installed bfcl-eval has no {missing[0]}; run: pip install --no-deps bfcl-eval")
        return folder
    raise DataMissing("the example's queries are in the package bfcl-eval; run: pip install --no-deps bfcl-eval")


def _read_tasks(folder: Path) -> Iterator[_Task]:
    for name in FILES:
        answers = {row["id"]: row["ground_truth"] for row in _rows(folder / "possible_answer" / name)}
        for row in _rows(folder / name):
            (call,) = answers[row["id"]]  # both files hold tasks with exactly one right call
            ((tool, arguments),) = call.items()
            accepted = {argument: tuple(values) for argument, values in arguments.items()}
            # Some tasks open with a system message; what the user wrote is the last user message.
            text = [message["content"] for message in row["question"][0] if message["role"] == "user"][-1]
            yield _Task(text.strip(), tool, accepted, row["function"])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _json_schema(part: Any) -> Any:
    if isinstance(part, list):
        return [_json_schema(item) for item in part]
    if not isinstance(part, dict):
        return part
    schema = {key: _json_schema(value) for key, value in part.items()}
    kind = schema.get("type")  # a parameter may itself be called "type": then this is a schema, not a name
    if isinstance(kind, str):
        if kind == "any":  # JSON Schema says "any" by saying nothing
            del schema["type"]
        else:
            schema["type"] = _JSON_TYPES.get(kind, kind)
    return schema
