"""Which weights serve."""

from functools import cached_property

import dagster as dg

from noria.release.registry import Registry
from resources.stores import Stores


class Releases(dg.ConfigurableResource[object]):
    """The release registry in the online store, which the proxy follows within a second."""

    stores: dg.ResourceDependency[Stores]

    @cached_property
    def registry(self) -> Registry:
        """Which version of each target is live, and every transition that led there."""
        return Registry(self.stores.online)
