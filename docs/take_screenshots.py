"""The README's screenshots, from a Noria that runs: `python docs/take_screenshots.py ROUND` (needs chromium)."""

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from noria.config import load

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SETTLE_MS = 4000
"""Time for the UI to load run states and pictures after the text is there."""


def lineage(page: Page, ui: str) -> None:
    """The asset graph with all groups open."""
    page.goto(f"{ui}/asset-groups", wait_until="domcontentloaded")
    page.get_by_text("release", exact=True).last.wait_for(timeout=60_000)
    page.wait_for_timeout(SETTLE_MS)
    page.keyboard.press("Alt+e")
    page.get_by_text("promoted_model", exact=True).first.wait_for(timeout=30_000)


def checkpoint(page: Page, ui: str, round_key: str) -> None:
    """One round's checkpoint with its learning curve."""
    page.goto(f"{ui}/assets/checkpoint?view=partitions&partition={round_key}", wait_until="domcontentloaded")
    page.get_by_text("learning_curve").first.wait_for(timeout=60_000)
    page.get_by_text("[Show Markdown]").first.click()


def sensors(page: Page, ui: str) -> None:
    """The sensors, and what they last said."""
    page.goto(f"{ui}/automation", wait_until="domcontentloaded")
    page.get_by_text("enough_trajectories").first.wait_for(timeout=60_000)


def main() -> None:
    """Take all three."""
    ui, round_key = load().ui.url, sys.argv[1]
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 780})
        for name, open_page in (
            ("lineage", lambda: lineage(page, ui)),
            ("round", lambda: checkpoint(page, ui, round_key)),
            ("sensors", lambda: sensors(page, ui)),
        ):
            open_page()
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
