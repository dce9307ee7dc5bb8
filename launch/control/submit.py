"""From an experiment to a run that has been started, or to nothing at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from conf import utf8
from conf.compose import config_text, read_experiment
from conf.errors import RunFolderError, reworded
from conf.identity import identity
from conf.run_folder.rundir import CODE, RunDir, is_full
from conf.schema.adapt import NOW
from conf.schema.experiment import ContainerKind, ExecutorKind, Experiment, RunsMode
from launch.control import megatron_lm
from launch.control.executors import hosts, local, slurm
from launch.control.executors.free_nodes import free_now
from launch.control.notify import settings_of
from launch.control.planning.checks import check, check_supported, profiler_of, require_exported
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.files.code_snapshot import Snapshot, keep_code
from launch.files.locks import check_may_resume, launching
from launch.files.own_path import own_folder, require_own_file, require_place
from launch.files.records import Origin
from launch.files.run_files import read_submitted
from launch.judge.state import State
from launch.judge.verdict import decide, verdict_without_plan
from launch.machine.container_commands import run_container
from launch.machine.provenance import PROJECT, Source, provenance, read_source
from launch.node.elastic.replan import replanned
from launch.node.own_caches import check_environment, without_torchs_default
from launch.node.settings import NodeSettings
from launch.node.worker_command import WORKER, ModuleWorker, ProfiledWorker, Profiler, Worker
from launch.observe.look import observe
from launch.tracking.run_info import require_ready
from megatron_ext.contract.files import digest_of_file, read_regular, why, write_atomic
from megatron_ext.contract.models.hf_config import config_file
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.rules.engine import MEGATRON_LM
from megatron_ext.contract.worker import TOKEN

Sound = Callable[[Plan, Experiment], None]
"""Raises TdppError if a run cannot go on as it was planned and configured."""


def submit(
    experiment: Experiment, overrides: Sequence[str], worker: str = WORKER, *, for_itself: bool = False
) -> RunDir:
    """Checks an experiment and starts it, as `check` and `start` do."""
    check(experiment)
    return start(experiment, overrides, worker, read_source(), for_itself=for_itself)


def start(
    experiment: Experiment,
    overrides: Sequence[str],
    worker: str,
    source: Source,
    behind: Sequence[str] = (),
    *,
    for_itself: bool = False,
) -> RunDir:
    """Makes the run's folder and starts the run. If anything goes wrong, no process, job or folder is left.

    On Slurm it waits in the queue until the jobs with the ids `behind` have ended. `for_itself`: see `NodeSettings`.

    Raises:
        TdppError: the run cannot be started.
    """
    experiment = _with_run_before(experiment)
    config = config_text(experiment)
    in_group = experiment.runs_mode is RunsMode.group
    trusted = require_place(Path(experiment.runs_dir), experiment.name, group=in_group)
    run = RunDir.create(
        Path(experiment.runs_dir), experiment.name, identity(experiment), datetime.now(), group=in_group
    )
    token = secrets.token_hex(16)
    try:
        with launching(run):
            _require_group(run, trusted)
            with own_folder(run.path, run.submitit.name, group=in_group):  # while it was made, others could
                kept = _keep_code(experiment, run)
                plan = _from_kept(kept, make_plan(experiment, run.name))
            _make_cache(plan.data_cache)
            with _report_unwritable(run):
                write_atomic(run.config, config)
                if experiment.parallel.schedule_file is not None:
                    write_atomic(run.schedule, read_schedule(experiment.parallel.schedule_file))
                write_atomic(run.overrides, "".join(f"{override}\n" for override in overrides))
                write_atomic(run.diff, source.diff)
                code = {} if kept is None else {"code": kept.as_json()}
                run.write_json(run.provenance, provenance(source) | code)
                kinds = {"executor": str(experiment.executor.kind), "container": str(experiment.container.kind)}
                if (after := experiment.executor.after) is not None:
                    kinds["after"] = after
                run.write_json(run.jobs, {"token": token, **kinds, "submission": 0, "jobs": []})
                run.write_json(run.plan, plan.as_json())  # last: what has no plan was never started
            _start(experiment, run, plan, worker, behind, for_itself=for_itself)
    except BaseException:
        shutil.rmtree(run.path)
        with contextlib.suppress(OSError):  # other runs of the name are there
            run.path.parent.rmdir()
        raise
    return run


def _keep_code(experiment: Experiment, run: RunDir) -> Snapshot | None:
    """The user's code, which may be edited from now on; None if there is none."""
    if experiment.model.code is None:
        return None
    with reworded(LaunchError, f"model.code={experiment.model.code}: it cannot be copied to {run.path / CODE}: "):
        return keep_code(Path(experiment.model.code_file), run)


