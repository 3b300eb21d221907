"""`python -m noria.services.policy`: serve the versions of the model that stand below the home folder."""

from collections.abc import Iterator

from aiohttp import web

from noria.config import Config
from noria.contracts.errors import ConfigError, NotFound
from noria.services.serving import cancelling_runner, run
from noria.stores.artifacts import Artifacts


def complete_versions(artifacts: Artifacts) -> Iterator[str]:
    """Names of the versions whose weights are complete on disk: `base` first, then the rounds."""
    for name in ("base", *artifacts.list_dir("rounds")):
        try:
            artifacts.version_dir(name)
        except NotFound:
            continue
        yield name


async def _build(config: Config) -> web.Application:
    # Here and not above: torch takes seconds, and a misspelt key or a port in use is told before it is imported.
    import torch

    from noria.services.policy.app import create_app

    if config.policy.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"policy.device is {config.policy.device!r}, but torch finds no GPU; set it to 'cpu'")
    artifacts = Artifacts(config.artifacts_dir)
    return create_app(config.policy, artifacts.version_dir, lambda: complete_versions(artifacts))


def _address(config: Config) -> tuple[str, int]:
    return config.policy.host, config.policy.port


if __name__ == "__main__":
    run("policy server", _build, _address, runner=cancelling_runner)
