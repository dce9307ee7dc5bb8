"""Where composing itself is the subject, it takes no shortcut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conf import compose
from tests.support.composing import COMPOSED

SUBJECT = {
    "test_compose",
    "test_composition_cache",
    "test_hydra_errors",
    "test_file_cycles",
    "test_hydra_session",
    "test_origins",
    "test_defaults_taken",
    "test_user_files",
    "test_own_folders",
    "test_yaml_file",
    "test_words",
}


@pytest.fixture(autouse=True, scope="module")
def no_shortcut(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem in SUBJECT:
            patch.setattr(compose, "_composed", COMPOSED)
        yield
