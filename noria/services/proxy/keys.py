"""Which keys the proxy needs and checks: the trainer's, and those of its upstreams."""

import hmac
import ipaddress
import os

from aiohttp import web

from noria.config import ProxyConfig, UpstreamConfig
from noria.contracts.errors import ConfigError
from noria.rollout.directive import check_key

TRAINER_KEY_ENV = "NORIA_TRAINER_KEY"


def check_exposure(proxy: ProxyConfig, trainer_key: str) -> None:
    """Raise `ConfigError` if the trainer's key is too short, or nobody chose one and the proxy would face a network."""
    check_key(trainer_key)
    if not is_loopback(proxy.host) and not os.environ.get(TRAINER_KEY_ENV):
        raise ConfigError(
            f"proxy.host is {proxy.host!r}, which other machines can reach, but no key was chosen; set "
            f"{TRAINER_KEY_ENV} (32 bytes or more) for proxy and driver, or set proxy.host to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def holds_trainer_key(request: web.Request, trainer_key: str) -> bool:
    """Whether the request carries `Authorization: Bearer <trainer's key>`."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # Compared as bytes: compare_digest refuses text beyond ASCII, and a header may hold any.
    sent = token.strip().encode(errors="surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(sent, trainer_key.encode())


def upstream_key(name: str, upstream: UpstreamConfig) -> str | None:
    """The API key of an upstream, None where the caller's own is passed on. Raises `ConfigError` if it is not set."""
    if upstream.api_key_env is None:
        return None
    key = os.environ.get(upstream.api_key_env)
    if not key:
        raise ConfigError(
            f"proxy.upstreams.{name}.api_key_env names {upstream.api_key_env}, which is not set; export it, or remove "
            "that line to pass on the caller's own"
        )
    return key
