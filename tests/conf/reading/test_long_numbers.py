"""A number of more digits than Python reads is a fault of the file, not of Python's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from fasop.errors import SearchError
from fasop.shares.json_files import object_in

NUMBER = "9" * 5000


@pytest.mark.parametrize("word", ["cluster", "pipedream"])
def test_a_number_of_thousands_of_digits_in_yaml(word: str, tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text(f"groups: {NUMBER}\n")
    with pytest.raises(ConfigError, match=r"long.yaml: .*a whole number has too many digits") as error:
        compose([f"{word}={file}"])
    assert "set_int_max_str_digits" not in str(error.value)


def test_a_number_of_thousands_of_digits_in_json(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    file.write_text(f'{{"gpus": {NUMBER}}}')
    with pytest.raises(SearchError, match=r"long.json: not JSON: a whole number has too many digits$"):
        object_in(file)


def test_a_link_to_itself_is_not_a_missing_file(tmp_path: Path) -> None:
    link = tmp_path / "loop.yaml"
    link.symlink_to(link)
    with pytest.raises(ConfigError, match=r"cluster=.*loop.yaml: a link that leads to no file; without .yaml"):
        compose([f"cluster={link}"])
