"""Sweeps: what is left out, what is counted and confirmed, who waits for whom, and what an interruption leaves."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose, config_text, read_experiment
from conf.errors import ConfigError
from conf.identity import NOT_OF_THE_RUN, identity
from conf.run_folder.run_folders import RUNS_DIR, usual_runs_dir
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from data_prep.training import known_order
from launch.commands import stop as stop_command
from launch.commands.launch import main
from launch.commands.launching.preflight import check_start
from launch.commands.launching.resuming import SweepWords, resumed
from launch.control.follow import finishing
from launch.control.planning.plan import make_plan
from launch.control.stop import stop
from launch.control.submit import resume
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.observe.look import observe
from launch.observe.observation import Observation
from launch.sweep import start as sweep
from launch.sweep.outcomes import differing
from launch.sweep.start import confirm, existing
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.indexed_dataset import write_indexed
from tests.support import PATIENCE_S
from tests.support.launch.live import (
    WORKER,
    controller,
    done,
    no_data_needed,
    start,
    tdpp,
    wait_for,
    wait_until_running,
)
from tests.support.megatron_ext.checkpoints import save
from tests.support.ordinary_user import open_to_others, ordinary_user

SHORT = ("train.iterations=6", "train.log_interval=1")
SEED = ("experiment=seed_a100x1_a10x7", "container=none")
LIMITS = ("cluster.groups.hgx.time_min=60", "cluster.groups.gpu2.time_min=90")


def launch(*overrides: str) -> int:
    return main(overrides, preflight=no_data_needed, worker=WORKER)


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `runs`, in the current one."""
    monkeypatch.chdir(runs.parent)
    return runs


def table(text: str) -> list[list[str]]:
    """The rows: run, overrides, verdict and so on."""
    return [row.split("  ") for row in text.splitlines()[1:] if row]


def composed(*overrides: str) -> Experiment:
    return compose([*SEED, *overrides])


@pytest.mark.parametrize(
    "other",
    [
        ["name=b"],
        ["runs_dir=/elsewhere"],
        ["dry_run=true"],
        ["skip_existing=true", "max_jobs=3", "yes=true", "confirm_gpu_hours=5"],
        ["cluster.groups.gpu2.time_min=5", "cluster.groups.hgx.qos=high"],
        ["executor.max_requeues=9", "executor.save_s=30"],
        ["log=tensorboard,wandb"],
    ],
    ids=lambda value: value[0],
)
def test_what_does_not_change_what_is_trained_makes_no_other_run(other: list[str]) -> None:
    assert identity(composed(*other)) == identity(composed())


@pytest.mark.parametrize(
    "other",
    ["train.lr=1e-3", "parallel.micro_batch_size=2", "cluster.groups.gpu2.gres=gpu:a10:2", "executor.het=hetjob"],
)
def test_what_changes_it_does(other: str) -> None:
    assert identity(composed(other)) != identity(composed())


def test_every_key_that_makes_no_other_run_is_one() -> None:
    for path in NOT_OF_THE_RUN:
        node: object = composed()
        for key in path.split("."):
            node = next(iter(node.values())) if isinstance(node, dict) else getattr(node, key)


def test_a_combination_that_has_succeeded_is_not_run_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*SHORT, "parallel.global_batch_size=8") == 0
    first = RunDir.find(here, None)
    capsys.readouterr()
    assert launch(*SHORT, "-m", "parallel.global_batch_size=4,8", "skip_existing=true", "executor.time_min=7") == 0
    new, old = table(capsys.readouterr().out)
    assert (new[2], old[0], old[2]) == ("succeeded", first.name, "succeeded (skipped)")
    assert len(list(RunDir.all(here))) == 2
    assert launch(*SHORT, "parallel.global_batch_size=4", "skip_existing=true") == 0
    assert "iteration 6 of 6 logged (skipped: exists already)" in capsys.readouterr().out
    assert launch(*SHORT, "parallel.global_batch_size=4") == 0
    assert len(list(RunDir.all(here))) == 3


