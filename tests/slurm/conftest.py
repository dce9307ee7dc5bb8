"""The fixture `slurm`: a real cluster, started by the first test that asks for it, and clean before each.

`pyxis` is Slurm's plugin for containers on it: a double, or the real spank_pyxis.so that TDPP_TEST_PYXIS names, with
the real enroot that TDPP_TEST_ENROOT names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from launch.node.worker_command import WORKER as ENGINE
from tests.launch.containers.conftest import REAL, Runtime, double, enroot, image  # noqa: F401  (fixtures)
from tests.support.containers import pyxis_double
from tests.support.megatron_ext.engine_run import make_corpus
from tests.support.ordinary_user import open_to_others
from tests.support.slurm import machines
from tests.support.slurm.cluster import PACKAGES, Cluster, missing
from tests.support.slurm.configuration import SCAVENGE
from tests.support.slurm.login_node import OF_A_JOB
from tests.support.slurm.seed import TRAINED, Trainer

REAL_PYXIS = os.environ.get("TDPP_TEST_PYXIS")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_jobs: the test may end with jobs or processes on the cluster")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """hgx-001 (4 a100), gpu2-001 to 007 (4 a10 each); the preemptible partition `scavenge` has them all."""
    if lacking := missing():
        _do_without(f"{', '.join(lacking)} missing; install with: apt-get install {' '.join(PACKAGES)}")
    with open_to_others() as base:
        cluster = Cluster(base, isolated=machines.may_isolate(), pyxis=Path(REAL_PYXIS) if REAL_PYXIS else None)
        if REAL:  # the plugin looks for enroot on the PATH of slurmd
            cluster.env["PATH"] = f"{Path(REAL).parent}:{cluster.env['PATH']}"
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


@pytest.fixture
def pyxis(
    slurm: Cluster,
    enroot: Runtime,  # noqa: F811
    image: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    """srun of a test knows pyxis; overrides for a run in its containers."""
    python = f"container.python={sys.executable}"
    overrides = ["container=pyxis", f"container.image={image}", python, f"cluster.scratch={tmp_path}"]
    if REAL_PYXIS:
        yield overrides
        every_node = (f"--partition={SCAVENGE}", f"--nodes={len(slurm.nodes)}")
        slurm.run("srun", *every_node, "sh", "-c", TIDY)
        return
    srun = shutil.which("srun")
    assert srun is not None
    monkeypatch.setenv("TDPP_DOUBLE_SRUN", srun)
    shim = enroot.folder / "bin" / "srun"
    shim.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", pyxis_double.__file__])} "$@"\n')
    shim.chmod(0o755)
    yield overrides


TIDY = "enroot list | grep -E '^pyxis_(contract|tdpp-small)' | xargs -r -n 1 enroot remove -f"
"""The real plugin keeps containers where enroot keeps those of users."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def training(request: pytest.FixtureRequest, prefix: Path) -> list[str]:
    """Overrides for a short training by the engine that the tests are asked for."""
    return [f"engine={request.config.getoption('--engine')}", *TRAINED, f"data.prefix={prefix}"]


@pytest.fixture
def trainer(request: pytest.FixtureRequest, training: list[str]) -> Trainer:
    """For what any worker is to do: the stand-in is quicker than tdpp's engine; another that is asked for trains."""
    return Trainer() if request.config.getoption("--engine") == "tdpp" else Trainer(ENGINE, training)


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
