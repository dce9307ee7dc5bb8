"""The button beside a command, in a real browser: with the clipboard's interface and without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from reports.figures.page import copy_button, copyable, page
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import until

SHOWN, BEHIND = "tdpp launch a=\"<b>\" 'c d'", "tdpp launch parallel=plan-3.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(page("Commands", f"<main>{copyable(SHOWN)}{copy_button(BEHIND)}</main>"))
    return path


def ready(page: Page) -> None:
    until(page, "typeof copyCommand === 'function'")


def test_the_keyboard_copies_a_command_from_a_file_without_a_server(file: Path, open_page: Opener):
    opened = open_page(file, permissions=["clipboard-read", "clipboard-write"])
    ready(opened)
    for text in (SHOWN, BEHIND):
        opened.keyboard.press("Tab")
        opened.keyboard.press("Enter")
        until(opened, "document.activeElement.textContent === 'Copied'")
        assert opened.evaluate("navigator.clipboard.readText()") == text
    until(opened, "document.activeElement.textContent === 'Copy command'")


@pytest.mark.parametrize(
    "clipboard",
    ["undefined", "{ writeText: () => Promise.reject(new Error('not allowed')) }"],
    ids=["no clipboard", "clipboard refuses"],
)
@pytest.mark.parametrize(("number", "text"), [(0, SHOWN), (1, BEHIND)], ids=["in the page", "behind the button"])
def test_without_the_clipboard_the_command_is_shown_and_selected(
    file: Path, open_page: Opener, clipboard: str, number: int, text: str
):
    opened = open_page(file)
    ready(opened)
    opened.evaluate(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }})")
    opened.evaluate("document.execCommand = () => false")
    opened.locator("button.copy").nth(number).click()
    until(opened, f"document.querySelectorAll('button.copy')[{number}].textContent.startsWith('Press ')")
    assert opened.evaluate("getSelection().toString()") == text


def test_a_page_without_commands_carries_no_script_for_them():
    assert page("Empty", "<main></main>").count("packed") == 0