def _from_kept(kept: Snapshot | None, plan: Plan) -> Plan:
    """The plan whose ranks run the code that was kept."""
    if kept is None:
        return plan
    model = plan.model
    if digest_of_file(kept.file) != model.code_digest:
        raise LaunchError(f"model.code={model.code} was changed while the run was launched; launch it again")
    return replace(plan, model=replace(model, code=f"{kept.file}:{str(model.code).rpartition(':')[2]}"))


def _require_group(run: RunDir, trusted: int | None) -> None:
    """Raises LaunchError where a run has got the group of a folder that somebody else has just made for its name."""
    if trusted is not None and run.path.stat().st_gid not in (trusted, os.getegid()):
        raise LaunchError(
            f"{run.path} does not belong to the group of {run.runs}, which runs_mode=group requires; launch it again"
        )


def _make_cache(folder: str | None) -> None:
    """Makes the folder of index maps, before a container is to find it."""
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"data.cache={folder}: cannot be created ({error.strerror}: {error.filename}); give a folder that you may "
            f"write to"
        ) from error


def read_schedule(path: str) -> str:
    """The content of `parallel.schedule_file`; the engine checks it."""
    with reworded(
        LaunchError,
        f"parallel.schedule_file={path}: cannot be read as text (",
        "); give the path of a schedule, such as 'python -m megatron_ext.schedule' prints, or null",
        of=(OSError, UnicodeDecodeError),
    ):
        return read_regular(Path(path)).decode()


def resume(run: RunDir, worker: str = WORKER, sound: Sound = lambda plan, experiment: None) -> None:
    """Starts a run again that ended early; it goes on from its newest checkpoint, which `sound` checks. Raises
    TdppError: it cannot be, or has nothing left to do; it is then as it was."""
    check_may_resume(run)
    if (verdict := verdict_without_plan(run)) is not None:
        way_out = "wait until it is done, or stop it" if verdict.state is State.starting else "launch it again"
        raise LaunchError(f"resume={run.name}: {verdict.reason}; there is nothing to resume: {way_out}")
    with launching(run):
        require_own_file(run.config)  # it says whether the run's folder may be its group's to write
        experiment = read_experiment(run.config)
        with own_folder(run.path, run.submitit.name, group=experiment.runs_mode is RunsMode.group):
            _resume(run, experiment, worker, sound)


def _resume(run: RunDir, experiment: Experiment, worker: str, sound: Sound) -> None:
    seen = observe(run)
    verdict = decide(seen)
    if verdict.state is State.unknown:
        raise LaunchError(f"resume={run.name}: it may still be running: {verdict.reason}")
    if not seen.over:
        raise LaunchError(
            f"resume={run.name}: it has not ended yet: {verdict.state}, {verdict.reason}; 'tdpp stop' ends it"
        )
    plan = run.read_plan()
    if not plan.resumable:
        raise LaunchError(
            f"resume={run.name}: cannot be resumed, because it saves no checkpoints "
            f"(train.checkpoint=false, or a rehearsal); launch it again"
        )
    if verdict.state is State.succeeded:
        raise LaunchError(
            f"resume={run.name}: it has finished ({verdict.reason}); to train further, start a new run with a larger "
            f"train.{plan.train.length_key} and train.load={run.path}"
        )
    _require_same_code(run, plan)
    with launch_directory(run):
        sound(plan, experiment)
    check_supported(experiment)
    require_exported(experiment, os.environ)
    require_ready(experiment.log, {**os.environ, **experiment.cluster.environment})
    before, stopped, planned = run.read_json(run.jobs), run.read_json(run.stop_request), plan
    if plan.elastic is not None:
        plan = replanned(plan, free_now(experiment) if experiment.elastic.start == NOW else range(len(plan.nodes)))
    with _report_unwritable(run):
        run.write_json(run.jobs, {**before, "submission": seen.start.submission + 1, "jobs": []})
        if plan.elastic is not None:
            run.write_json(run.plan, plan.as_json())
    run.stop_request.unlink(missing_ok=True)
    try:
        with launch_directory(run):
            _start(experiment, run, plan, worker)
    except BaseException:
        run.write_json(run.jobs, before)
        if plan.elastic is not None:
            run.write_json(run.plan, planned.as_json())
        if stopped is not None:
            run.write_json(run.stop_request, stopped)
        raise


