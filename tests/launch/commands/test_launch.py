"""`tdpp launch` as a user meets it: one run, a sweep, a dry run, and everything that can be wrong before a start."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.compose import compose, to_experiment
from conf.errors import RunFolderError, TdppError
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from launch.commands.launch import _record, main
from launch.control.follow import follow
from launch.control.planning.dry_run import stage_contents
from launch.control.submit import submit
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from megatron_ext.contract.plan import Plan
from tests.support import PATIENCE_S
from tests.support.launch.live import WORKER, done, no_data_needed, start, tdpp

SHORT = ("train.iterations=6", "train.log_interval=1")


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def launch(*overrides: str) -> int:
    return main(overrides, preflight=no_data_needed, worker=WORKER)


def test_a_run_is_followed_to_its_verdict(tmp_path: Path) -> None:
    launched = done("launch", *SHORT, "name='my ${model.name}'", cwd=tmp_path)
    run = RunDir.find(tmp_path / "runs", None)
    assert launched.returncode == 0
    assert launched.stdout == (f"{run.name}: succeeded, 4 ranks exited with 0; iteration 6 of 6 logged\n")
    first, *lines, last = launched.stderr.splitlines()
    assert first == f"run {run.path}"
    assert last == f"next: tdpp report '{run.name}'  # its page: where the time of an iteration goes"
    assert [int(line.split()[1].rstrip("/")) for line in lines] == [1, 2, 3, 4, 5, 6]
    assert run.overrides.read_text().splitlines() == [*SHORT, "name='my ${model.name}'"]


@pytest.mark.fast
def test_the_folder_says_what_runs_and_where_it_comes_from(runs: Path) -> None:
    run = start(runs, "+cluster.environment.NCCL_DEBUG=WARN")
    follow(run)
    job = run.read_json(run.jobs)["jobs"][0]
    assert (runs / "by_job" / job["id"]).resolve() == run.path.resolve()
    assert job["nodes"] == [0]
    assert compose_again(run) == compose([*run.overrides.read_text().splitlines()])
    origin = run.read_json(run.provenance)
    assert origin["versions"]["submitit"]
    assert set(origin) == {"unix", "commit", "changed", "versions", "user", "host", "cwd", "command"}
    assert run.node_out("local-0").read_text().startswith("NODE_RANK: 0\nNNODES: 1\nWORLD_SIZE: 4\n")


def test_a_run_that_cannot_be_found_by_its_job_is_not_left_running(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mkdir()
    (runs / "by_job").write_text("in the way, as another user's folder would be")
    token = str(runs)
    monkeypatch.setattr("secrets.token_hex", lambda _: token)
    with pytest.raises(RunFolderError, match=r"by_job/\d+: cannot create this link"):
        start(runs)
    assert everything(runs) == ["by_job"]
    assert not processes.find(token)


def test_sweeps_of_the_same_second_keep_a_record_each(tmp_path: Path) -> None:
    for text in ("one", "two", "three", "four"):
        _record({"multirun.yaml": text}, [compose([f"runs_dir={tmp_path}"])])
    assert {path.read_text() for path in tmp_path.glob("sweeps/*/multirun.yaml")} == {"one", "two", "three", "four"}


def compose_again(run: RunDir) -> object:
    return to_experiment(OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.load(run.config)))


@pytest.mark.parametrize("sweep", [[], ["-m", "parallel.micro_batch_size=1,2"]], ids=["single", "sweep"])
def test_a_dry_run_shows_the_plan_and_writes_nothing(
    tmp_path: Path, sweep: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").touch()
    before = everything(tmp_path)
    assert launch("dry_run=true", "--full", *sweep) == 0
    assert everything(tmp_path) == before
    out = capsys.readouterr().out
    assert "3     local-0  CPU  3           1      1   0   layers 1-3, norm, head" in out
    assert f"-u -m {WORKER} '{tmp_path}/runs/tiny/<time>-<hash>/plan.json' 0" in out
    plans = [json.loads("{" + text.partition("\n}")[0] + "}") for text in out.split("plan.json\n{")[1:]]
    assert [plan["micro_batch_size"] for plan in plans] == ([1, 2] if sweep else [2])


def test_a_dry_run_is_for_reading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry_run=true", "experiment=seed_a10x8", "container=enroot"], preflight=no_data_needed) == 0
    out = capsys.readouterr().out
    assert out.count("\n") < 60
    assert ["0", "embedding", "4", "4", "x", "A10", "gpu2-0", "0-3"] in [line.split() for line in out.splitlines()]
    assert "model xl in fp16, 50 iterations, data xl/my-gpt2_text_document\n" in out
    assert out.count("#!/bin/bash") == 1
    assert [line for line in out.splitlines() if line.startswith("  on ")] == [
        "  on gpu2-0:",
        "  on gpu2-1, and with its own number on each of 6 nodes, gpu2-2 to gpu2-7:",
    ]
    assert "plan.json\n{" not in out


def test_a_dry_run_of_a_sweep_shows_once_what_is_alike(capsys: pytest.CaptureFixture[str]) -> None:
    swept = ["-m", "train.lr=1e-4,2e-4", "parallel.micro_batch_size=1,2", "max_jobs=1"]
    assert launch("dry_run=true", "experiment=seed_a10x8", *swept) == 0
    out = capsys.readouterr().out
    assert out.count("#!/bin/bash") == 1
    told = out.partition("3 more combinations")[2].splitlines()[1:]
    plan = "tensor 1 x data 4 x pipeline 8, partition 0-11-8-8-8-8-5-0, micro-batch {}, global batch 64, "
    plan += "32 ranks on 8 nodes"
    assert told == [
        f"# train.lr=0.0001 parallel.micro_batch_size=2: {plan.format(2)}",
        "    sbatch/job.sh: + #SBATCH --dependency='afterany:<jobs of run 1>'",
        "# train.lr=0.0002 parallel.micro_batch_size=1: the same plan",
        "    sbatch/job.sh: + #SBATCH --dependency='afterany:<jobs of runs 1-2>'",
        f"# train.lr=0.0002 parallel.micro_batch_size=2: {plan.format(2)}",
        "    sbatch/job.sh: + #SBATCH --dependency='afterany:<jobs of runs 1-3>'",
    ]


def test_full_is_of_dry_runs_alone(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--full shows everything of a dry run; add dry_run=true, or leave it out"):
        launch("--full", f"runs_dir={tmp_path}/runs")
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], []),
        (["train.lr=0.002", "parallel.partition=2-2"], []),
        (
            ["data.prefix=mine", "train=gpt2", "parallel=single", "--multirun", "train.precision=fp32,bf16"],
            ["(defaults in use: cluster=local model=tiny)"],
        ),
    ],
    ids=["demo", "changed-demo", "own-data"],
)
def test_what_was_taken_by_default_is_named_once(
    words: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("dry_run=true", *words) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "defaults in use" in line] == told


@pytest.mark.parametrize(
    ("model", "partition", "pipeline", "told"),
    [
        ("tiny", [1, 3], 2, ["embedding, layer 0", "layers 1-3, norm, head"]),
        ("tiny", [0, 4, 0, 0], 4, ["embedding", "layers 0-3", "nothing (passes data on)", "norm, head"]),
        ("tiny", [1, 2, 0, 1], 2, ["embedding, layer 0", "layers 1-2, layer 3, norm, head"]),
        (
            "t5-base",
            [8, 5, 11],
            3,
            [
                "embedding, encoder 0-7",
                "encoder 8-11, encoder norm, decoder embedding, decoder 0",
                "decoder 1-11, norm, head",
            ],
        ),
    ],
    ids=["two-stages", "stages-without-layers", "two-chunks", "t5"],
)
def test_a_dry_run_tells_what_each_stage_holds(
    model: str, partition: list[int], pipeline: int, told: list[str]
) -> None:
    sized = compose([f"model={model}", "parallel.partition=null", "parallel.pipeline=1"]).model.sized(1)
    plan = Plan.of({"model": asdict(sized), "partition": partition, "pipeline": pipeline}, Path())
    assert [stage_contents(plan, stage) for stage in range(pipeline)] == told


def test_a_sweep_reports_every_combination_and_goes_on_after_a_bad_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    assert launch("parallel.global_batch_size=4,5,8", "-m", *SHORT) == 1
    captured = capsys.readouterr()
    heading, *rows = captured.out.splitlines()
    assert heading.split() == ["run", "overrides", "verdict", "iteration", "loss", "ms/iteration"]
    assert [("global_batch_size=4" in row, "global_batch_size=8" in row) for row in rows] == [
        (True, False),
        (False, True),
    ]
    assert all("succeeded  6/6" in row for row in rows)
    wrong = [line for line in captured.err.splitlines() if line.startswith("tdpp: error")]
    assert len(wrong) == 1
    assert "parallel.global_batch_size=5 is not divisible" in wrong[0]
    assert len(list(RunDir.all(runs))) == 2
    assert len(list((runs / "sweeps").glob("*/multirun.yaml"))) == 1


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["parallel.data=3"], "parallel.global_batch_size=16 is not divisible by"),
        (["train.iterations=abc"], "must be a whole number, not 'abc'"),
        (["train.foo=1"], "train.foo is not a key; did you mean train.l"),
        (
            ["parallel.micro_batchsize=2"],
            "did you mean parallel.micro_batch_size, ",
        ),
        (["cluster=a10x8"], "one of these fits: 1 node (cluster.groups.<group>.count)"),
        (["+train.foo=1"], "train.foo is not a key"),
        (["model=foo"], "Could not find 'model/foo'"),
        (["executor.kind=moo"], "'moo' is not one of local, slurm, hosts"),
        (["runs_dir=["], "runs_dir=["),
        (["name=${nokey}"], "nokey"),
        (["parallel.data=1,2"], "parallel.data=1,2: several values make a sweep, which needs 'tdpp launch -m'"),
        (["executor=slurm"], "executor.kind=slurm: sbatch is not on this machine"),
        (["executor=slurm", "runs_dir='a\\b'", "dry_run=true"], "contains a backslash"),
        (
            ["experiment=seed_a10x8", "executor=local", "container=none"],
            "cluster.groups.gpu2.partition=gpu2: these nodes belong to Slurm, but executor.kind=local starts",
        ),
        (["profile.nsys=true"], "profile.nsys=true: 'nsys' is not on this machine's PATH; install NVIDIA"),
        (["container=enroot"], "container.kind=enroot: enroot is not on the PATH of "),
        (
            ["container=pyxis"],
            "container.kind=pyxis: pyxis is a plugin of Slurm's srun, but executor.kind=local does not use srun",
        ),
        (["-m", "model=foo", "parallel.data=1,2"], "Could not find 'model/foo'"),
        (["runs_dir='a%j'"], "'%j'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_configuration_is_one_message_and_nothing_is_written(
    tmp_path: Path,
    overrides: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name: None if name in ("sbatch", "enroot") else which(name))
    with pytest.raises(TdppError) as caught:
        launch(*overrides)
    assert caught.value.exit_code == 1
    assert told in str(caught.value)
    assert "search path" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert everything(tmp_path) == []


def test_the_message_of_a_bad_configuration_has_no_traceback(tmp_path: Path) -> None:
    launched = done("launch", "parallel.data=3", cwd=tmp_path)
    assert (launched.returncode, launched.stdout) == (1, "")
    assert launched.stderr.startswith("tdpp: error: parallel.global_batch_size=16")
    assert launched.stderr.count("\n") == 1


@pytest.mark.parametrize("sweep", [[], ["-m"]], ids=["single", "sweep"])
def test_a_file_in_the_way_of_runs_dir_is_told(tmp_path: Path, sweep: list[str]) -> None:
    (tmp_path / "occupied").touch()
    with pytest.raises((RunFolderError, LaunchError), match=r"occupied.*choose a"):
        launch(f"runs_dir={tmp_path}/occupied/runs", *sweep)


def test_a_taken_port_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        number = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"executor.master_port={number} is not available"):
            launch(f"executor.master_port={number}", f"runs_dir={tmp_path}/runs")
    assert everything(tmp_path) == []


def test_what_the_preflight_refuses_is_not_started(tmp_path: Path) -> None:
    def refuse(_experiment: object) -> tuple[str, ...]:
        raise LaunchError("no data")

    with pytest.raises(LaunchError, match="no data"):
        main([f"runs_dir={tmp_path}/runs"], preflight=refuse)
    assert everything(tmp_path) == []


def test_what_is_odd_about_the_data_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dry_run=true", "-m", "parallel.micro_batch_size=1,2"]
    assert main(words, preflight=lambda _: ["odd"], worker=WORKER) == 0
    assert capsys.readouterr().err == "(odd)\n"


def test_a_secret_that_this_shell_lacks_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(LaunchError, match="not set in this shell: WANDB_API_KEY; export it before the launch"):
        launch("cluster.environment_from=[WANDB_API_KEY]", f"runs_dir={tmp_path}/runs")
    assert everything(tmp_path) == []


def test_a_schedule_of_ones_own_runs_as_it_was_at_submission(runs: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.json"
    own.write_text("[1]")
    run = start(runs, f"parallel.schedule_file={own}")
    own.write_text("[2]")
    follow(run)
    assert run.path / run.read_json(run.plan)["schedule_file"] == run.schedule
    assert run.schedule.read_text() == "[1]"


def test_a_schedule_that_cannot_be_read_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"parallel\.schedule_file=.*mine\.json: cannot be read"):
        start(tmp_path / "runs", f"parallel.schedule_file={tmp_path}/mine.json")
    assert everything(tmp_path) == ["runs"]


def test_a_submission_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("submitit.LocalExecutor._submit_command", None)
    with pytest.raises(LaunchError, match="the run could not be started: TypeError"):
        start(tmp_path / "runs")
    assert everything(tmp_path) == ["runs"]


def test_a_folder_may_have_any_name(runs: Path) -> None:
    folder = runs / 'with space, it\'s "한글";\n$HOME `x` #'
    run = submit(replace(compose(SHORT), runs_dir=str(folder)), [], WORKER)
    follow(run)
    assert judge(run).state == State.succeeded
    assert run.path.is_relative_to(folder)


def test_two_launches_at_once_share_a_runs_folder(runs: Path) -> None:
    launchers = [tdpp("launch", *SHORT, cwd=runs.parent) for _ in range(2)]
    for launcher in launchers:
        launcher.communicate(timeout=PATIENCE_S)
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert [judge(run).state for run in RunDir.all(runs)] == [State.succeeded] * 2


@pytest.mark.parametrize("name", ["gnmt_iidp", "vit_jabas"])
def test_the_experiments_on_unlike_gpus_show_their_plan_without_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TdppError, match=r"data\.prefix=data/"):
        main([f"experiment={name}", "dry_run=true", "--full"])
    out = capsys.readouterr().out
    plan = json.loads("{" + out.split("plan.json\n{")[1].partition("\n}")[0] + "}")
    assert {node["gpu"] for node in plan["nodes"]} == {"A100-40GB", "A10"}
    if name == "vit_jabas":
        adapt = plan["adapt"]
        assert (adapt["lower"], adapt["upper"], adapt["target"], adapt["rebalance"]) == (512, 32768, 0.3, True)
        assert plan["global_batch_size"] == 512
    else:
        assert max(plan["shares"][:4]) > max(plan["shares"][4:]), "the A100 take more"
