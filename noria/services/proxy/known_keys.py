"""The keys of the online store as they were read last, beside the spool: what a restart knows while the store is away.

The file holds hashes of random keys, from which no key can be found, and is readable by its owner alone.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from noria.contracts.access import ApiKey
from noria.stores.api_keys import key_to_json, known_scopes

_log = logging.getLogger("noria.services.proxy")


class KnownKeys:
    """One file; `store_url` is in it as a hash, so that keys of another store are never taken for this one's."""

    def __init__(self, path: Path, store_url: str) -> None:
        self._path = path
        self._store = hashlib.sha256(store_url.encode()).hexdigest()

    def read(self) -> dict[str, ApiKey] | None:
        """The keys by their hash; None if there is no file of this store that can be read."""
        try:
            tree = json.loads(self._path.read_text())
            if tree["store"] != self._store:
                return None
            return {row.pop("hash"): _from_json(row) for row in tree["keys"]}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be read, and is made again when the store answers: %s", self._path, error)
            return None

    def write(self, keys: Mapping[str, ApiKey]) -> None:
        """Replace the file; a disk that does not take it is logged, and costs only the next restart."""
        tree = {"store": self._store, "keys": [{"hash": hashed, **key_to_json(key)} for hashed, key in keys.items()]}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
                json.dump(tree, file)
            temporary.replace(self._path)
        except OSError as error:
            _log.warning("%s cannot be written; a restart without the store will know no keys: %s", self._path, error)


def _from_json(row: Mapping[str, object]) -> ApiKey:
    scopes = row["scopes"]
    if not isinstance(scopes, list):
        raise TypeError(f"scopes are {type(scopes).__name__}, not a list")
    return ApiKey(
        id=str(row["id"]),
        tenant=str(row["tenant"]),
        scopes=known_scopes(scopes),
        name=str(row["name"]),
        created_at=datetime.fromisoformat(str(row["created_at"])),
    )
