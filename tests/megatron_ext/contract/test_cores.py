"""How many cores a process may use: its affinity, and the quotas of every cgroup around it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.compose import compose
from launch.commands.launching import preflight
from megatron_ext.contract.cores import usable_cores
from megatron_ext.tasks import stage

V2, V1 = "cpu.max", ("cpu.cfs_quota_us", "cpu.cfs_period_us")


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        pytest.param("0::/\n", {}, 8, id="no quota"),
        pytest.param("0::/\n", {V2: "max 100000\n"}, 8, id="max"),
        pytest.param("0::/\n", {V2: "200000 100000\n"}, 2, id="a container that sees its own cgroup as the root"),
        pytest.param("0::/\n", {V2: "150000 100000\n"}, 2, id="rounded up"),
        pytest.param("0::/\n", {V2: "20000 100000\n"}, 1, id="at least one"),
        pytest.param("0::/\n", {V2: "3200000 100000\n"}, 8, id="more than the affinity"),
        pytest.param("0::/job_7/step_0\n", {f"job_7/{V2}": "300000 100000\n"}, 3, id="a job's, around its step's"),
        pytest.param(
            "0::/job_7/step_0\n",
            {f"job_7/{V2}": "300000 100000\n", f"job_7/step_0/{V2}": "max 100000\n", f"job_8/{V2}": "100000 100000\n"},
            3,
            id="not another job's",
        ),
        pytest.param(
            "5:memory:/a\n4:cpu,cpuacct:/docker/b\n0::/\n",
            {f"cpu,cpuacct/docker/b/{V1[0]}": "400000\n", f"cpu,cpuacct/docker/b/{V1[1]}": "100000\n"},
            4,
            id="version 1",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/not/seen/here\n",
            {f"cpu,cpuacct/{V1[0]}": "400000\n", f"cpu,cpuacct/{V1[1]}": "100000\n"},
            4,
            id="version 1, in a container",
        ),
        pytest.param("4:cpu:/\n", {f"cpu/{V1[0]}": "-1\n", f"cpu/{V1[1]}": "100000\n"}, 8, id="version 1, no quota"),
        pytest.param("4:cpuset:/\n", {f"cpuset/{V2}": "100000 100000\n"}, 8, id="another controller's"),
        pytest.param("?\n", {V2: "broken"}, 8, id="not to be read"),
        pytest.param(None, {V2: "200000 100000\n"}, 2, id="no /proc"),
    ],
)
def test_a_quota_limits_the_cores(tmp_path: Path, own: str | None, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert usable_cores(tmp_path / "cgroup", tmp_path / "own") == cores


def test_launch_and_ranks_count_the_same_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of two cores on a machine of eight: four ranks share them."""
    (tmp_path / V2).write_text("200000 100000\n")
    assert usable_cores(tmp_path, tmp_path / "none") == 2
    monkeypatch.setattr(usable_cores, "__defaults__", (tmp_path, tmp_path / "none"))
    assert preflight.shared_cpus(compose(["experiment=demo"])) == (4, 2)
    for ranks, threads in ((1, 2), (2, 1)):
        plan = SimpleNamespace(nodes=[SimpleNamespace(ranks=range(ranks))])
        assert stage.threads_for(plan) == threads  # type: ignore[arg-type]


def test_nothing_else_asks_for_the_affinity() -> None:
    root = Path(__file__).parents[3]
    rooms = ("conf", "data_prep", "fasop", "launch", "megatron_ext", "reports", "tdpp")
    files = [file for room in rooms for file in (root / room).rglob("*.py")]
    asking = [str(file.relative_to(root)) for file in files if "sched_getaffinity" in file.read_text(encoding="utf-8")]
    assert asking == ["megatron_ext/contract/cores.py"]
