"""LiteLLM's proxy as the peer, in a virtual environment of its own, which `python -m bench.litellm` makes.

It is given what LiteLLM's documentation advises for production and this comparison allows: one worker, no database, no
logging of requests, its own price list instead of a download, no telemetry, and no keys to check, as Noria's here.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from bench.calls import KINDS
from bench.processes import Server, cache_folder, free_port
from bench.results import ROOT

REQUIREMENTS = ROOT / "bench" / "litellm-requirements.txt"
_MARKER = "installed"


def environment() -> Path:
    """The folder of the virtual environment, which is made if it is not there or is of other requirements.

    Raises `subprocess.CalledProcessError` when pip cannot install them.
    """
    folder = cache_folder() / "litellm"
    marker = folder / _MARKER
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if marker.exists() and marker.read_text() == wanted:
        return folder
    print(f"installing LiteLLM's proxy into {folder.relative_to(ROOT)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-qq", "--no-deps", "--requirement", str(REQUIREMENTS)]
    subprocess.run(pip, check=True)
    marker.write_text(wanted)
    return folder


def version() -> str:
    """The version of LiteLLM that `REQUIREMENTS` pins."""
    pins = dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line and line[0] != "#")
    return pins["litellm"]


def start(folder: Path, upstream: str, *, core: int | None = None) -> Server:
    """Start the proxy with its configuration and log in `folder`; it takes some ten seconds to be ready."""
    port = free_port()
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": f"{upstream}/v1", "api_key": "none"},
        }
        for name in KINDS
    ]
    config = folder / "litellm.yaml"
    settings = {"num_retries": 0, "telemetry": False, "set_verbose": False}
    config.write_text(json.dumps({"model_list": models, "litellm_settings": settings}))  # JSON is YAML
    return Server(
        ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"],
        port,
        folder / "litellm.log",
        program=str(environment() / "bin" / "litellm"),
        environment={
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # on loopback, as Noria without keys
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_TELEMETRY": "False",
        },
        core=core,
        ready_path="/health/liveliness",
    )


def main() -> None:
    """Make the environment and say what it holds."""
    print(f"LiteLLM {version()} in {environment().relative_to(ROOT)}")


if __name__ == "__main__":
    main()
