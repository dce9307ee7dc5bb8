"""A page of figures draws all of them, offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launch.cli import main
from megatron_ext.data.indexed_dataset import write_indexed
from tests.reports.conftest import Opener


def test_the_page_of_indexed_data_shows_three_figures(tmp_path: Path, open_page: Opener) -> None:
    write_indexed(tmp_path / "a", (np.arange(n) for n in range(1, 90)), np.dtype("<u2"))
    assert main(["data", "inspect", str(tmp_path / "a"), "--page", str(tmp_path / "a.html")]) == 0
    page = open_page(tmp_path / "a.html")
    page.wait_for_selector(".plot >> nth=2 >> .barlayer .point")
    assert page.locator(".plot >> nth=2 >> .barlayer .point").count() == 40
    assert page.locator(".plot >> nth=1 >> .scatterlayer path.js-line").count() == 1
    assert "89" in page.locator("main .cards").inner_text()
