"""The servers behind the proxy as noria.toml names them, with their credentials kept apart from all that is ever said.

An upstream's URL carries no credentials after this: what aiohttp or the proxy says about it can be logged.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from noria.config_services import ProxyConfig, UpstreamConfig
from noria.contracts.errors import ConfigError
from noria.services.proxy.keys import upstream_key

CREDENTIAL_HEADERS = frozenset({"authorization", "x-api-key", "api-key"})
"""Where callers of the known APIs put their key. To an upstream with a key of its own, none of the caller's go on."""

_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that answers model calls.

    url          without `/v1`, and without user and password
    token_ids    whether it is asked for token ids and logprobs
    key          its API key, None to pass on the caller's; never shown
    is_policy    whether it serves the versions that Noria trains
    key_header   where the key goes
    retries      how often a call is tried again here
    shared_paths patterns of unrecorded paths that every tenant may use under the proxy's own credentials
    credentials  the headers by which the proxy is known to it; empty where the caller's own are passed on
    """

    name: str
    url: str
    token_ids: bool
    key: str | None = field(repr=False)
    is_policy: bool
    key_header: str = "authorization"
    retries: int = 0
    shared_paths: tuple[str, ...] = ()
    credentials: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What must reach nobody: the key, and a password that stood in the URL in each form in which it travels."""


def open_upstreams(proxy: ProxyConfig) -> dict[str, Upstream]:
    """The upstreams of noria.toml by name, in the order of the file.

    Raises `ConfigError` where there are none, for a URL that cannot serve, and for a key that is not set; the message
    shows neither key nor password.
    """
    if not proxy.upstreams:
        raise ConfigError("[proxy.upstreams] is empty; add [proxy.upstreams.policy] with its url")
    return {name: _open(name, upstream, name == proxy.policy_upstream) for name, upstream in proxy.upstreams.items()}


def _open(name: str, upstream: UpstreamConfig, is_policy: bool) -> Upstream:
    url, basic = _read_url(name, upstream.url)
    key = upstream_key(name, upstream)
    credentials: dict[str, str] = {}
    secrets: list[str] = []
    if basic is not None:
        encoded = base64.b64encode(basic.encode()).decode()
        credentials["Authorization"] = f"Basic {encoded}"
        secrets += [encoded, basic.partition(":")[2]]
    if key is not None:
        if not _HEADER_VALUE.fullmatch(key):
            raise ConfigError(
                f"the key in {upstream.api_key_env} (proxy.upstreams.{name}.api_key_env) has a space, a line end or a "
                "character beyond ASCII, which no header can carry; export it again without"
            )
        bearer = upstream.key_header == "authorization"
        if bearer and basic is not None:
            raise ConfigError(
                f"proxy.upstreams.{name} has a user and password in its url and a bearer token in "
                f"{upstream.api_key_env}, but a call has one Authorization header; remove one of them or set "
                "key_header to 'x-api-key' or 'api-key'"
            )
        credentials["Authorization" if bearer else upstream.key_header] = f"Bearer {key}" if bearer else key
        secrets.append(key)
    return Upstream(
        name=name,
        url=url,
        token_ids=upstream.token_ids,
        key=key,
        is_policy=is_policy,
        key_header=upstream.key_header,
        retries=upstream.retries,
        shared_paths=upstream.shared_paths,
        credentials=credentials,
        secrets=tuple(secret for secret in secrets if secret),
    )


def _read_url(name: str, text: str) -> tuple[str, str | None]:
    """The URL without user and password, and those as `user:password`, None where there are none."""
    where = f"proxy.upstreams.{name}.url"
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{where} is no URL (its host or port cannot be read); write http://host:port") from error
    host = parts.hostname or ""
    shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{'' if port is None else f':{port}'}{parts.path}"
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{where} is {shown!r}; it needs http:// or https:// and a host")
    if parts.query or parts.fragment:
        raise ConfigError(f"{where} is {shown!r} with a query or fragment, to which no path can be added; remove it")
    shown = shown.rstrip("/")
    if shown.endswith("/v1"):
        raise ConfigError(f"{where} is {shown!r}; leave out the /v1, the proxy adds it")
    if parts.username is None and parts.password is None:
        return shown, None
    return shown, f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
