"""The README leads whoever opens it to their page, and shows contributors' commands last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.commands import COMMANDS
from tests.support import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
"""What .ci/run runs, in this order."""


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_demo_comes_first_and_the_projects_own_tests_last() -> None:
    assert BLOCKS[0] == "make demo\n"
    assert BLOCKS[-1] == "make test\n"
    assert sum("make test" in block for block in BLOCKS) == 1
    assert SECTIONS[-1].startswith("For contributors")


def test_where_one_comes_from_is_asked_before_any_other_page_is_named() -> None:
    (table,) = [section for section in SECTIONS if section.startswith("Where you come from")]
    assert SECTIONS.index(table) == 3, "after the demo and one's own cluster"
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    for origin in ("shell scripts", "PipeDream", "IIDP or JABAS", "OpenSeq2Seq", "Megatron-LM"):
        assert sum(origin in cell for cell in first) == 1, origin
    named = set(re.findall(r"`tdpp (\w+)", table))
    assert named <= set(COMMANDS)


def test_every_page_is_named() -> None:
    linked = {link.partition("#")[0] for link in re.findall(r"\(docs/([^)]+)\)", TEXT)}
    assert {page.name for page in PAGES[2:]} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), link
