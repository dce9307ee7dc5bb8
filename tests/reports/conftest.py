"""A real browser, offline; a test fails on a console error, a request but for the page, or a button that uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request

Opener = Callable[..., Page]


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tests.support.reports.layouts.run_of` keeps its runs."""
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens a file as a user with a laptop does, at `hash`; other keyword arguments go to the browser context."""
    contexts, complaints, requested, opened = [], [], [], []

    def on_request(request: Request) -> None:
        if not request.url.startswith("blob:") and not request.url.startswith("data:"):
            requested.append(request.url)

    def opener(path: Path, hash: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"offline": True, "viewport": {"width": 1440, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", on_request)
        page.goto(path.as_uri() + hash)
        opened.append(path.as_uri())
        return page

    yield opener
    uploads = [page.locator("[data-title*='share' i]").count() for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert sum(uploads) == 0, "a chart has a button that uploads it"
    assert complaints == []
    assert set(requested) == set(opened)