def _require_same_code(run: RunDir, plan: Plan) -> None:
    """A run of another model.code or model.config would be another run; its ranks would refuse it."""
    model = plan.model
    if model.code_digest is None:
        return
    said = f"model.config={model.config}" if model.code is None else f"model.code={model.code}"
    path = Path(config_file(str(model.config)) if model.code is None else model.code.rpartition(":")[0])
    try:
        if digest_of_file(path) == model.code_digest:
            return
        wrong = "has changed since the run was launched"
    except OSError as error:
        wrong = f"cannot be read: {why(error)}"
    raise LaunchError(
        f"resume={run.name}: {said}: {path} {wrong}; restore it, or start a new run with its "
        f"weights: train.load={run.path}"
    )


def launch_directory(run: RunDir, word: str = "resume=") -> contextlib.AbstractContextManager[None]:
    """Changes into the folder in which a run was launched. There relative paths of its configuration, such as
    container.image_dir, lead where they led; a folder that is gone is nobody's any more. `word` is the user's."""
    with reworded(LaunchError, f"{word}{run.name}: the folder it was launched from is unknown: ", of=RunFolderError):
        origin = run.read(run.provenance, Origin)
    folder = Path(origin.cwd if origin is not None else ".")
    return contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext()


@contextlib.contextmanager
def _report_unwritable(run: RunDir) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise LaunchError(f"{run.path}: cannot be written ({error.strerror}); change its permissions") from error
    except OSError as error:
        if not is_full(error):
            raise
        raise LaunchError(
            f"{run.path}: cannot be written: {error.strerror}; free some space there, or choose another runs_dir"
        ) from error


def _start(
    experiment: Experiment,
    run: RunDir,
    plan: Plan,
    worker: str,
    behind: Sequence[str] = (),
    *,
    for_itself: bool = False,
) -> None:
    with _report_unwritable(run):
        run.keep_secret()
        if (recipients := settings_of(experiment)) is not None and not for_itself:
            run.write_json(run.notify, recipients)
    jobs = run.read_json(run.jobs)
    token, executor = jobs["token"], experiment.executor
    on_slurm = executor.kind is ExecutorKind.slurm
    environment = run_environment(experiment, plan, token, os.environ)
    container = run_container(experiment, plan, run.path, PROJECT)
    check_environment({**(without_torchs_default(os.environ) if container is None else {}), **environment}, make=False)

    def settings(nodes: tuple[int, ...], het_groups: tuple[int | None, ...]) -> NodeSettings:
        return NodeSettings(
            run=run,
            model=experiment.model.name,
            environment=environment,
            environment_from=tuple(experiment.cluster.environment_from),
            worker=node_worker(experiment, plan, run, worker),
            container=container,
            nodes=nodes,
            het_groups=het_groups,
            submission=jobs["submission"],
            resumable=plan.resumable,
            group_writes=experiment.runs_mode is RunsMode.group,
            meet_s=executor.meet_min * 60,
            save_s=executor.save_s if on_slurm else local.warning_s(executor),
            max_requeues=executor.max_requeues if on_slurm else 0,
            gpu_interval_s=experiment.profile.gpu_interval_s if plan.device == "cuda" else 0,
            trackers=tuple(experiment.log),
            for_itself=for_itself,
        )

    if executor.kind is ExecutorKind.hosts:
        hosts.start(experiment, run, token, lambda node: settings((node,), (None,)))
    elif on_slurm:
        submission = slurm.submission_of(
            experiment, run.path, token, plan.resumable, behind, _jobs_before(experiment, run), jobs["submission"]
        )
        slurm.start(experiment, run, submission, lambda request: settings(request.nodes, request.het_groups))
    else:
        count = len(plan.nodes)
        local.start(settings(tuple(range(count)), (None,) * count), token, executor.time_min)


