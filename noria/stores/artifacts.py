"""Artifact files: sets, trajectories, batches, reports and checkpoints below one root folder or fsspec URL.

    base/COMPLETE.json   base/model/                              the cold start, a Hugging Face folder
    rounds/<round key>/  train.parquet … report.json              what the stations of a round hand on
    rounds/<round key>/checkpoint/COMPLETE.json  checkpoint/model/  checkpoint/state/
    suites/<target>/                                              frozen evaluation sets

A file gets its name only when it is whole; a folder is complete only when its COMPLETE.json is there.
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from noria.contracts.errors import ConfigError, IntegrityError, InvalidRecord, NotFound
from noria.contracts.round import Round

MARKER = "COMPLETE.json"
BASE = "base"
_TEMPORARY = ".writing-"


class Artifacts:
    """Files below `root`. Every path is relative to it; an absolute path of a local root is taken if it lies below it.

    A path that leaves the root raises `InvalidRecord`.
    """

    def __init__(self, root: str | Path) -> None:
        self._fs, self.root = url_to_fs(str(root))
        self._is_local = isinstance(self._fs, LocalFileSystem)
        if self._is_local:
            self.root = os.path.realpath(self.root)

    # Bytes, JSON, parquet

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file: readers see the old bytes or the new ones, a crash leaves one of the two."""
        target = self._full(path)
        parent, _, name = target.rpartition("/")
        temporary = f"{parent}/{_TEMPORARY}{secrets.token_hex(8)}-{name}"
        self._fs.makedirs(parent, exist_ok=True)
        try:
            if self._is_local:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
                _sync(Path(parent))  # the rename itself must outlive a power cut
            else:
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, target)
        except BaseException:
            if self._fs.exists(temporary):
                self._fs.rm_file(temporary)
            raise

    def read_bytes(self, path: str) -> bytes:
        """A whole file. Raises `NotFound`."""
        try:
            return bytes(self._fs.cat_file(self._full(path)))
        except FileNotFoundError as error:
            raise NotFound(f"no file {path} below {self.root}; materialize the station that writes it") from error

    def write_json(self, path: str, value: Any) -> None:
        """Write a value as indented JSON; the same value gives the same bytes. NaN raises ValueError."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        self.write_bytes(path, f"{text}\n".encode())

    def read_json(self, path: str) -> Any:
        """Read a JSON file. Raises `NotFound`, and `IntegrityError` when it is not JSON."""
        try:
            return json.loads(self.read_bytes(path))
        except ValueError as error:
            raise IntegrityError(f"{path} is not valid JSON ({error}); delete it and make it again") from error

    def write_parquet(self, path: str, table: pa.Table, metadata: Mapping[str, str] | None = None) -> None:
        """Write a table and its metadata; the same rows and metadata give the same bytes, however they are chunked."""
        existing = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        merged = dict(sorted({**existing, **(metadata or {})}.items()))
        sink = pa.BufferOutputStream()
        pq.write_table(table.combine_chunks().replace_schema_metadata(merged or None), sink, compression="zstd")
        self.write_bytes(path, sink.getvalue().to_pybytes())

    def read_parquet(self, path: str) -> pa.Table:
        """Read a table; the metadata it was written with is `table.schema.metadata`. Raises `NotFound`."""
        return pq.read_table(pa.BufferReader(self.read_bytes(path)))

    # Append-only logs

    def append_jsonl(self, path: str, record: Mapping[str, Any]) -> None:
        """Append one record as a line that is on disk when this returns; local roots only.

        A torn last line, left by a crash, is cut off first. Several processes may append to one file.
        """
        file = self.local(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with open(file, "a+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            whole = _length_of_whole_lines(handle)
            if whole != handle.seek(0, os.SEEK_END):
                handle.truncate(whole)
            handle.write(line)
            handle.flush()
            os.fsync(handle.fileno())

    def read_jsonl(self, path: str) -> list[dict[str, Any]]:
        """The records of a log in order, a torn last line left out; empty when nobody has written it.

        Raises `IntegrityError` for a line in the middle that is not a JSON object.
        """
        if not self.exists(path):
            return []
        *lines, _torn = self.read_bytes(path).split(b"\n")
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise IntegrityError(f"{path}, line {number}: {line[:80]!r} is not a JSON object; delete that line")
            records.append(record)
        return records

    # Folders and their completeness

    def round_dir(self, key: str) -> str:
        """The folder of a round, relative to the root. Raises `InvalidRecord` for what is no round key."""
        return f"rounds/{Round.parse(key).key}"

    def mark_complete(self, directory: str, info: Mapping[str, Any]) -> None:
        """Write the marker of a folder, last of all; what the folder holds is on disk by then."""
        if self._is_local:
            for path in self.local(directory).rglob("*"):
                _sync(path)
        self.write_json(f"{directory}/{MARKER}", dict(info))

    def completed(self, directory: str) -> dict[str, Any] | None:
        """What the marker of a folder says, None where there is no marker."""
        path = f"{directory}/{MARKER}"
        return dict(self.read_json(path)) if self.exists(path) else None

    def version_dir(self, name: str) -> Path:
        """The local Hugging Face folder of a policy version: `base`, `X.r00000` (the same weights), or a round key.

        Raises `NotFound` that says what to materialize when the folder is missing or not complete.
        """
        if name == BASE:
            number = 0
        else:
            try:
                number = Round.parse(name).number
            except InvalidRecord as error:
                raise NotFound(
                    f"no model {name!r}: a version is 'base' or a round key like 'app.node.r00001'"
                ) from error
        directory = BASE if number == 0 else f"{self.round_dir(name)}/checkpoint"
        model = self.local(directory) / "model"
        if self.completed(directory) is None or not model.is_dir():
            asset = "cold_start" if number == 0 else f"checkpoint, partition {name}"
            raise NotFound(f"the weights of {name!r} are not complete in {model.parent}; materialize the asset {asset}")
        return model

    # Names, hashes, links

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""
        return bool(self._fs.exists(self._full(path)))

    def list_dir(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty where there is no folder. Files that are being written do not show."""
        full = self._full(path)
        if not self._fs.isdir(full):
            return []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(full, detail=False, refresh=True)}
        return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def sha256(self, path: str) -> str:
        """SHA-256 of a file, in hex. Raises `NotFound`."""
        digest = hashlib.sha256()
        try:
            with self._fs.open(self._full(path), "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except FileNotFoundError as error:
            raise NotFound(f"no file {path} below {self.root}; materialize the station that writes it") from error
        return digest.hexdigest()

    @staticmethod
    def sha256_file(path: str | Path) -> str:
        """SHA-256 of a local file that need not lie below the root, such as a SQL file of the user's. In hex."""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def sha256_dir(self, path: str) -> str:
        """SHA-256 over the names and contents of all files below a folder, in hex. Raises `NotFound`.

        It is the hash of what `sha256sum` prints for the files in byte order of their relative paths.
        """
        full = self._full(path)
        if not self._fs.isdir(full):
            raise NotFound(f"no folder {path} below {self.root}; materialize the station that writes it")
        names = sorted(str(name)[len(full) :].lstrip("/") for name in self._fs.find(full))
        lines = [f"{self.sha256(f'{path}/{name}')}  {name}\n" for name in names]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def local(self, path: str) -> Path:
        """The path on this machine. Raises `ConfigError` when the root is not a local folder."""
        if not self._is_local:
            raise ConfigError(f"{path} is needed as a local file, but artifacts are at {self._fs.unstrip_protocol('')}")
        return Path(self._full(path))

    def url(self, path: str) -> str:
        """A link for people: `file://…` for a local root, the object's URL otherwise."""
        full = self._full(path)
        return Path(full).as_uri() if self._is_local else str(self._fs.unstrip_protocol(full))

    def _full(self, path: str) -> str:
        pure = PurePosixPath(path)
        if pure.is_absolute() and pure.is_relative_to(self.root):
            pure = pure.relative_to(self.root)
        if pure.is_absolute() or ".." in pure.parts:
            raise InvalidRecord(f"path {str(path)!r} leaves the artifact folder {self.root}; give it relative to that")
        return str(PurePosixPath(self.root) / pure)


def _length_of_whole_lines(handle: Any) -> int:
    """Bytes up to and with the last newline, reading backwards in blocks."""
    end = int(handle.seek(0, os.SEEK_END))
    while end > 0:
        start = max(0, end - 65536)
        handle.seek(start)
        newline = handle.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + int(newline) + 1
        end = start
    return 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
