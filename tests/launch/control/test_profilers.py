"""A worker runs under the profiler that was asked for, as before in every other way."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.checks import check_profiler
from launch.control.planning.dry_run import dry_run
from launch.control.planning.plan import make_plan
from launch.control.submit import profiled
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.node.worker_command import Profiler
from launch.observe.look import observe
from megatron_ext.contract.worker import SAVED
from tests.support.launch import live
from tests.support.launch.live import FOREVER, TWO_NODES, wait_for

COMMAND = ["python3", "-u", "-m", "megatron_ext.worker", "plan.json", "0"]

LINES = {
    Profiler.nsys: [
        "nsys",
        "profile",
        "--output=/runs/a b/nsys/n-0",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--trace-fork-before-exec=true",
        "--wait=primary",
    ],
    Profiler.ncu: [
        "ncu",
        "--export=/runs/a b/ncu/n-0",
        "--force-overwrite",
        "--target-processes=all",
        "--nvtx",
        "--kernel-name=regex:^(?!nccl)",
    ],
}


@pytest.mark.parametrize("profiler", Profiler)
def test_the_workers_command_follows_the_profilers(profiler: Profiler) -> None:
    assert profiler.wrap(COMMAND, Path("/runs/a b") / profiler / "n-0") == [*LINES[profiler], *COMMAND]


@pytest.mark.parametrize("profiler", Profiler)
def test_a_percent_sign_in_a_path_is_not_replaced(profiler: Profiler) -> None:
    (output,) = [word for word in profiler.wrap(COMMAND, Path("/runs/50%h/n-0")) if "/runs/" in word]
    assert output.endswith("=/runs/50%%h/n-0")


def test_nsys_captures_the_iteration_that_is_traced_and_its_report_is_named_for_it() -> None:
    experiment = compose(["experiment=seed_a10x8", "profile.nsys=true", "profile.trace_iteration=20"])
    worker = profiled(Shown(), experiment, make_plan(experiment, "a/b"))
    command = worker.shown(Path("/runs/a"), 1)
    (node,) = make_plan(experiment, "a/b").node_names[1:2]
    options = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    assert command[: -len(COMMAND)] == [
        *LINES[Profiler.nsys][:2],
        f"--output=/runs/a/nsys/{node}.iteration-20",
        *LINES[Profiler.nsys][3:],
        *options,
    ]
    on_cpus = compose(["profile.nsys=true", "profile.trace_iteration=20"])
    assert not {*options} & {*profiled(Shown(), on_cpus, make_plan(on_cpus, "a/b")).shown(Path("/runs/a"), 0)}


class Shown:
    def command(self, run: RunDir, node_rank: int, start: str) -> list[str] | None:
        return COMMAND

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return COMMAND


def test_without_profiler_the_worker_is_as_it_was() -> None:
    experiment = compose([])
    worker = object()
    assert profiled(worker, experiment, make_plan(experiment, "a/b")) is worker  # type: ignore[arg-type]


@pytest.mark.parametrize("profiler", Profiler)
def test_the_plan_says_that_events_are_to_be_marked(profiler: Profiler) -> None:
    assert make_plan(compose([f"profile.{profiler}=true"]), "a/b").nsys is True
    assert make_plan(compose([]), "a/b").nsys is False


@pytest.mark.parametrize(
    ("profiler", "product"), [("nsys", "Nsight Systems"), ("ncu", "Nsight Compute")], ids=lambda value: value
)
def test_a_profiler_that_is_not_here_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler: str, product: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as raised:
        check_profiler(compose([f"profile.{profiler}=true"]))
    assert str(raised.value) == (
        f"profile.{profiler}=true: '{profiler}' is not on this machine's PATH; install NVIDIA {product}, or use "
        f"profile.{profiler}=false"
    )


@pytest.mark.parametrize("overrides", [["executor=slurm"], ["container=enroot"]], ids=" ".join)
def test_what_is_elsewhere_is_not_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_profiler(
        compose(["profile.nsys=true", "experiment=seed_a10x8", "executor=local", "container=none", *overrides])
    )


def test_a_dry_run_shows_it_on_a_machine_that_has_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    text = dry_run(compose(["profile.nsys=true", f"runs_dir={tmp_path}", *TWO_NODES]), "worker").full()
    report = tmp_path / "tiny" / "<time>-<hash>" / "nsys"
    for node in ("local-0", "local-1"):
        assert f" nsys profile '--output={report / node}' --force-overwrite=true " in text


DOUBLE = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
command = words[{options}:]
(output,) = [word.partition("=")[2] for word in words[:{options}] if word.startswith(("--output=", "--export="))]
code = subprocess.call(command)
with open(output + ".rep", "w") as file:  # fails where no such folder
    json.dump(words[:{options}], file)
sys.exit(code)
"""


def write_double(folder: Path, profiler: Profiler) -> Path:
    """A command that starts what it is told to, and writes a report when that has ended."""
    double = folder / profiler
    folder.mkdir()
    double.write_text(DOUBLE.format(python=sys.executable, options=len(LINES[profiler]) - 1))
    double.chmod(0o755)
    return double


@pytest.mark.parametrize("profiler", Profiler)
@pytest.mark.parametrize(
    ("overrides", "state"),
    [([], State.succeeded), (["+cluster.environment.FAIL_RANK=1"], State.failed)],
    ids=["good", "bad"],
)
def test_a_run_under_a_profiler_ends_as_it_would_without(
    tmp_path: Path,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    profiler: Profiler,
    overrides: list[str],
    state: State,
) -> None:
    double = write_double(tmp_path / "bin", profiler)
    options = LINES[profiler][1:]
    monkeypatch.setenv("PATH", str(double.parent), prepend=os.pathsep)
    run = live.start(runs, *TWO_NODES, f"profile.{profiler}=true", *overrides)
    wait_for(lambda: observe(run).over)
    assert judge(run).state == state
    folder = run.nsys if profiler is Profiler.nsys else run.ncu
    good = state is State.succeeded
    assert not good or {path.name for path in folder.iterdir()} == {"local-0.rep", "local-1.rep"}
    assert not good or json.loads((folder / "local-1.rep").read_text())[-3:] == options[-3:]


def test_a_run_under_a_profiler_that_hands_no_signal_on_is_saved(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = write_double(tmp_path / "bin", Profiler.nsys)
    monkeypatch.setenv("PATH", str(double.parent), prepend=os.pathsep)
    run = live.start(runs, *TWO_NODES, *FOREVER, "profile.nsys=true")
    live.wait_until_running(run)
    processes.send(live.agents(run), signal.SIGUSR2)
    wait_for(lambda: observe(run).over)
    assert judge(run).state is State.interrupted
    assert [run.read_json(run.node_state(name))["exit_code"] for name in ("local-0", "local-1")] == [SAVED] * 2


def test_a_node_without_the_profiler_says_so(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the submission cannot know of nodes that are elsewhere; here their PATH is another."""
    (tmp_path / "nsys").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = live.start(runs, "profile.nsys=true", "+cluster.environment.PATH=/nowhere")
    wait_for(lambda: observe(run).over)
    said = f"nsys: no such command on {socket.gethostname()}"
    assert judge(run).reason == f"the worker of node local-0 exited with 127: {said}"
    assert run.node_err("local-0").read_text() == f"{said}\n"