def _with_run_before(experiment: Experiment) -> Experiment:
    """The same with the whole name of the run in `executor.after`: soon the new run is the latest, and has its name.
    Raises LaunchError: there is no such run."""
    name, runs = experiment.executor.after, Path(experiment.runs_dir)
    if name is None or experiment.executor.kind is not ExecutorKind.slurm:
        return experiment
    before = _run_before(name, runs)
    after = before.name if before.runs == Path(os.path.abspath(runs)) else str(before.path)  # noqa: PTH100
    return replace(experiment, executor=replace(experiment.executor, after=after))


def _run_before(name: str, runs: Path) -> RunDir:
    with reworded(LaunchError, f"executor.after={name}: ", of=RunFolderError):
        return RunDir.find(runs, name)


def _jobs_before(experiment: Experiment, run: RunDir) -> tuple[str, ...]:
    """The jobs of `executor.after` for which a run waits. One that has saved has waited already: what it waited for may
    be deleted by now. Raises TdppError: there is no such run, it is not Slurm's, or it has ended badly."""
    if (name := experiment.executor.after) is None or run.latest_checkpoint.exists():
        return ()
    before = _run_before(name, Path(experiment.runs_dir))
    seen = observe(before)
    verdict = decide(seen)
    if verdict.state is State.succeeded:
        return ()
    if seen.over:
        raise LaunchError(
            f"executor.after={name}: {before.name} has ended: {verdict.state}, {verdict.reason}; resume it "
            f"('tdpp launch resume={name}') and launch this run then, or leave executor.after out"
        )
    submitted = read_submitted(before, len(before.read_plan().nodes))
    ids = tuple(submitted.by_id)
    if not (submitted.on_slurm and ids):
        raise LaunchError(
            f"executor.after={name}: {before.name} has no jobs in Slurm's queue that could be waited for "
            f"({verdict.state}, {verdict.reason}); launch this run when it has ended"
        )
    return ids


def node_worker(experiment: Experiment, plan: Plan, run: RunDir, module: str) -> Worker:
    """What runs the ranks of a node; `module` is their worker."""
    container = experiment.container
    python = sys.executable if container.kind is ContainerKind.none else container.python
    return profiled(ModuleWorker(module, python), experiment, plan)


def profiled(worker: ModuleWorker, experiment: Experiment, plan: Plan) -> Worker:
    """The worker under the profiler that the run is to have, or as it is."""
    profiler = profiler_of(experiment)
    if profiler is None:
        return worker
    captured = plan.trace_iteration if profiler is Profiler.nsys and plan.device == "cuda" else None
    return ProfiledWorker(worker=worker, profiler=profiler, nodes=tuple(plan.node_names), iteration=captured)


def run_environment(experiment: Experiment, plan: Plan, token: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the run gives to every worker, over what the worker inherits. `inherited` is this shell's environment."""
    given = {"PYTHONPATH": str(PROJECT), utf8.VARIABLE: "1"}  # plan.json names paths in UTF-8
    if experiment.container.kind is ContainerKind.none:  # this shell's folders are not in a container
        paths = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(PROJECT))]
        given["PYTHONPATH"] = os.pathsep.join([str(PROJECT), *paths])
        given["PYTHONSAFEPATH"] = "1"  # not what lies in the folder where the run was launched
    if plan.device == "cpu":
        given["OMP_NUM_THREADS"] = "1"
    if plan.engine == MEGATRON_LM:
        given |= megatron_lm.ENVIRONMENT
    # On Slurm a job's GPUs are known on its nodes, not by this shell.
    if experiment.executor.kind is ExecutorKind.local and "CUDA_VISIBLE_DEVICES" in inherited:
        given["CUDA_VISIBLE_DEVICES"] = inherited["CUDA_VISIBLE_DEVICES"]
    return given | dict(experiment.cluster.environment) | {TOKEN: token}
