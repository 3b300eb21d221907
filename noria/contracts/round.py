"""Targets and rounds: the names by which the wheel is addressed."""

import re
from dataclasses import dataclass

from noria.contracts.errors import InvalidRecord

_NAME = re.compile(r"^[A-Za-z0-9_-]+$")
_ROUND = re.compile(r"^(?P<target>[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)\.r(?P<number>\d{5})$")


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """The thing being trained: one node of one app, written `"{app}.{node}"`."""

    app: str
    node: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read `"{app}.{node}"`; both parts are letters, digits, `_` and `-`. Raises `InvalidRecord`."""
        app, dot, node = text.partition(".")
        if not dot or not _NAME.match(app) or not _NAME.match(node):
            raise InvalidRecord(f"target {text!r} is not of the form 'app.node' (letters, digits, '_' and '-')")
        return cls(app, node)

    def __str__(self) -> str:
        return f"{self.app}.{self.node}"


@dataclass(frozen=True, slots=True, order=True)
class Round:
    """One turn of the wheel for one target; its key is the Dagster partition and the name of the weights it makes.

    Round 0 is the cold start: the weights that every target begins with.
    """

    target: Target
    number: int

    @classmethod
    def parse(cls, key: str) -> "Round":
        """Read `"{app}.{node}.r00001"`. Raises `InvalidRecord`."""
        match = _ROUND.match(key)
        if match is None:
            raise InvalidRecord(f"round {key!r} is not of the form 'app.node.r00001'")
        return cls(Target.parse(match["target"]), int(match["number"]))

    @property
    def key(self) -> str:
        """`"{target}.r{number:05d}"`."""
        return f"{self.target}.r{self.number:05d}"

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a train or val set: the id of a recorded call and its input. The full context is looked up by id."""

    id: int
    input: str