def test_a_run_under_way_counts_as_done_and_one_that_failed_does_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ("train.iterations=100000", "train.log_interval=1")
    running = start(here, *slow)
    wait_until_running(running)
    assert launch(*slow, "skip_existing=true") == 0
    assert capsys.readouterr().out.startswith(f"{running.name}: running")
    os.kill(controller(running), signal.SIGKILL)
    wait_for(lambda: judge(running).state is State.failed)
    assert launch(*slow, "skip_existing=true", "executor.wait=false") == 0
    assert capsys.readouterr().out.count("skipped") == 0
    again = RunDir.find(here, None)
    assert again != running
    assert done("stop", again.name, cwd=here.parent).returncode == 0


def test_equal_combinations_of_a_sweep_are_run_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*SHORT, "-m", "executor.time_min=5,6", "skip_existing=true") == 0
    assert [row[2] for row in table(capsys.readouterr().out)] == ["succeeded", "succeeded (skipped)"]
    assert len(list(RunDir.all(here))) == 1


def test_runs_of_the_same_hash_are_told_apart_by_their_content(here: Path) -> None:
    assert launch(*SHORT) == 0
    run = RunDir.find(here, None)
    run.config.write_text(run.config.read_text().replace("seed: 1234", "seed: 4321"))
    assert launch(*SHORT, "skip_existing=true") == 0
    assert len(list(RunDir.all(here))) == 2


