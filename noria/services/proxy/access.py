"""Who is calling, and may they: API keys of the online store, looked up in memory and followed by polling.

A key comes as `Authorization: Bearer nk_…` (OpenAI's clients), `x-api-key: nk_…` (Anthropic's) or `x-noria-key: nk_…`,
which leaves the other two to the caller's own key for the upstream. The trainer's key as a bearer token stands for the
instance itself: every scope, any tenant. Where nobody made a key and only this machine reaches the proxy, keys are not
asked for, and what needs more than calls and feedback takes the trainer's key.
"""

import asyncio
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from noria.config import Config
from noria.contracts.access import KEY_TEXT, ApiKey, Scope
from noria.services.proxy.keys import is_loopback
from noria.services.proxy.known_keys import KnownKeys
from noria.services.proxy.refusal import Forbidden, NotReady, Unauthorized
from noria.stores.api_keys import ApiKeys, hash_key
from noria.stores.online import OnlineStore

POLL_SECONDS = 0.5
"""How soon a key that was made or revoked elsewhere counts here, the time of one read of the store on top."""

OWN_HEADER = "x-noria-key"

_PREFIX = "nk_"
_SHOWN = "Authorization: Bearer nk_…, x-api-key: nk_… or x-noria-key: nk_…"

_log = logging.getLogger("noria.services.proxy")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. `key_id` is None for a caller without a key, `tenant` None for one who speaks for any."""

    key_id: str | None
    tenant: str | None
    scopes: frozenset[Scope]


ANYONE = Caller(None, None, frozenset({Scope.CALL, Scope.FEEDBACK}))
"""A caller without a key, where none is required."""

INSTANCE = Caller("trainer", None, frozenset(Scope))
"""The holder of the trainer's key: the wheel itself, or who runs it."""


class Access:
    """The keys as of the last look at the store; kept where the store is away, and in a file for the next start."""

    def __init__(self, config: Config, store: OnlineStore) -> None:
        self._keys = ApiKeys(store)
        self._known = KnownKeys(config.home_dir / "known_keys.json", config.store_url)
        self._trainer_key = config.trainer_key().encode()
        self._trainer_length = len(config.trainer_key())
        self._own_tenant = config.proxy.tenant
        self._faces_network = not is_loopback(config.proxy.host)
        self._callers: Mapping[str, Caller] | None = None
        self._state: tuple[int, int] | None = None
        self._away = False

    @property
    def ready(self) -> bool:
        """Whether it is known which keys there are."""
        return self._callers is not None

    @property
    def required(self) -> bool:
        """Whether a caller needs a key."""
        return self._faces_network or self._callers is None or bool(self._callers)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these headers (names in any case).

        Raises `Unauthorized` for a key that is unknown, revoked or malformed, and for none where one is required;
        `NotReady` while it is not known which keys there are.
        """
        bearer = _bearer(headers)
        key = _own_key(headers, bearer)
        if key is None:
            if bearer and self._is_trainer_key(bearer):
                return INSTANCE
            if not self.required:
                return ANYONE
            if self._callers is not None:
                raise Unauthorized(
                    f"this request has no API key of this proxy; send {_SHOWN} (`noria keys create` makes one)"
                )
        elif not KEY_TEXT.fullmatch(key):
            raise Unauthorized("the API key of this request is malformed: it is nk_ and 43 characters; send it whole")
        elif self._callers is not None:
            # Found by its SHA-256, of which the sender cannot choose a digit: how long the search takes says nothing.
            caller = self._callers.get(hash_key(key))
            if caller is not None:
                return caller
            raise Unauthorized("the API key of this request is unknown or revoked; `noria keys create` makes a new one")
        raise NotReady("the API keys cannot be read from the online store yet; try again, or see the proxy's log")

    def require(self, caller: Caller, scope: Scope) -> None:
        """Return if the caller may do what needs `scope`.

        Raises `Forbidden` for a key without it, `Unauthorized` for a caller who has not shown one.
        """
        if scope in caller.scopes:
            return
        if caller.key_id is None:
            raise Unauthorized(
                f"this needs a key with scope {scope.value!r}, or the trainer's (NORIA_TRAINER_KEY); send {_SHOWN}"
            )
        has = ", ".join(sorted(caller.scopes)) or "none"
        raise Forbidden(
            f"key {caller.key_id} has the scopes {has}, and this needs {scope.value!r}; use another key, or make one "
            f"with `noria keys create --tenant {caller.tenant} --scope {scope.value}`"
        )

    def require_instance(self, caller: Caller, scope: Scope) -> None:
        """As `require`, for what concerns every tenant: the key must be of the proxy's own tenant (`proxy.tenant`).

        Raises `Forbidden` for a key of another tenant.
        """
        self.require(caller, scope)
        if caller.tenant not in (None, self._own_tenant):
            raise Forbidden(
                f"key {caller.key_id} is of tenant {caller.tenant!r}, and this shows all tenants; it takes a key of "
                f"tenant {self._own_tenant!r} (proxy.tenant) with scope {scope.value!r}, or the trainer's"
            )

    def is_own_key(self, value: str) -> bool:
        """Whether a header's value holds a key of this proxy, in use or not, or the trainer's: not for an upstream."""
        if _PREFIX in value and KEY_TEXT.search(value) is not None:
            return True
        last = value.rpartition(" ")[2]
        return len(last) == self._trainer_length and self._is_trainer_key(last)

    async def refresh(self) -> None:
        """Look at the store, and take over what has changed since."""
        try:
            state, keys = await asyncio.to_thread(self._read)
        except Exception as error:  # whatever the store raises, known keys go on
            await self._keep_known(error)
            return
        if self._away:
            _log.info("API keys are read from the online store again")
        self._away = False
        self._state = state
        if keys is not None:
            self._callers = _callers(keys)
            await asyncio.to_thread(self._known.write, keys)
            _log.info("API keys: %d of %d in use", len(keys), state[0])

    async def follow(self) -> None:
        """Refresh every half second, for ever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.refresh()

    def _read(self) -> tuple[tuple[int, int], Mapping[str, ApiKey] | None]:
        state = self._keys.state()
        # A change between the two reads leaves `state` behind, so the next look reads again.
        return state, None if state == self._state else self._keys.active()

    async def _keep_known(self, error: Exception) -> None:
        if not self._away:
            _log.warning("API keys cannot be read from the online store, those known stay: %s", error)
        self._away = True
        if self._callers is None:
            keys = await asyncio.to_thread(self._known.read)
            if keys is not None:
                self._callers = _callers(keys)

    def _is_trainer_key(self, token: str) -> bool:
        # Compared as bytes: compare_digest refuses text beyond ASCII, and a header may hold any.
        return hmac.compare_digest(token.encode(errors="surrogateescape"), self._trainer_key)


def _callers(keys: Mapping[str, ApiKey]) -> dict[str, Caller]:
    return {hashed: Caller(key.id, key.tenant, key.scopes) for hashed, key in keys.items()}


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _own_key(headers: Mapping[str, str], bearer: str) -> str | None:
    """What the request says is a key of this proxy; None where it says nothing."""
    own = headers.get(OWN_HEADER)
    if own is not None:
        return own.strip()
    if bearer.startswith(_PREFIX):
        return bearer
    api_key = headers.get("x-api-key", "").strip()
    return api_key if api_key.startswith(_PREFIX) else None
