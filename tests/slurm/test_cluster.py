"""The cluster that the other tests rely on is the one that it says it is."""

from __future__ import annotations

from tests.slurm.cluster import Cluster


def test_every_node_is_a_host_of_its_own(slurm: Cluster):
    names = slurm.run("srun", "--partition=scavenge", "--nodes=8", "hostname").stdout.split()
    assert sorted(names) == sorted(slurm.nodes)
