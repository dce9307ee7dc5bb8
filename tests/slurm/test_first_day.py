"""The first day of a new user on a real cluster: `tdpp init`, and every command of docs/first-day.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf import compose as composing_module
from conf.compose import compose
from launch import cli
from tests.support.composing import COMPOSED
from tests.support.slurm.cluster import Cluster


@pytest.fixture(autouse=True)
def empty_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user who has no configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TDPP_CONFIG", raising=False)
    monkeypatch.setattr(composing_module, "_composed", COMPOSED)  # what is read changes from test to test
    return tmp_path


def test_nodes_without_a_driver_are_written_as_cpus(slurm: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--price", "hgx=12.24", "--wait", "300"]) == 0
    told = capsys.readouterr()
    written = compose(["experiment=mine"])
    groups = written.cluster.groups
    assert {name: (group.count, group.partition, group.gres, group.gpu) for name, group in groups.items()} == {
        "hgx": (1, "hgx", "gpu:a100:4", "cpu"),
        "gpu2": (7, "gpu2", "gpu:a10:4", "cpu"),
    }
    assert str(written.node_order) == "gpu2+hgx"
    assert groups["hgx"].price_per_hour == 12.24
    assert "Slurm has gpu:a100:4 here, but ranks run on the CPU: no GPU on hgx-001" in told.err
    assert slurm.jobs() == []
