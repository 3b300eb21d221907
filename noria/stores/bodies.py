"""Large content of calls, kept beside the online store: one file for each distinct piece, named by its SHA-256.

    <root>/ab/ab12…ef     the bytes of one JSON string literal, quotes included, or of one array of numbers

An image of two megabytes in a request would make every scan of the table read it. So a string literal longer than
`inline_max_bytes` inside a call's input or output, or an array of numbers (an embedding), is moved to a file, and a
short literal that refers to it stands in its place: the text stays JSON, and `restore` gives back the very bytes.
Whether a literal is a reference is decided by the row: only hashes in its attributes["large"]["sha256"] are, and a
string of the user's that looks like a reference is moved to a file itself.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from noria.contracts.errors import IntegrityError

_TEMPORARY = ".writing-"

# A string literal of JSON, or an array of numbers; also one that the text's end cuts short, so that no text is scanned
# twice. The possessive quantifiers keep the scan linear.
_LITERAL = re.compile(r'"(?:[^"\\]++|\\.)*+"?|\[[-+0-9.eE, \t\r\n]++(?:\]|\Z)', re.DOTALL)
_REFERENCE = re.compile(r'"noria:body:sha256:([0-9a-f]{64})"')
_BEGINS_LIKE_JSON = re.compile(r'\s*+[{\["]')


class Bodies:
    """Files of content below `root`, which is made at first use. Processes may write and read at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Where the content with this hash stands, or would."""
        return self.root / sha256[:2] / sha256

    def put(self, data: bytes) -> str:
        """Keep content; returns its SHA-256 in hex. It is on disk when this returns. Raises OSError."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.path(sha256)
        if path.exists():
            os.utime(path)  # it is young again: `prune` leaves it until the row that refers to it has been written
            return sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)  # the rename itself must outlive a power cut
        return sha256

    def get(self, sha256: str) -> bytes:
        """The content. Raises `IntegrityError` that names the file if it is missing or not what its name says."""
        path = self.path(sha256)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise IntegrityError(
                f"the content file {path} is missing, though a call refers to it; restore it from a backup of "
                f"{self.root}, which belongs to the online store as its tables do"
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise IntegrityError(f"the content file {path} has the SHA-256 {found}; restore it from a backup")
        return data

    def has(self, sha256: str) -> bool:
        """Whether the file is there."""
        return self.path(sha256).exists()

    def older_than(self, time: float) -> Iterator[Path]:
        """Files last written before a Unix time, those that a crash left half written among them."""
        for folder in sorted(self.root.glob("??")):
            for entry in list(os.scandir(folder)):  # the caller may delete what it is given
                try:
                    old = entry.stat().st_mtime < time
                except FileNotFoundError:  # another process has renamed or deleted it
                    continue
                if old:
                    yield Path(entry.path)


def is_hash(name: str) -> bool:
    """Whether a file's name is that of a whole piece of content."""
    return re.fullmatch(r"[0-9a-f]{64}", name) is not None


def has_large(text: str, limit: int) -> bool:
    """Whether a string or array of numbers in the text, or a text that is no JSON, exceeds `limit` bytes of UTF-8."""
    if not _longer(text, limit):
        return False
    if not _BEGINS_LIKE_JSON.match(text):
        return True
    return any(_longer(found[0], limit) for found in _LITERAL.finditer(text))


def externalize(text: str, limit: int, put: Callable[[bytes], str]) -> str:
    """Replace what `has_large` means, and what looks like a reference, by references to what `put` has kept.

    `put` takes the UTF-8 bytes and returns their SHA-256. The time is linear in the text's length.
    """

    def replace(found: "re.Match[str]") -> str:
        literal = found[0]
        if _longer(literal, limit) or _REFERENCE.fullmatch(literal):
            return _refer(put(literal.encode()))
        return literal

    if _longer(text, limit) and not _BEGINS_LIKE_JSON.match(text):
        return _refer(put(text.encode()))
    return _LITERAL.sub(replace, text)


def restore(text: str, hashes: Collection[str], get: Callable[[str], bytes]) -> str:
    """Put back what `externalize` took out; `hashes` are those that the row refers to."""

    def replace(found: "re.Match[str]") -> str:
        reference = _REFERENCE.fullmatch(found[0])
        if reference is None or reference[1] not in hashes:
            return found[0]
        return get(reference[1]).decode()

    return _LITERAL.sub(replace, text)


def _refer(sha256: str) -> str:
    return f'"noria:body:sha256:{sha256}"'


def _longer(text: str, limit: int) -> bool:
    """Whether the text has more than `limit` bytes in UTF-8; encodes only where its length leaves doubt."""
    if len(text) > limit:
        return True
    return len(text) * 3 > limit and not text.isascii() and len(text.encode()) > limit


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
