"""Several opinions on one attempt fused into the one number that is trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noria.contracts.call import ScoreSource
from noria.contracts.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class Component:
    """One opinion: its value, how much it counts, and where it came from. `value` None means: nobody has said yet."""

    name: str
    value: float | None
    weight: float
    source: ScoreSource
    scorer: str
    scorer_version: str


@dataclass(frozen=True, slots=True)
class Fused:
    """The fused reward, and the share of it that each component gave; the shares add up to `total`."""

    total: float
    shares: dict[str, float]
    components: tuple[Component, ...]
    """What was fused, with its provenance; components without a value are left out."""


def fuse(components: Sequence[Component]) -> Fused:
    """The weighted mean of the components that have a value.

    Weights are relative to those present, so that a late opinion does not lower what is already known. Raises
    `InvalidRecord` on a value that is not finite, a negative weight, a name that stands twice, or no weight at all.
    """
    present = tuple(component for component in components if component.value is not None)
    names = [component.name for component in present]
    for component in present:
        if not math.isfinite(component.value or 0.0):
            raise InvalidRecord(f"component {component.name!r} is {component.value}; only finite values can be fused")
        if not (math.isfinite(component.weight) and component.weight >= 0):
            raise InvalidRecord(f"component {component.name!r} has weight {component.weight}; weights are >= 0")
        if names.count(component.name) > 1:
            raise InvalidRecord(f"component {component.name!r} stands twice; each opinion counts once")
    weight = math.fsum(component.weight for component in present)
    if weight == 0:
        raise InvalidRecord(
            f"none of {len(components)} components has both a value and a weight above 0; nothing can be fused"
        )
    shares = {component.name: component.weight * (component.value or 0.0) / weight for component in present}
    return Fused(math.fsum(shares.values()), shares, present)
