"""Takes the README's picture from the real timeline page: python -m docs.picture RUN"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

from reports.pages.writing import write
from reports.readers.megatron_log import Sizes
from reports.sources import Source
from tests.support.reports.chromium import ARGUMENTS, CHROMIUM

PICTURE = Path(__file__).with_name("timeline.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="run folder, name or job id")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="default: runs")
    arguments = parser.parse_args()
    _, timeline = write(Source.find(arguments.runs_dir, arguments.run, Sizes()), None, set()).pages
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800}, color_scheme="light")
        page = context.new_page()
        page.goto(timeline.as_uri())
        page.wait_for_selector("body[data-ready]")
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