@pytest.mark.parametrize("part", ["config.yaml", "plan.json", "jobs.json", "nodes", "metrics.jsonl"])
def test_a_run_that_may_not_be_read_does_not_keep_others_from_starting_theirs(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_to_others() as runs:
        experiment = compose([f"runs_dir={runs}", "skip_existing=true"])
        run = RunDir.create(runs, experiment.name, identity(experiment), datetime.now())
        write_atomic(run.config, config_text(experiment))
        run.write_json(run.plan, make_plan(experiment, run.name).as_json())
        run.write_json(run.jobs, {"token": "t", "executor": "local", "submission": 0, "jobs": []})
        run.metrics.touch()
        assert existing(experiment) == run
        (run.path / part).chmod(0)
        with ordinary_user():
            assert existing(experiment) is None
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith(f"skip_existing: {run.path}/{part}")
    assert told.endswith("cannot be read (Permission denied); this run is ignored\n")


def test_a_schedule_with_other_content_is_another_run(here: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.json"
    for content, runs in (("[1]", 1), ("[1]", 1), ("[2]", 2)):
        own.write_text(content)
        assert launch(*SHORT, f"parallel.schedule_file={own}", "skip_existing=true") == 0
        assert len(list(RunDir.all(here))) == runs


def test_a_module_whose_file_has_other_content_is_another_run(here: Path, tmp_path: Path) -> None:
    own = tmp_path / "my.py"
    for content, runs in (("# one", 1), ("# one", 1), ("# two", 2)):
        own.write_text(content)
        assert launch(*SHORT, *module_of(own), "skip_existing=true") == 0
        assert len(list(RunDir.all(here))) == runs


def test_only_the_code_that_a_run_keeps_decides_whether_it_is_resumed(runs: Path, tmp_path: Path) -> None:
    own = tmp_path / "my.py"
    own.write_text("# one")
    run = start(runs, *module_of(own), "train.iterations=100000")
    wait_until_running(run)
    stop(run)
    own.write_text("# two")
    kept = Path(str(run.read_plan().model.code).removesuffix(":Net"))
    assert run.code_tree in kept.parents
    assert kept.read_text() == "# one"
    own.unlink()
    before = run.jobs.read_text()
    kept.unlink()
    kept.write_text("# mine")
    with pytest.raises(LaunchError) as caught:
        main([f"resume={run.path}"], worker=WORKER)
    assert str(caught.value) == (
        f"resume={run.name}: model.code={kept}:Net: {kept} has changed since the run was launched; restore it, "
        f"or start a new run with its weights: train.load={run.path}"
    )
    kept.unlink()
    with pytest.raises(LaunchError, match=r"my\.py cannot be read: No such file or directory; restore it"):
        main([f"resume={run.path}"], worker=WORKER)
    assert run.jobs.read_text() == before


def test_a_run_is_reproduced_with_the_code_that_it_kept_and_what_differs_is_said(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "my.py"
    own.write_text("# one")
    assert launch(*SHORT, *module_of(own), "train.seed=7") == 0
    (run,) = RunDir.all(here)
    own.write_text("# two")
    said = run.read_json(run.provenance)
    run.write_json(run.provenance, {**said, "versions": {**said["versions"], "numpy": "1.0"}})
    capsys.readouterr()
    assert main([f"reproduce={run.path}"], preflight=no_data_needed, worker=WORKER) == 0
    told = capsys.readouterr().err
    assert f"(reproduce={run.name}: numpy is {said['versions']['numpy']}, and was 1.0)" in told
    (again,) = (one for one in RunDir.all(here) if one.path != run.path)
    kept = Path(str(again.read_plan().model.code).removesuffix(":Net"))
    assert again.code_tree in kept.parents
    assert kept.read_text() == "# one"
    assert again.read_plan().train == run.read_plan().train
    assert again.overrides.read_text() == run.overrides.read_text()
    kept.unlink()
    with pytest.raises(LaunchError, match=r"my\.py is not there any more as the run had it$"):
        main([f"reproduce={again.path}"], worker=WORKER)
    with pytest.raises(LaunchError, match=r"reproduce=RUN starts a run as that one was configured and takes no other"):
        main([f"reproduce={again.path}", "train.seed=8"], worker=WORKER)


def test_a_damaged_checkpoint_is_not_resumed_from(runs: Path) -> None:
    run = start(runs, "train.iterations=100000")
    wait_until_running(run)
    stop(run)
    model = run.read_plan().model.identity()
    sound, worse = (save(run.checkpoints / f"iter_{iteration:07d}", iteration, model) for iteration in (5, 10))
    run.latest_checkpoint.write_text(worse.folder.name)
    worse.part("head").write_bytes(worse.part("head").read_bytes()[:-1])
    before = run.jobs.read_text()
    with pytest.raises(LaunchError) as caught:
        main([f"resume={run.path}"], worker=WORKER)
    told = str(caught.value)
    assert told.startswith(f"resume={run.name}: {worse.part('head')}: damaged: expected ")
    assert told.endswith(
        f"; the newest sound checkpoint there is {sound.folder}; once {run.latest_checkpoint} names another "
        "checkpoint, the run continues from that one"
    )
    assert run.jobs.read_text() == before


def test_a_run_whose_data_have_changed_is_not_resumed(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks would refuse the order of the samples, each node's in turn, once the nodes were waited for."""
    text = here.parent / "text"
    write_indexed(text, [np.arange(500)] * 4, np.dtype("<u2"))
    run = start(here, "data.prefix=text", "data.split='1,0,0'", "train.iterations=100000")
    wait_until_running(run)
    stop(run)
    plan, experiment = run.read_plan(), read_experiment(run.config)
    order = known_order(experiment, 100000 * plan.global_batch_size)
    saved = save(run.checkpoints / "iter_0000005", 5, plan.model.identity(), order=order)
    run.latest_checkpoint.write_text(saved.folder.name)
    before = run.jobs.read_text()
    monkeypatch.chdir(tmp_path)
    write_indexed(text, [np.arange(500)] * 5, np.dtype("<u2"))
    with pytest.raises(LaunchError) as caught:
        main([f"resume={run.path}"], worker=WORKER)
    told = str(caught.value)
    assert told.startswith(
        f"resume={run.name}: data.prefix=text is not as it was, so restore it: {saved.folder}: cannot continue at its "
        "sample 80, because the samples come in another order: expected documents=4, tokens=2000, "
    )
    assert "; found documents=5, tokens=2500, " in told
    text.with_suffix(".idx").unlink()
    with pytest.raises(LaunchError, match=rf"resume={run.name}: .*text\.idx"):
        main([f"resume={run.path}"], worker=WORKER)
    assert run.jobs.read_text() == before
    write_indexed(text, [np.arange(500)] * 4, np.dtype("<u2"))
    resume(run, WORKER, check_start)
    wait_until_running(run)
    stop(run)


def module_of(file: Path) -> tuple[str, ...]:
    """Overrides for a module that nothing looks at."""
    return (
        *("model=module", f"model.code={file}:Net", "model.layers=4", "parallel.data=1", "parallel.tensor=1"),
        *("parallel.pipeline=4", "parallel.partition=1-1-1-1", "parallel.micro_batch_size=1"),
    )


def test_other_names_are_not_looked_at(here: Path) -> None:
    assert launch(*SHORT, "name=one") == 0
    assert launch(*SHORT, "name=two", "skip_existing=true") == 0
    assert len(list(RunDir.all(here))) == 2


@pytest.mark.parametrize(
    ("max_jobs", "lanes"),
    [
        (None, [[], [], [], [], []]),
        (1, [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        (2, [[], [], [0], [1], [0, 2]]),
        (9, [[], [], [], [], []]),
    ],
)
def test_each_run_waits_for_all_before_it_in_its_lane(max_jobs: int | None, lanes: list[list[int]]) -> None:
    assert [list(sweep.lane(range(count), max_jobs)) for count in range(5)] == lanes


def test_gpu_hours_are_the_nodes_gpus_times_their_limits() -> None:
    assert sweep.gpu_hours(composed(*LIMITS)) == 4 * 1 + 7 * 4 * 1.5
    assert sweep.gpu_hours(composed(LIMITS[0])) is None
    assert sweep.gpu_hours(compose()) == 0


def test_gpu_hours_are_told_and_so_is_what_is_not_known() -> None:
    limited = composed(*LIMITS)
    assert sweep.budget([limited] * 3) == "3 runs of up to 138 GPU-hours (GPUs x time limit, without restarts)"
    assert sweep.budget([limited, composed(LIMITS[1])]) == (
        "1 run of up to 46 GPU-hours (GPUs x time limit, without restarts) and 1 run of unknown GPU-hours, because "
        "no time limit is set (cluster.groups.hgx.time_min)"
    )
    assert sweep.budget([compose()]) is None
    assert sweep.budget([]) is None


def test_many_gpu_hours_need_consent() -> None:
    limited = composed(*LIMITS, "confirm_gpu_hours=100")
    assert sweep.must_confirm([limited] * 2) is None
    assert sweep.must_confirm([limited] * 3) == "up to 138 GPU-hours exceed confirm_gpu_hours=100"
    assert sweep.must_confirm([replace(limited, yes=True)] * 3) is None
    assert sweep.must_confirm([]) is None


def test_the_table_shows_the_overrides_that_differ() -> None:
    assert differing([("model=tiny", "a=1", "b=1"), ("model=tiny", "a=1", "b=2")]) == ["b=1", "b=2"]
    assert differing([("model=tiny", "a=1")]) == ["model=tiny a=1"]
    assert differing([]) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_consent_is_asked(answer: str, agreed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", asked := Terminal())
    many = [composed(*LIMITS, "confirm_gpu_hours=10")]
    if agreed:
        confirm(many)
    else:
        with pytest.raises(LaunchError, match="not confirmed: nothing was submitted"):
            confirm(many)
    assert asked.getvalue().endswith("up to 46 GPU-hours exceed confirm_gpu_hours=10; submit? [y/N] ")


def test_elsewhere_the_message_names_the_keys() -> None:
    with pytest.raises(
        LaunchError, match=r"46 GPU-hours.*confirm_gpu_hours=10: nothing was submitted; confirm with yes=true"
    ):
        confirm([composed(*LIMITS, "confirm_gpu_hours=10")])


def test_a_dry_run_tells_gpu_hours_without_asking(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("dry_run=true", "confirm_gpu_hours=10", "parallel.micro_batch_size=1,2,4", "max_jobs=2")
    assert launch("-m", *SEED, *LIMITS, *given) == 0
    captured = capsys.readouterr()
    assert captured.err == "3 runs of up to 138 GPU-hours (GPUs x time limit, without restarts)\n"
    assert captured.out.count("#SBATCH --dependency='afterany:<jobs of run 1>'\n") == 1
    assert captured.out.count("afterany") == 1
    assert not here.exists()


def test_keys_of_the_whole_sweep_have_one_value(here: Path) -> None:
    with pytest.raises(LaunchError, match=r"max_jobs=1,null: it applies to a sweep as a whole; give it one value"):
        launch("-m", "max_jobs=1,null", *SHORT)
    assert not here.exists()


def test_nothing_is_started_before_all_combinations_are_checked(here: Path) -> None:
    """The last one cannot be composed by Hydra."""
    with pytest.raises(ConfigError, match="Could not find 'model/moon'"):
        launch("-m", "model=tiny,moon", *SHORT)
    assert not here.exists()


def test_after_an_interruption_the_table_has_what_was_started(here: Path) -> None:
    sweeping = tdpp("launch", "-m", "parallel.global_batch_size=4,8,12", "train.iterations=100000", cwd=here.parent)
    wait_for(lambda: list(RunDir.all(here)))
    run = RunDir.find(here, None)
    wait_until_running(run)
    sweeping.send_signal(signal.SIGTERM)
    out, err = sweeping.communicate(timeout=PATIENCE_S)
    assert sweeping.returncode == 130
    assert [(row[0], row[1].split()[0], row[2]) for row in table(out)] == [
        (run.name, "parallel.global_batch_size=4", "stopped")
    ]
    assert err.splitlines()[-1] == "2 of 3 combinations not started"


def test_a_run_that_is_interrupted_before_it_is_followed_is_stopped(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, while it is looked whether there is anything to stop, does not keep it from that."""

    def interrupted(run: RunDir) -> None:
        raise KeyboardInterrupt

    def again(run: RunDir) -> Observation:
        signal.raise_signal(signal.SIGINT)
        return observe(run)

    monkeypatch.setattr("launch.control.follow.observe", again)
    for module in ("launch.sweep.start", "launch.commands.launch"):
        monkeypatch.setattr(f"{module}.follow", interrupted)
    for words in (["train.iterations=100000"], ["resume=latest"]):
        with pytest.raises(KeyboardInterrupt):
            launch(*words)
        (run,) = RunDir.everything(here)
        assert judge(run).state is State.stopped
        assert observe(run).over


def test_an_interrupted_command_that_has_started_nothing_stops_no_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else follows it: `resume=` would have refused it, had it not been interrupted twice."""

    def interrupted(run: RunDir) -> None:
        raise KeyboardInterrupt

    follower = tdpp("launch", "train.iterations=100000", cwd=here.parent)
    wait_for(lambda: list(RunDir.all(here)))
    run = RunDir.find(here, None)
    wait_until_running(run)
    monkeypatch.setattr("launch.control.submit.observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch("resume=latest")
    assert judge(run).state is State.running
    follower.send_signal(signal.SIGTERM)
    follower.communicate(timeout=PATIENCE_S)
    assert judge(run).state is State.stopped


def test_what_is_under_way_is_finished_before_an_interruption() -> None:
    finished = []
    with pytest.raises(KeyboardInterrupt), finishing():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.01)
        finished.append(True)
    assert finished
    with pytest.raises(KeyboardInterrupt), finishing():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the second one does not wait")


SWEPT = ("-m", "train.seed=1,2,3", "train.log_interval=1")


def newest_sweep(runs: Path) -> Path:
    return max((runs / "sweeps").iterdir())


def test_a_sweep_that_is_resumed_starts_what_is_missing_and_goes_on_with_what_ended_early(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs one succeeded, one was stopped and has saved, and one is not there."""
    begun = here.parent / "begun"
    begun.mkdir()
    words = (*SWEPT, f"runs_dir={here}", "train.iterations=150", "name=swept")
    process = tdpp("launch", *words, cwd=begun)
    wait_for(lambda: len(list(here.glob("swept/*/plan.json"))) == 2)
    second = RunDir.find(here, None)
    wait_for(second.metrics.exists)
    assert stop_command.main([str(second.path)]) == 0
    process.communicate(timeout=PATIENCE_S)
    first, stopped, third = RunDir.everything(here)
    assert [judge(run).state for run in (first, stopped, third)] == [State.succeeded, State.stopped, State.succeeded]
    assert stopped.latest_checkpoint.exists()
    shutil.rmtree(third.path)
    monkeypatch.chdir(here.parent)
    capsys.readouterr()
    assert launch(f"resume={newest_sweep(here)}") == 0
    rows = table(capsys.readouterr().out)
    assert len(rows) == 3
    assert [judge(run).state for run in RunDir.everything(here)] == [State.succeeded] * 3
    assert len(list(here.glob("swept/*"))) == 3
    assert second.read_json(second.jobs)["submission"] == 1
    assert len(list((here / "sweeps").iterdir())) == 1
    assert launch(f"resume={newest_sweep(here).name}", f"runs_dir={here}") == 0  # nothing is left to be started
    assert len(list(here.glob("swept/*"))) == 3


def test_a_sweep_that_cannot_be_resumed_says_why(here: Path) -> None:
    sweep = here / "sweeps" / "20260101-120000Z"
    sweep.mkdir(parents=True)
    with pytest.raises(LaunchError, match="of an earlier version of tdpp; type its command again with skip_existing"):
        launch(f"resume={sweep}")
    (sweep / "words.json").write_text('{"words": ["-m", "hydra/sweeper=optuna"], "cwd": "/"}')
    (sweep / "words.json").chmod(0o644)
    with pytest.raises(LaunchError, match="its sweeper chooses each combination by the results before"):
        launch(f"resume={sweep}")
    (sweep / "words.json").write_text('{"words": ["-m", "model.layers=4,6"], "cwd": "/gone"}')
    with pytest.raises(LaunchError, match="/gone, where it was started, is not there any more"):
        launch(f"resume={sweep}")
    (sweep / "words.json").write_text('{"words": 1, "cwd": "/"}')
    with pytest.raises(LaunchError, match=r"words\.json is damaged: words=1 must be a list"):
        launch(f"resume={sweep}")
    (sweep / "words.json").chmod(0o666)
    with pytest.raises(LaunchError, match=r"words\.json can be written by others \(mode 666\), so somebody else could"):
        launch(f"resume={sweep}")


def test_a_sweep_that_is_resumed_finds_its_runs_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started with TDPP_RUNS_DIR, which this shell does not have."""
    sweep = tmp_path / "elsewhere" / "sweeps" / "20260101-120000Z"
    sweep.mkdir(parents=True)
    (sweep / "words.json").write_text(json.dumps({"words": ["-m", "train.seed=1,2"], "cwd": str(tmp_path)}))
    (sweep / "words.json").chmod(0o644)
    monkeypatch.delenv(RUNS_DIR, raising=False)
    seen = []

    def of_sweep(sweep: SweepWords) -> int:
        seen.append((sweep.words, usual_runs_dir(), Path.cwd()))
        return 0

    assert resumed([f"resume={sweep}"], lambda run: 1, of_sweep) == 0
    assert seen == [(("-m", "train.seed=1,2"), tmp_path / "elsewhere", tmp_path)]
    assert RUNS_DIR not in os.environ
