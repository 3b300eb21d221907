"""Sign and read `trainMeta`: a JSON Web Token (RFC 7519, HS256) whose claims are the fields of a `Directive`.

The agent forwards it unread on each of its model calls. Only the holder of the trainer's key can make one, so an agent
with its own key cannot turn a user's call into an experiment.
"""

import time
from dataclasses import asdict, fields
from typing import Any

import jwt

from noria.contracts.errors import ConfigError, DirectiveRefused, InvalidRecord
from noria.contracts.rollout import Directive
from noria.contracts.round import Round, Target

MIN_KEY_BYTES = 32
"""RFC 7518, section 3.2: a key for HS256 has at least the size of the hash."""

_ALGORITHM = "HS256"
_TYPES: dict[str, type | tuple[type, ...]] = {
    field.name: (int, float) if field.type is float else field.type  # type: ignore[misc]
    for field in fields(Directive)
}


def check_key(key: str) -> None:
    """Raise `ConfigError` if the trainer's key is too short to sign with."""
    size = len(key.encode())
    if size < MIN_KEY_BYTES:
        raise ConfigError(
            f"the trainer's key has {size} bytes, but HS256 needs at least {MIN_KEY_BYTES}; set a longer "
            "NORIA_TRAINER_KEY, or unset it and delete trainer.key in the home folder to have one made"
        )


def sign(directive: Directive, key: str, ttl_seconds: float = 3600) -> str:
    """The signed token that goes into `RolloutRequest.trainMeta`; it is refused after `ttl_seconds`.

    Raises `ConfigError` if the key is too short.
    """
    check_key(key)
    return jwt.encode({**asdict(directive), "exp": int(time.time() + ttl_seconds)}, key, algorithm=_ALGORITHM)


def read(token: str, key: str) -> Directive:
    """The directive that a token carries.

    Raises `DirectiveRefused` if the signature is not the key's, the token has expired, or a claim is missing or of the
    wrong type; `ConfigError` if the key is too short.
    """
    check_key(key)
    try:
        claims: dict[str, Any] = jwt.decode(token, key, algorithms=[_ALGORITHM], options={"require": ["exp"]})
    except jwt.ExpiredSignatureError as error:
        raise DirectiveRefused("this rollout directive has expired; the driver must sign a new one") from error
    except jwt.InvalidSignatureError as error:
        raise DirectiveRefused(
            "this rollout directive is not signed by the trainer's key; start proxy and driver with the same "
            "NORIA_TRAINER_KEY or the same home folder"
        ) from error
    except jwt.InvalidTokenError as error:
        raise DirectiveRefused(
            f"this rollout directive is not a signed token ({error}); forward trainMeta unchanged"
        ) from error
    for name, kind in _TYPES.items():
        value = claims.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DirectiveRefused(
                f"claim {name!r} of this rollout directive is {value!r}; sign it with this version of Noria"
            )
    return Directive(**{name: claims[name] for name in _TYPES})


def target_of(directive: Directive) -> Target:
    """The target whose calls the directive sends to `directive.model`.

    It is read from the model's round key, or from `directive.round` where the model is named otherwise (`base`).
    Raises `DirectiveRefused` if neither is a round key.
    """
    for key in (directive.model, directive.round):
        try:
            return Round.parse(key).target
        except InvalidRecord:
            continue
    raise DirectiveRefused(
        f"neither model {directive.model!r} nor round {directive.round!r} of this directive is a round key "
        "('app.node.r00001')"
    )
