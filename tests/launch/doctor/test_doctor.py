"""`tdpp doctor` on this machine, whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.commands import doctor
from launch.commands.doctor import from_history
from launch.control.short_job import short_job
from launch.doctor.findings import Check, Level
from launch.doctor.login import SLURM_COMMANDS, file_system, login_checks
from launch.files import own_path
from launch.history.hosts import hosts_of
from launch.machine import processes
from tests.launch.history.test_hosts import history
from tests.support import PATIENCE_S
from tests.support.launch.live import ENVIRONMENT, TDPP, TWO_NODES, no_data_needed, token
from tests.support.megatron_ext.engine_run import make_corpus

DATA = Check(Level.ok, "here", "data", "")


def test_the_file_system_of_a_folder_is_the_innermost_mount(tmp_path: Path) -> None:
    folder = tmp_path / "한 글" / "c"
    folder.mkdir(parents=True)
    mounts = (
        f"overlay / overlay rw 0 0\nserver:/x {str(tmp_path / '한 글').replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
    )
    assert file_system(folder, mounts) == "nfs4"
    assert file_system(tmp_path, mounts) == "overlay"


def test_what_earlier_runs_say_of_the_hosts_is_compared_with_today() -> None:
    records = [
        replace(record, hosts=tuple(replace(host, driver="535.1") for host in record.hosts))
        for record in history(3, runs=90, slow={"gpu2-003": 1.1}, far={"gpu2-002 gpu2-005": 2.0})
    ]
    now = [("gpu2", f"gpu2-00{number}", "550.2" if number == 4 else "535.1") for number in (2, 3, 4, 5)]
    found = list(from_history(hosts_of(records), [*now, ("gpu2", "new-1", "550.2"), ("gpu2", None, None)]))
    assert {(check.level, check.where, check.what) for check in found} == {(Level.warning, "gpu2", "history")}
    link, slow, driver = [check.text for check in found]
    assert link.startswith("gpu2-002 - gpu2-005: messages take ")
    assert slow.startswith("gpu2-003 is slow by earlier runs: ")
    assert driver.startswith("gpu2-004 has driver 550.2, and had 535.1 in r/")
    assert list(from_history(hosts_of(records), [("gpu2", "gpu2-002", "535.1")])) == []  # the link's other end is not


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Overrides for a small model with data of its own. No process may be left."""
    monkeypatch.chdir(tmp_path)
    small = ["model.hidden=32", "model.heads=2", "model.sequence_length=16", "model.vocab_size=101"]
    yield [*small, f"data.prefix={make_corpus(tmp_path)}"]
    left = {path: processes.find(token(RunDir(path.parent))) for path in tmp_path.glob("runs/doctor/*/*/jobs.json")}
    assert not any(left.values()), left


def examined(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[tuple[str, str], tuple[str, str]]]:
    code = doctor.main(["--json", *argv], preflight=no_data_needed)
    told = json.loads(capsys.readouterr().out)["checks"]
    return code, {(check["where"], check["what"]): (check["level"], check["text"]) for check in told}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(), TWO_NODES], ids=["one-node", "two-nodes"])
