"""`tdpp profile` on a real cluster: the nodes of two jobs, measured together."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasop.costs.profiles import files as profiles
from fasop.costs.profiles.files import read_profile
from launch.commands import profile
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import NODES

SMALL = ("model=tiny", "model.hidden=32", "model.heads=2", "model.layers=2", "model.sequence_length=16")


def test_nodes_of_two_jobs_are_measured_together_and_nothing_is_left(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    nodes = [*NODES, "cluster.groups.gpu2.count=1", f"runs_dir={tmp_path / 'runs'}"]
    assert profile.main([*nodes, *SMALL, "micro_batches=1", "seconds=0.2", "profile=mine"]) == 0
    written = read_profile("mine")
    assert [(one.tensor, one.micro_batch_size) for one in written.costs] == [(1, 1)]
    assert written.within.p2p is None
    assert written.between.p2p is not None and written.between.all_reduce is not None
    assert written.between.all_reduce.ranks == 2
    assert slurm.jobs() == []
