"""A file that includes itself is one message that names it, however many files lie between."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TDPP_CONFIG", str(tmp_path / "mine"))
    for name, included in {
        "itself": "itself",
        "a": "/experiment: b",
        "b": "c",
        "c": "a",
        "into": "/experiment: b",
    }.items():
        (path := tmp_path / f"mine/experiment/{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"defaults:\n  - {included}\n  - _self_\n")
    return tmp_path / "mine/experiment"


@pytest.mark.parametrize(
    ("name", "way"), [("itself", "itself itself"), ("a", "a b c a"), ("c", "c a b c"), ("into", "b c a b")]
)
def test_a_file_that_includes_itself_is_named(own: Path, name: str, way: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([f"experiment={name}"])
    assert str(error.value).startswith(" includes ".join(str(own / f"{one}.yaml") for one in way.split()))
    assert "a file cannot include itself" in str(error.value)


@pytest.mark.parametrize("key", ["adapt.target", "train.lr", "train.clip_grad"])
def test_a_number_of_hundreds_of_digits_is_one_message(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: must be a number of at most 300 digits"):
        compose([f"{key}={'9' * 400}"])