def test_this_machine_is_examined_with_real_ranks(
    here: list[str], nodes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(capsys, *here, *nodes)
    assert code == 0, found
    assert {"error"}.isdisjoint(level for level, _ in found.values())
    assert found["all nodes", "all-reduce"][1].startswith("correct on all 4 ranks")
    assert ("local", "links in a node") in found
    assert (("local", "links between nodes") in found, ("local", "ports") in found) == (bool(nodes), bool(nodes))
    assert not list(RunDir.all(Path("runs")))


@pytest.mark.slow
def test_gpus_that_are_not_there_are_told_and_the_rest_all_the_same(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(capsys, *here, "+gpu@cluster.gpus.a10=a10", "cluster.groups.local.gpu=a10")
    assert code == 1
    assert {place for place, (level, _) in found.items() if level == "error"} == {
        ("local", "GPUs"),
        ("all nodes", "all-reduce"),
    }
    assert "sees no GPU" in found["local", "GPUs"][1]
    assert found["local", "data"][0] == "ok"


@pytest.mark.slow
def test_an_engine_that_no_node_has_is_told_with_the_way_out(
    here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "without" / "megatron").mkdir(parents=True)
    (tmp_path / "without" / "megatron" / "__init__.py").write_text('raise ImportError("it is not here")')
    code, found = examined(
        capsys, *here, "engine=megatron_core", f"+cluster.environment.PYTHONPATH={tmp_path / 'without'}"
    )
    assert code == 1
    assert {place for place, (level, _) in found.items() if level == "error"} == {("local", "software")}
    assert "megatron-core, which cannot be imported: it is not here; install" in found["local", "software"][1]
    assert found["all nodes", "all-reduce"][1].startswith("correct on all 4 ranks")


def test_a_worker_that_cannot_run_is_told_with_its_last_words(
    here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(capsys, *here, "+cluster.environment.PYTHONHOME=/nonexistent")
    assert code == 1
    assert found["local", "nodes"][1].startswith("local-0: its worker exited with 1: ")


def test_a_runs_dir_where_nothing_can_be_made_is_told_before_anything_is_started(
    here: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, found = examined(capsys, *here, f"runs_dir={tmp_path}/file/runs")
    assert code == 1
    assert found["here", "runs_dir"][1].endswith(f"you may not write to {tmp_path}/file; choose another folder")
    assert {where for where, _ in found} == {"here"}


@pytest.mark.parametrize(
    ("mode", "level"),
    [(0o755, "ok"), (0o775, "error"), (0o777, "error"), (0o1777, "ok")],
)
def test_a_runs_dir_where_others_may_replace_runs_is_told(
    mode: int, level: str, here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_path, "_is_private", lambda _group: False)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    experiment = compose([*here, f"runs_dir={tmp_path}/shared"])
    found = {check.what: check for check in login_checks(experiment, DATA)}["runs_dir"]
    assert found.level == level
    assert (f"{tmp_path}/shared can be written by others (mode {mode:03o})" in found.text) == (level == "error")


@pytest.mark.parametrize(("digest", "level"), [("", "warning"), (f"@sha256:{'0' * 64}", "ok")])
def test_an_image_without_a_digest_is_told(digest: str, level: str, here: list[str], tmp_path: Path) -> None:
    overrides = ["executor=slurm", "container=enroot", f"container.image=ubuntu:24.04{digest}"]
    experiment = compose([*here, *overrides])
    found = {check.what: check for check in login_checks(experiment, DATA)}["container"]
    assert found.level == level
    assert found.text.startswith(f"enroot, ubuntu:24.04{digest}")


def test_what_is_odd_about_the_data_is_a_warning() -> None:
    def data(*doubts: str) -> tuple[Level, str]:
        found = doctor.data_check(compose([]), lambda _: doubts)
        return found.level, found.text

    assert data() == (Level.ok, "data/stdlib_text_document suits model tiny")
    assert data("a", "b") == (Level.warning, "a; b")


def test_an_elastic_run_is_examined_with_all_its_nodes() -> None:
    """A node that fails is what the examination is to find; none goes on without it."""
    settings = ["elastic.enabled=true", "train.save_interval=5", "parallel=single", "parallel.data=2"]
    settings += ["cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=1"]
    assert not short_job(compose(settings), ".doctor", 1, 5).elastic.enabled


def test_a_dry_run_shows_the_short_job_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["experiment=seed_a100x1_a10x7", "container=none", "executor=slurm", "dry_run=true"]
    assert doctor.main(argv, preflight=no_data_needed) == 0
    out = capsys.readouterr().out
    assert "-u -m megatron_ext.doctor" in out
    assert "#SBATCH --time=15\n" in out
    assert "#SBATCH --no-requeue\n" in out
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_has_nothing_to_examine() -> None:
    argv = ["experiment=seed_a10x8", "executor=local", "container=none", "executor.rehearse=virtual"]
    with pytest.raises(TdppError, match=r"executor\.rehearse=virtual: a rehearsal runs on this machine alone"):
        doctor.main(argv, preflight=no_data_needed)


def test_interrupted_it_leaves_nothing_running(here: list[str], tmp_path: Path) -> None:
    command = [*TDPP, "doctor", *here]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "waiting for local-0 to start" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    shutil.rmtree(tmp_path / "runs" / "doctor" / "by_job")  # the fixture looks for processes of what is left


def test_a_slurm_that_is_not_set_up_hides_no_other_check(
    here: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Path("bin")
    commands.mkdir()
    for name in SLURM_COMMANDS:
        (commands / name).write_text(
            "#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2; exit 1\n"
        )
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands.absolute()}:{os.environ['PATH']}")
    code, found = examined(capsys, *here, "executor=slurm")
    assert code == 1
    assert {place for place, (level, _) in found.items() if level == "error"} == {("here", "slurm")}
    assert "Could not establish a configuration source" in found["here", "slurm"][1]
    assert found["here", "data"][0] == "ok"
