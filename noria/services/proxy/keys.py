"""Which keys the proxy needs before it starts: the trainer's, those of its callers, and those of its upstreams."""

import ipaddress
import logging
import os

from sqlalchemy.exc import SQLAlchemyError

from noria.config import Config
from noria.config_services import UpstreamConfig
from noria.contracts.errors import ConfigError
from noria.rollout.directive import check_key
from noria.stores.api_keys import ApiKeys
from noria.stores.online import OnlineStore

_log = logging.getLogger("noria.services.proxy")


def check_exposure(config: Config, store: OnlineStore) -> None:
    """Raise `ConfigError` if the trainer's key is too short, or if a network would reach a proxy that has no API key.

    Where the store is away or not at this schema nobody can say; then the proxy starts and lets nobody in until it can
    read the keys (`Access`).
    """
    check_key(config.trainer_key())
    if is_loopback(config.proxy.host):
        return
    try:
        any_key = bool(ApiKeys(store).active())
    except (SQLAlchemyError, ConfigError, OSError) as error:
        _log.warning("API keys cannot be read from the online store; until then nobody is let in: %s", error)
        return
    if not any_key:
        raise ConfigError(
            f"proxy.host is {config.proxy.host!r}, which other machines can reach, but the online store has no API "
            f"key in use; make one with `noria keys create --tenant {config.proxy.tenant} --scope call`, or set "
            "proxy.host to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
