"""The policy server."""

import dagster as dg
import httpx

from noria.contracts.errors import PolicyUnavailable
from resources.settings import Settings

LOAD_TIMEOUT_SECONDS = 120.0


class Policy(dg.ConfigurableResource[object]):
    """The server that holds every version of the model."""

    settings: dg.ResourceDependency[Settings]

    def preload(self, version: str) -> None:
        """Have a version in memory before calls ask for it. Raises `PolicyUnavailable` with the server's own reason."""
        url = f"{self.settings.config.policy.url}/v1/versions"
        try:
            answer = httpx.post(url, json={"name": version}, timeout=LOAD_TIMEOUT_SECONDS)
        except httpx.HTTPError as error:
            raise PolicyUnavailable(
                f"no policy server at {url} ({type(error).__name__}: {error}); start it, or mend [policy] in noria.toml"
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise PolicyUnavailable(f"the policy server cannot load {version!r}: {answer.text[:500]}")

    def busy_seconds(self) -> float:
        """Seconds that the server has spent computing the model since it started; 0.0 when it does not say."""
        try:
            answer = httpx.get(f"{self.settings.config.policy.url}/metrics", timeout=10.0)
        except httpx.HTTPError:
            return 0.0
        for line in answer.text.splitlines():
            if line.startswith("noria_policy_busy_seconds_total "):
                return float(line.split()[1])
        return 0.0
