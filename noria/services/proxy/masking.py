"""Keep an upstream's key from its caller where the upstream itself repeats it: in an error's text, in a header.

Some servers answer a bad key with the key. What they say is passed on otherwise, each secret as asterisks of the same
length, so that lengths stay true.
"""

import json
from collections.abc import Iterable

MIN_SECRET = 8
"""Characters. A shorter one is no secret, and would be found by chance in any text."""


class SecretMask:
    """Replaces secrets in a body that comes in pieces, wherever they are cut; nothing else is changed or reordered.

    A piece that ends like a secret begins is held back by so much, until the next one shows what it is.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = _forms(secrets)
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What of the body can be passed on now."""
        if not self._secrets:
            return piece
        text = _masked(self._held + piece, self._secrets)
        kept = max((_overlap(text, secret) for secret in self._secrets), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> bytes:
        """The rest, once the body has ended."""
        rest, self._held = self._held, b""
        return rest


def masked(body: bytes, secrets: Iterable[str]) -> bytes:
    """A whole body without the secrets."""
    return _masked(body, _forms(secrets))


def masked_header(value: str, secrets: Iterable[str]) -> str:
    """A header's value without the secrets."""
    return _masked(value.encode(errors="surrogateescape"), _forms(secrets)).decode(errors="surrogateescape")


def _forms(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """Each secret as it stands in plain text and inside a JSON string, the longest first."""
    forms = {
        form.encode()
        for secret in secrets
        if len(secret) >= MIN_SECRET
        for form in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    }
    return tuple(sorted(forms, key=len, reverse=True))


def _masked(text: bytes, secrets: tuple[bytes, ...]) -> bytes:
    for secret in secrets:
        text = text.replace(secret, b"*" * len(secret))
    return text


def _overlap(text: bytes, secret: bytes) -> int:
    """How many bytes at the end of `text` may be the beginning of a secret."""
    if text[-1:] not in secret:  # nearly every piece of a stream ends with a line end
        return 0
    start = text.find(secret[:1], max(0, len(text) - len(secret) + 1))
    while start >= 0:
        if secret.startswith(text[start:]):
            return len(text) - start
        start = text.find(secret[:1], start + 1)
    return 0
