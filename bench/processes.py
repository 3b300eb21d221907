"""The servers of a benchmark, each a process group of its own: started on one core, waited for, ended by its id."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from bench.results import ROOT

READY_SECONDS = 120.0
END_SECONDS = 30.0

CACHE = ROOT / ".bench"
"""What benchmarks download and write; git does not see it."""

RELAY_CORE, LOAD_CORE = 1, 0
"""The proxy under test has a core to itself; the mock upstream and the load generator share the other."""


def free_port() -> int:
    """A TCP port of loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cache_folder() -> Path:
    """`CACHE`, made if it is not there, with a .gitignore of its own."""
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    return CACHE


def pin(core: int) -> None:
    """Keep this process on one core. Raises `SystemExit` on a machine that has only one."""
    cores = os.sched_getaffinity(0)
    if core not in cores:
        raise SystemExit(f"this benchmark pins processes to the cores {LOAD_CORE} and {RELAY_CORE}; here are {cores}")
    os.sched_setaffinity(0, {core})


class Server:
    """A child process that serves HTTP on a port of loopback; as a context manager, it ends with the block.

    `command` is what follows `python` (this interpreter's), or with `program` what follows that. What it prints goes to
    `log`.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        program: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        core: int | None = None,
        ready_path: str = "/healthz",
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = " ".join((program, *command))
        self._ready_url = self.url + ready_path
        # A noria.toml or a setting of the caller's must not be measured.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [program, *command],
                cwd=ROOT,
                env={**inherited, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
            )
        self.process = psutil.Process(self._popen.pid)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait_ready(self, seconds: float = READY_SECONDS) -> "Server":
        """Return once it answers. Raises `RuntimeError` with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                raise RuntimeError(f"{self._command} ended with {self._popen.returncode}:\n{self.log_end()}")
            if self.answers():
                return self
            time.sleep(0.02)
        raise RuntimeError(f"{self._ready_url} does not answer after {seconds} s:\n{self.log_end()}")

    def answers(self) -> bool:
        """Whether it answers 200 on its readiness path."""
        try:
            with urllib.request.urlopen(self._ready_url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def log_end(self, characters: int = 2000) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-characters:]

    def children(self) -> list[psutil.Process]:
        """Its child processes, and theirs."""
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL to the process itself and to nothing else."""
        self._popen.kill()
        self._popen.wait()

    def end(self) -> int:
        """SIGTERM, and SIGKILL to its whole group if that does not end it; the exit code."""
        if self._popen.poll() is None:
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the group may outlive its leader
            os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.wait()


def mock_upstream(log: Path, core: int | None = None) -> Server:
    """Start the mock upstream."""
    port = free_port()
    command = ("-m", "bench.mock_upstream", "--port", str(port))
    return Server(command, port, log, core=core, ready_path="/calls").wait_ready()


def noria_proxy(
    home: Path, upstream: str, *, store_url: str | None = None, port: int | None = None, core: int | None = None
) -> Server:
    """Start `python -m noria.services.proxy` with its store and spool in `home`; it may not be ready yet.

    The store must have its schema. Settings are the defaults: every call recorded, the spool synced by interval.
    """
    port = port or free_port()
    lines = [
        'home = "."',
        f"[proxy]\nport = {port}",
        f'[proxy.upstreams.policy]\nurl = "{upstream}"',
        f'[store]\nurl = "{store_url}"' if store_url else "",
    ]
    file = home / "noria.toml"
    file.write_text("\n".join(lines) + "\n")
    environment = {"NORIA_CONFIG": str(file)}
    command = ("-m", "noria.services.proxy")
    return Server(command, port, home / "proxy.log", environment=environment, core=core, ready_path="/readyz")
