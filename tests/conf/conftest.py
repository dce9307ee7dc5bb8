"""Composing is the subject here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conf import compose
from tests.support.composing import COMPOSED


@pytest.fixture(autouse=True, scope="package")
def no_shortcut() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_composed", COMPOSED)
        yield
