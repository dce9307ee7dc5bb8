"""A worker executes what it finds in its caches and search paths: nobody else may have put it there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.control import stop
from launch.control.follow import follow
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.node.own_caches import CACHES, READ, WRITTEN, check_environment, make_own_caches, own_caches
from tests.support import ROOT
from tests.support.launch.live import FOREVER, done, start, wait_until_running, workers
from tests.support.ordinary_user import NOBODY, only_root_is_two_users, open_to_others


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp."""
    with open_to_others() as folder:
        folder.chmod(0o1777)
        yield folder


def environment_of(process: int) -> dict[str, str]:
    words = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@only_root_is_two_users
@pytest.mark.parametrize("named", [False, True], ids=["not-named", "named-by-torch"])
def test_a_cache_that_another_user_has_made_first_is_not_used(
    runs: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Where torch would look unless it is given another: torchinductor_<user> in the temporary folder. A program that
    has imported torch._dynamo has it in its environment, too."""
    for name in ("torchinductor_root", "torch_extensions"):
        (shared / name).mkdir()
        os.chown(shared / name, NOBODY, NOBODY)
    monkeypatch.setenv("TMPDIR", str(shared))
    for variable in CACHES:
        monkeypatch.delenv(variable, raising=False)
    if named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "torchinductor_root"))
    run = start(runs, *FOREVER)
    wait_until_running(run)
    found = environment_of(workers(run)[0])
    stop.stop(run)
    assert {variable: found[variable] for variable in CACHES} == own_caches(run, "local-0")
    for folder in map(Path, own_caches(run, "local-0").values()):
        assert (folder.stat().st_uid, oct(folder.stat().st_mode)) == (os.geteuid(), "0o40700")
    assert found["PYTHONSAFEPATH"] == "1", "nor a module from the folder where the run was launched"


@only_root_is_two_users
@pytest.mark.parametrize("variable", [*WRITTEN, *READ])
def test_what_another_user_has_made_where_everybody_may_is_refused(variable: str, shared: Path) -> None:
    foreign = shared / "foreign"
    foreign.mkdir()
    os.chown(foreign, NOBODY, NOBODY)
    for path in (foreign, foreign / "below.so"):
        with pytest.raises(LaunchError, match=f"^{variable}={path}: {foreign}.* belongs to user (nobody|{NOBODY})"):
            check_environment({variable: str(path)}, make=False)
    with pytest.raises(LaunchError, match=f"^{variable}={foreign}"):
        check_environment({variable: str(foreign)}, make=True)


@pytest.mark.parametrize("variable", [*WRITTEN, *READ])
def test_what_only_the_user_may_write_is_taken(variable: str, tmp_path: Path) -> None:
    folder = tmp_path / "own" / "cache"
    check_environment({variable: str(folder)}, make=False)
    assert not folder.exists()
    check_environment({variable: str(folder)}, make=True)
    assert folder.exists() == (variable in WRITTEN)
    folder.mkdir(parents=True, exist_ok=True)
    check_environment({variable: str(folder)}, make=True)
    folder.chmod(0o757)
    with pytest.raises(LaunchError, match=f"{folder} can be written by .*what lies there would run as you"):
        check_environment({variable: str(folder)}, make=True)
    folder.chmod(0o755)
    folder.parent.chmod(0o757)
    with pytest.raises(LaunchError, match=f"{folder.parent} can be written by "):
        check_environment({variable: str(folder)}, make=True)


def test_each_entry_of_a_list_is_looked_at(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = shared / "later.so"
    for variable, value in (
        ("LD_LIBRARY_PATH", f"/usr/lib:{shared}"),
        ("PYTHONPATH", f"{ROOT}:{missing}"),
        ("LD_PRELOAD", f"libm.so.6 {missing}"),
        ("NCCL_NET_PLUGIN", str(missing)),
        ("PATH", f"/usr/bin:{missing}"),
        ("CPATH", f"/usr/include:{shared}"),
        ("GCONV_PATH", f"/usr/lib/gconv:{shared}"),
    ):
        with pytest.raises(LaunchError, match="everybody"):
            check_environment({variable: value}, make=False)
    check_environment(
        {"LD_PRELOAD": "libm.so.6", "NCCL_NET_PLUGIN": "ofi", "NCCL_CONF_FILE": "/etc/nccl.conf"}, make=False
    )
    monkeypatch.chdir(shared)
    with pytest.raises(LaunchError, match="everybody"):
        check_environment({"LD_LIBRARY_PATH": "/usr/lib:"}, make=False)


def test_software_that_another_user_maintains_is_taken(tmp_path: Path) -> None:
    """As a cluster's modules are: not where everybody may make files, but neither root's nor the user's own."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib").chmod(0o775)
    if os.getuid() == 0:
        os.chown(tmp_path / "lib", NOBODY, NOBODY)
    check_environment({"LD_LIBRARY_PATH": str(tmp_path / "lib"), "PYTHONPATH": str(tmp_path / "lib")}, make=True)


def test_nccls_own_file_is_looked_at_and_a_home_without_one_is_fine(tmp_path: Path) -> None:
    check_environment({"HOME": str(tmp_path)}, make=True)
    (tmp_path / ".nccl.conf").touch()
    (tmp_path / ".nccl.conf").chmod(0o666)
    with pytest.raises(LaunchError, match=r"^HOME=.*/\.nccl\.conf can be written by everybody \(mode 666\)"):
        check_environment({"HOME": str(tmp_path)}, make=True)


@only_root_is_two_users
def test_a_home_that_may_not_be_entered_is_no_traceback(tmp_path: Path) -> None:
    """As of `su USER`, which leaves HOME=/root."""
    tmp_path.chmod(0o700)
    os.seteuid(NOBODY)
    try:
        check_environment({"HOME": str(tmp_path)}, make=False)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "variable",
    ["BASH_ENV", "CUDA_INJECTION64_PATH", "HOME", "OPENSSL_CONF", "PATH", "TRITON_LIBCUDA_PATH", "UCX_MODULE_DIR"],
)
def test_what_a_worker_runs_or_loads_by_a_variable_must_not_be_everybodys(variable: str, shared: Path) -> None:
    with pytest.raises(LaunchError, match=f"^{variable}={shared}.* can be written by everybody .*would run as you"):
        check_environment({variable: str(shared)}, make=True)


def test_a_link_in_the_place_of_a_runs_cache_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_own_caches(run, "a")
    run.cache("b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="cannot be created"):
        make_own_caches(run, "b")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(LaunchError, match="is a link"):
        make_own_caches(run, "b")


def test_a_launch_says_so_before_anything_starts(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
    refused = done("launch", "train.iterations=6", cwd=tmp_path)
    assert refused.returncode == 1
    assert f"TRITON_CACHE_DIR={shared}: {shared} can be written by others (mode 1777)" in refused.stderr
    assert not list(tmp_path.glob("runs/*/*"))


def test_a_module_in_the_folder_of_the_launch_does_not_stand_in_for_tdpps(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /tmp, where anybody may have put one."""
    for name in ("launch", "megatron_ext", "torch", "submitit"):
        (tmp_path / f"{name}.py").write_text("import sys; sys.exit('not ours')")
    monkeypatch.chdir(tmp_path)
    run = start(runs)
    follow(run)
    assert judge(run).state is State.succeeded
