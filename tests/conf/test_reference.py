"""The page of all keys, and `tdpp config`."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig

from conf.compose import compose_unchecked
from conf.reference import found, markdown, parts
from launch.cli import main
from tests.support import ROOT


def test_the_page_is_what_the_schema_says() -> None:
    """After a change: python -m conf.reference > docs/reference.md."""
    assert (ROOT / "docs" / "reference.md").read_text() == markdown()


def test_every_key_has_a_meaning() -> None:
    assert [key.name for part in parts() for key in part.keys if not key.meaning] == []


def leaves(node: DictConfig, before: str = "") -> set[str]:
    names = set()
    for name in node:
        key = f"{before}{name}"
        inner = node._get_node(name)
        names |= leaves(inner, f"{key}.") if isinstance(inner, DictConfig) and not _is_free(key) else {key}
    return names


def _is_free(key: str) -> bool:
    return key.rpartition(".")[2] in ("environment", "links")


def test_every_key_of_a_composed_configuration_is_there() -> None:
    cfg = compose_unchecked(["cluster=a100x1_a10x7"])
    assert isinstance(cfg, DictConfig)
    assert {name for name in leaves(cfg) if not found(name)} == set()


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("train.seed", "0 or more"),
        ("adapt.target", "above 0, below 1"),
        ("model.hidden_dropout", "0 or more, below 1"),
        ("model.norm_epsilon", "above 0, up to 1"),
        ("cluster.groups.*.count", "1 to 65536"),
        ("max_jobs", "1 or more"),
    ],
)
def test_a_range_is_shown(key: str, rule: str) -> None:
    assert [found_key.rule for found_key in found(key)] == [rule]


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("train.lr_warmup_iterations", ["takes:   whole number", "rule:    0 or more", "default: 0"]),
        ("cluster.groups.mine.inter_gbit_per_s", ["unit:    gigabits a second", "rule:    above 0", "must be given"]),
        ("train.optimizer", ["lamb           LAMB: Adam with updates", "default: adamw"]),
        ("parallel", ["parallel.shares", "parallel.node_order"]),
        ("cluster.groups", ["cluster.groups.*.count"]),
    ],
)
def test_what_a_terminal_shows(capsys: pytest.CaptureFixture[str], key: str, lines: list[str]) -> None:
    assert main(["config", key]) == 0
    out = capsys.readouterr().out
    assert [line for line in lines if line not in out] == []


def test_without_a_key_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{part.name or '(the run)'} " in f"\n{out}" for part in parts())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "did you mean train.lr"),
        ("train.optimiser", "did you mean train.optimizer"),
        ("cluster.group", "did you mean cluster.groups"),
        ("qqqqqq", "the nearest are "),
    ],
)
def test_a_key_that_is_not_there(capsys: pytest.CaptureFixture[str], key: str, meant: str) -> None:
    assert main(["config", key]) != 0
    error = capsys.readouterr().err
    assert f"{key} is not a configuration key" in error
    assert meant in error
    assert error.partition(meant)[2].count(",") in (3, 4), "five of them"
