"""The processes of one machine: started from the Procfile by honcho, watched until they answer, ended as a whole."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

import httpx
import psutil

from noria.config import Config
from noria.contracts.errors import ConfigError, StationFailed

MARK = "NORIA_SERVICES_OF"
"""Environment variable that every process of a home carries, so that what a killed run left behind can be found."""
END_SECONDS = 20.0


class Services:
    """Some processes of the Procfile, from the moment that all answer until the end of the `with` block.

    Everything they print goes to `home/logs/services.log`. Raises `StationFailed` with the log's last lines when one of
    them ends before all answer.
    """

    def __init__(
        self, config: Config, names: Sequence[str], *, started: Callable[[str], None] = lambda name: None
    ) -> None:
        self.config = config
        self.names = tuple(names)
        self.log = config.home_dir / "logs" / "services.log"
        self._started = started
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "honcho", "start", "-f", str(self.config.path("Procfile")), *self.names],
                cwd=self.config.root,
                env=environment(self.config),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_for_answers()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait(self) -> int:
        """Block until the processes have ended; honcho ends all when one does. Returns the exit code."""
        assert self._process is not None
        return self._process.wait()

    def end(self) -> None:
        """End every process of this home that is not this one, politely first."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        end_leftovers(self.config)

    def last_lines(self, count: int = 15) -> str:
        """The end of the log, for error messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def _wait_for_answers(self, timeout_seconds: float = 180.0) -> None:
        assert self._process is not None
        waiting = {name: url for name, url in health_urls(self.config).items() if name in self.names}
        deadline = time.monotonic() + timeout_seconds
        while waiting:
            if self._process.poll() is not None:
                raise StationFailed(f"the services ended while starting; their last lines:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise StationFailed(f"no answer from {waiting} after {timeout_seconds:.0f} s; see {self.log}")
            for name in [name for name, url in waiting.items() if _answers(url)]:
                del waiting[name]
                self._started(name)
            time.sleep(0.2)


def health_urls(config: Config) -> dict[str, str]:
    """Where each process of the Procfile says that it is ready."""
    return {
        "policy": f"{config.policy.url}/healthz",
        "proxy": f"{config.proxy.url}/healthz",
        "judge": f"{config.judge.url}/healthz",
        "agent": f"{config.agent.url}/healthz",
        "dagster": f"{config.ui.url}/server_info",
    }


def environment(config: Config) -> dict[str, str]:
    """What every process of this home is started with: this interpreter first, the same home, Dagster's folder."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "DAGSTER_HOME": str(config.dagster_home),
        "NORIA_HOME": str(config.home_dir),
        "NORIA_UI__HOST": config.ui.host,
        "NORIA_UI__PORT": str(config.ui.port),
        MARK: str(config.home_dir),
    }


def interrupt_on_signals() -> None:
    """Make SIGINT and SIGTERM raise `KeyboardInterrupt` in this process, so that what it started is ended with it.

    SIGINT is set too: a shell starts its background jobs with SIGINT ignored, and Python leaves it so.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


@contextmanager
def only_one(config: Config) -> Iterator[None]:
    """Hold the home for this process, and end what a killed one left behind.

    Raises `ConfigError` when another `noria up` or `noria demo` that lives holds it.
    """
    config.home_dir.mkdir(parents=True, exist_ok=True)
    with (config.home_dir / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Noria already runs on {config.home_dir}; stop it first, or set another `home` in noria.toml"
            ) from None
        end_leftovers(config)
        yield


def end_leftovers(config: Config) -> list[int]:
    """End the processes of this home whose starter is gone; returns their process ids."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = [process for process in psutil.process_iter() if process.pid not in own and _belongs(process, config)]
    for process in found:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(found, timeout=END_SECONDS / 2)
    for process in alive:
        _quietly(process.kill)
    psutil.wait_procs(alive, timeout=END_SECONDS / 2)
    return [process.pid for process in found]


def require_free_ports(config: Config, names: Sequence[str]) -> None:
    """Raises `ConfigError` naming the key of the first port that another process holds."""
    places = {
        "policy": ("[policy] port", config.policy.host, config.policy.port),
        "proxy": ("[proxy] port", config.proxy.host, config.proxy.port),
        "judge": ("[judge] port", config.judge.host, config.judge.port),
        "dagster": ("[ui] port", config.ui.host, config.ui.port),
    }
    agent = httpx.URL(config.agent.url)
    places["agent"] = ("[agent] url", agent.host, agent.port or 80)
    for name in names:
        if name not in places:
            continue
        key, host, port = places[name]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"{host}:{port} is in use by another process ({error.strerror}); set another {key} in noria.toml"
                ) from None


def prepare_home(config: Config) -> None:
    """Make the folders of a home, and give Dagster its configuration."""
    config.dagster_home.mkdir(parents=True, exist_ok=True)
    (config.home_dir / "logs").mkdir(exist_ok=True)
    target = config.dagster_home / "dagster.yaml"
    temporary = target.with_name(".dagster.yaml")
    shutil.copyfile(config.path("dagster.yaml"), temporary)
    temporary.replace(target)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _belongs(process: psutil.Process, config: Config) -> bool:
    try:
        return process.environ().get(MARK) == str(config.home_dir)
    except psutil.Error:
        return False


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except psutil.Error:
        return
