"""Rounds as Dagster partitions: one dynamic partition per turn of the wheel, whatever its target."""

import dagster as dg

from noria.contracts.round import Round

rounds = dg.DynamicPartitionsDefinition(name="rounds")
"""Keys are `"{target}.r{number:05d}"`. All targets share the definition; their rounds never wait for each other."""


def round_of(context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> Round:
    """The round that a run turns. A check started by itself in the UI carries none: it looks at the newest round."""
    key = context.run.tags.get("dagster/partition")
    if key is None:
        keys = context.instance.get_dynamic_partitions("rounds")
        if not keys:
            raise dg.Failure("there is no round yet; materialize train_set for one first")
        key = keys[-1]
    return Round.parse(key)
