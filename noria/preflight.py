"""What can be told before anything starts: files that noria.toml names and that are not there."""

from noria.config import Config
from noria.contracts.errors import ConfigError
from noria.loading import locate_model


def check(config: Config) -> None:
    """Raises `ConfigError` naming the key of the first file that does not exist."""
    for name, target in config.targets.items():
        for key in ("selection", "reward", "suite"):
            value = getattr(target, key)
            path = config.path(str(value).rpartition(":")[0] or value)
            if not path.is_file():
                raise ConfigError(f'noria.toml: targets."{name}".{key}: there is no file {path}')
    if config.model.cold_start.examples is not None:
        path = config.path(config.model.cold_start.examples.rpartition(":")[0])
        if not path.is_file():
            raise ConfigError(f"noria.toml: model.cold_start.examples: there is no file {path}")
    if config.model.source != "tiny":
        if config.model.path is None:
            raise ConfigError(f"noria.toml: model.path is missing; source {config.model.source!r} needs it")
        locate_model(config.model.path, config.root)
