"""Words of messages: lengths of time, and names that are like an unknown one."""

from __future__ import annotations

import math
import re

import pytest

from conf.visible import loss_text, nearest, plural, span
from tests.support import ROOT


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (0, 1, "0 s"),
        (0.0087, 2, "8.7 ms"),
        (8.7, 1, "9 s"),
        (9.97, 2, "10 s"),
        (8.7, 3, "8.70 s"),
        (110, 1, "110 s"),
        (595, 1, "10 min"),
        (0.0302 * 3600, 3, "109 s"),
        (2.92 * 3600, 3, "2.92 h"),
        (47 * 3600, 1, "47 h"),
        (330 * 86400, 1, "330 days"),
    ],
)
def test_a_time_has_the_unit_that_fits(seconds: float, digits: int, text: str) -> None:
    assert span(seconds, digits) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [(5.47699, "5.4770"), (0.0, "0.0000"), (836295983104.0, "8.363e+11"), (2.5e-05, "2.500e-05"), (math.nan, "nan")],
)
def test_a_loss_is_as_short_as_it_can_be_read(loss: float, text: str) -> None:
    assert loss_text(loss) == text


def test_an_unknown_name_is_answered_with_the_five_nearest() -> None:
    known = ["train.lr", "train.min_lr", "train.load", "model.layers", "model", "data", "notify.mail"]
    assert nearest("lr", known).startswith("did you mean train.lr, train.min_lr, ")
    assert nearest("lr", known).count(",") == 3
    assert nearest("modle", ["model"]) == "did you mean model? "
    assert nearest("xyzzy", ["data", "model"]).startswith("the nearest are ")
    assert nearest("x", []) == ""


def test_a_count_gets_its_noun_from_one_function() -> None:
    """Nowhere else is a plural put together behind its number."""
    own = re.compile(r"\{[^{}]+\} [\w-]+\{['\"]e?s['\"] \* ")
    rooms = ("conf", "data_prep", "fasop", "launch", "reports", "tdpp")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    assert [str(file) for file in files if own.search(file.read_text(encoding="utf-8"))] == []
    assert [plural(n, "micro-batch", "es") for n in (0, 1, 2)] == [
        "0 micro-batches",
        "1 micro-batch",
        "2 micro-batches",
    ]
