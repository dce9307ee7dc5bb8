"""The fixture `slurm`: a real cluster, started by the first test that asks for it, and clean before each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from tests.launch.containers.conftest import double, enroot, image  # noqa: F401  (fixtures)
from tests.slurm import machines
from tests.slurm.cluster import OF_A_JOB, PACKAGES, Cluster, missing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_jobs: the test may end with jobs or processes on the cluster")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """hgx-001 (4 a100), gpu2-001 to 007 (4 a10 each); the preemptible partition `scavenge` has them all."""
    if lacking := missing():
        _do_without(f"{', '.join(lacking)} missing; install with: apt-get install {' '.join(PACKAGES)}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), isolated=machines.may_isolate())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def isolated(slurm: Cluster) -> Cluster:
    """`slurm`, for tests to which every node must be a host of its own."""
    if not slurm.isolated:
        _do_without("nodes with a network of their own need root and the right to make namespaces")
    return slurm


@pytest.fixture(autouse=True)
def on_the_login_node(request: pytest.FixtureRequest) -> Iterator[None]:
    """While a test uses `slurm`, Slurm's commands find it. Afterwards nothing may be left that the test has started."""
    if "slurm" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("slurm")
    with pytest.MonkeyPatch.context() as patch:
        for key in os.environ:
            if key.startswith(OF_A_JOB):
                patch.delenv(key)
        patch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        patch.setenv("PATH", cluster.env["PATH"])
        yield
        left = cluster.clear()
    if left and not request.node.get_closest_marker("leaves_jobs"):
        pytest.fail("the test left on the cluster: " + "\n".join(left))


def _do_without(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
