import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from noria.stores.artifacts import Artifacts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, toml: str) -> "subprocess.Popen[str]":
    (folder / "noria.toml").write_text(toml)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NORIA_")}
    environment |= {"NORIA_CONFIG": str(folder / "noria.toml"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "noria.services.policy"], env=environment, stderr=subprocess.PIPE, text=True
    )


@contextmanager
def running(folder: Path, port: int) -> Iterator["subprocess.Popen[str]"]:
    process = start(folder, f'home = "home"\n[policy]\nport = {port}\n')
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(port: int, model: str) -> tuple[int, dict[str, object]]:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_serves_what_the_wheel_has_made_and_ends_on_sigterm(tmp_path: Path, model_dir: Path) -> None:
    port = free_port()
    with running(tmp_path, port) as process:
        status, missing = ask(port, "base")
        assert status == 404
        assert "materialize the asset cold_start" in missing["error"]["message"]  # type: ignore[index]
        artifacts = Artifacts(tmp_path / "home" / "artifacts")
        for folder, model in [("base", "base"), ("rounds/a.b.r00001/checkpoint", "a.b.r00001")]:
            shutil.copytree(model_dir, artifacts.local(folder) / "model")
            assert ask(port, model)[0] == 404  # no marker, so not complete
            artifacts.mark_complete(folder, {"healthy": True})
            assert ask(port, model)[0] == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["base", "a.b.r00001"]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert len([line for line in errors.splitlines() if "ready on" in line]) == 1
        assert "Traceback" not in errors


@pytest.mark.parametrize("mistake", ["port", "key", "device"])
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, mistake: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        toml = {
            "port": f"[policy]\nport = {port}\n",
            "key": "[policy]\nprot = 1\n",
            "device": '[policy]\ndevice = "cuda:7"\n',
        }[mistake]
        process = start(tmp_path, toml)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    words = {"port": f"cannot listen on 127.0.0.1:{port}", "key": "did you mean 'port'", "device": "cuda:7"}
    assert words[mistake] in errors
