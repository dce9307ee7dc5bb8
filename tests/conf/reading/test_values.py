from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.reading.parser import Parser, option
from conf.reading.values import (
    Reader,
    above_0,
    flag,
    name_of,
    one_of,
    parse_key_values,
    path,
    prefix_path,
    read,
    several,
    whole,
)
from conf.schema.experiment import Precision

READERS: dict[str, Reader[Any]] = {
    "flag": flag,
    "above_0": above_0,
    "whole": whole,
    "path": path,
    "prefix_path": prefix_path,
    "name": name_of("profile"),
    "one_of": one_of(Precision),
    "several": several(whole),
}


VALUES: list[tuple[str, str, object]] = [
    ("flag", "true", True),
    ("flag", "False", False),
    ("above_0", "1e3", 1000.0),
    ("whole", "12", 12),
    ("path", "a b/c", Path("a b/c")),
    ("prefix_path", "data/stdlib", Path("data/stdlib")),
    ("name", "a10_bf16-2", "a10_bf16-2"),
    ("name", "../my profiles/a10.yaml", "../my profiles/a10.yaml"),
    ("one_of", "bf16", Precision.bf16),
    ("several", "4, 1,4", (4, 1)),
]
NO_NAME = "cannot name a profile: use letters, digits, '_' and '-', or the path of a file that ends with .yaml"
REFUSED = [
    ("flag", "yes", "key=yes must be true or false"),
    ("above_0", "0", "key=0 must be a number above 0"),
    ("above_0", "nan", "key=nan must be a number above 0"),
    ("above_0", "inf", "key=inf must be a number above 0"),
    ("above_0", "", "key='' must be a number above 0"),
    ("whole", "0", "key=0 must be a whole number, at least 1"),
    ("whole", "1.5", "key=1.5 must be a whole number, at least 1"),
    ("whole", "²", "key='²' must be a whole number, at least 1"),
    ("path", "", "key='' is empty; give the path of a file"),
    ("prefix_path", "dir/", "key='dir/' is a folder; add a name for the data, such as dir/data"),
    ("prefix_path", "..", "key=.. is a folder; add a name for the data, such as ../data"),
    ("name", "../x", f"key='../x' {NO_NAME}"),
    ("name", "x\n", rf"key='x\n' {NO_NAME}"),
    ("one_of", "fp8", "key=fp8 must be one of fp32, bf16, fp16"),
    ("several", "1,,2", "key=1,,2 must be a whole number, at least 1; separate several by commas"),
]


@pytest.mark.parametrize(("reader", "text", "value"), VALUES, ids=[f"{reader} {text!r}" for reader, text, _ in VALUES])
def test_a_text_becomes_its_value(reader: str, text: str, value: object) -> None:
    assert read("key", text, READERS[reader], ConfigError) == value


@pytest.mark.parametrize(
    ("reader", "text", "message"), REFUSED, ids=[f"{reader} {text!r}" for reader, text, _ in REFUSED]
)
def test_a_text_without_a_value_is_told_with_its_key_and_the_rule(reader: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        read("key", text, READERS[reader], ConfigError)


def test_words_of_other_keys_are_left_and_the_last_of_the_same_counts() -> None:
    words = ["a=1", "tensor", "train.seed=1=2", "a=2", "+a=3"]
    assert parse_key_values(words, {"a": whole, "tensor": flag}, ConfigError) == (
        {"a": 2},
        ["tensor", "train.seed=1=2", "+a=3"],
    )


def test_an_option_without_a_value_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait-min", type=option(above_0))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--wait-min=soon"])
    assert "argument --wait-min: 'soon' must be a number above 0" in capsys.readouterr().err


def test_a_number_that_python_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tensor=9+ .* 9+ must have at most 4000 digits"):
        parse_key_values([f"tensor={'9' * 5000}"], {"tensor": several(whole)}, ConfigError)


def test_an_option_that_takes_no_value_is_named_with_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tdpp report")
    parser.add_argument("--serve", action="store_true")
    with pytest.raises(SystemExit):
        parser.parse_args(["--serve=abc"])
    assert "argument --serve: takes no value, and 'abc' is one; see" in capsys.readouterr().err
