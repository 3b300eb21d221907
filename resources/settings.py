"""noria.toml as a Dagster resource: every other door reads it through this one."""

from functools import cached_property

import dagster as dg

from noria.config import Config, load


class Settings(dg.ConfigurableResource[Config]):
    """The configuration of this deployment; `path` empty means `$NORIA_CONFIG`, else `./noria.toml`."""

    path: str = ""

    @cached_property
    def config(self) -> Config:
        """The whole of noria.toml. Raises `ConfigError` with one line that says what to mend."""
        return load(self.path or None)
