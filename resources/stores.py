"""Online store, warehouse and artifact files."""

from functools import cached_property

import dagster as dg

from noria.stores.artifacts import Artifacts
from noria.stores.bodies import Bodies
from noria.stores.online import OnlineStore
from noria.stores.warehouse import Warehouse
from resources.settings import Settings


class Stores(dg.ConfigurableResource[object]):
    """Where things are kept. Each store is opened at its first use, once per process."""

    settings: dg.ResourceDependency[Settings]

    @cached_property
    def online(self) -> OnlineStore:
        """The calls and scores that the proxy lands, and the releases that it follows."""
        config = self.settings.config
        return OnlineStore(
            config.store_url, bodies=Bodies(config.bodies_dir), inline_max_bytes=config.store.inline_max_bytes
        )

    @cached_property
    def warehouse(self) -> Warehouse:
        """The Delta tables that selection reads."""
        return Warehouse(self.settings.config.warehouse_dir)

    @cached_property
    def artifacts(self) -> Artifacts:
        """Sets, trajectories, batches, checkpoints and reports."""
        return Artifacts(self.settings.config.artifacts_dir)
