"""A person opens the Dagster UI and sees the lineage, the jobs and the sensors."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, sync_playwright

from noria.config import load
from noria.processes import environment, prepare_home
from pipelines.demo import free_ports

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY = "there is no Chromium on this machine; on Debian: apt-get install chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
STATIONS = (
    "sampled_calls",
    "warehouse_calls",
    "train_set",
    "val_set",
    "trajectories",
    "rewarded_batch",
    "checkpoint",
    "eval_report",
    "promoted_model",
    "cold_start",
)

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]


def test_ci_has_a_browser() -> None:
    assert CHROMIUM or not os.environ.get("CI"), WHY


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Dagster webserver on an empty home, both code locations loaded."""
    config = load(ROOT / "noria.toml", {"NORIA_HOME": str(tmp_path_factory.mktemp("ui"))})
    prepare_home(config)
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "dagster_webserver", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(config))
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, "the webserver ended while starting"
            try:
                if httpx.get(f"{address}/server_info", timeout=2).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        else:
            pytest.fail("the webserver did not answer within two minutes")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def page(ui: str) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip(WHY)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_page(viewport={"width": 1600, "height": 1000})
        browser.close()


def test_the_lineage_shows_every_station(page: Page, ui: str) -> None:
    page.goto(f"{ui}/asset-groups", wait_until="domcontentloaded")
    page.get_by_text("release", exact=True).last.wait_for(timeout=60_000)
    page.keyboard.press("Alt+e")  # expand all groups
    for station in STATIONS:
        page.get_by_text(station, exact=True).first.wait_for(timeout=60_000)
    body = page.inner_text("body")
    for group in ("traffic", "sets", "rollouts", "training", "release"):
        assert group in body


def test_a_station_says_what_it_means_for_the_business(page: Page, ui: str) -> None:
    page.goto(f"{ui}/assets/promoted_model", wait_until="domcontentloaded")
    page.get_by_text("What your users get.").first.wait_for(timeout=60_000)
    assert "release" in page.inner_text("body")


def test_jobs_and_sensors_are_there(page: Page, ui: str) -> None:
    page.goto(f"{ui}/automation", wait_until="domcontentloaded")
    for name in ("traffic_landed", "enough_trajectories", "run_failed", "nightly_compaction"):
        page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    page.goto(f"{ui}/jobs", wait_until="domcontentloaded")
    for name in ("cold_start", "ingest", "turn", "roll_back", "compact_warehouse"):
        page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    assert "operations" in page.inner_text("body")
