"""Looks at a run: on disk, among the processes of this machine, and by Slurm."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase

from conf.run_folder.gpu_lines import entries as gpu_entries
from conf.run_folder.run_files import entries, read_text
from conf.run_folder.rundir import RunDir
from conf.visible import shortened
from launch.errors import LaunchError
from launch.files.locks import owner_of
from launch.files.records import REQUEUED, Goal, RestartRecord, SpentRecord, Start, StopRecord
from launch.files.run_files import Faults, RunFiles, read_run_files, states_of
from launch.machine import slurm_commands
from launch.node.elastic.peer_status import REGROUPS
from launch.node.rank_failures import STILL_S, read_doings
from launch.node.run_notices import restart_cause
from launch.observe.executors import Answers, Records, executor_of, launch_of
from launch.observe.iterations import clocks_of, read_log, read_times
from launch.observe.observation import READINGS, Job, NodeGpus, Observation, RunKind, SeenNode
from megatron_ext.contract.errors import RankFailure
from megatron_ext.contract.kept import newest as newest_kept
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import checkpoint_iteration

ERR_TAIL_BYTES = 128 * 1024
"""How much of nodes/<node>.err is read where a process of the node died."""
GPU_TAIL_BYTES = 16 * 1024
"""How much of nodes/<node>.gpu is read: the last three readings of 16 GPUs, and more."""
ACCOUNTING_S = 5.0
"""How long a look waits for Slurm's accounting to say why a waiting run is started again."""


def observe(run: RunDir, now: float | None = None) -> Observation:
    """Looks at everything once. `now` is in seconds since 1970. Raises RunFolderError: plan.json or jobs.json is not
    what it should be."""
    before = read_run_files(run)
    return finish_observation(before, answers_to([before]), now)


def observe_all(runs: Iterable[RunDir]) -> list[Observation]:
    """Looks at several runs, and asks Slurm once about all of them; raises as `observe` does."""
    before = [read_run_files(run) for run in runs]
    answers = answers_to(before)
    return [finish_observation(one, answers) for one in before]


def finish_observation(before: RunFiles, answers: Answers, now: float | None = None) -> Observation:
    """Looks at everything else, now that Slurm has answered what `before` asks; raises as `observe` does."""
    run, plan, submitted = before.run, before.plan, before.submitted
    follows_files = now is None
    now = _now(before) if now is None else now
    submitted_unix = run.jobs.stat().st_mtime  # written without jobs first, and last when all are submitted
    faults = Faults()
    # Processes and jobs first: what ends in between is then seen by what it left, not taken for lost.
    executor = executor_of(before, answers)
    records: Records = before.states if before.done else states_of(run, plan, faults)
    faults += before.faults if before.done else ()
    clocks = clocks_of(run, records, follows_files=follows_files)
    records = {name: clocks.of_node(name, record) for name, record in records.items()}
    start = _newest(before, records, executor.jobs)
    stop_unix = _stop_unix(run, faults)
    launch = launch_of(before, executor, submitted_unix, now, stopped=stop_unix is not None)
    nodes, jobs = executor.nodes(records, start, launch, now)
    errors = list(_errors(run, plan, start, faults))
    log = read_log(run.metrics, faults)
    log = tuple(clocks.of_line(line, before.names[plan.ranks[-1].node]) for line in log)
    stands_still = bool(errors) or not log or now - log[-1].unix > STILL_S
    started = {node.name: node.started_unix for node in nodes if node.started_unix is not None}
    disk = os.statvfs(run.path)
    spent = faults.tried(lambda: run.read(run.spent, SpentRecord), None) if plan.train.max_cost is not None else None
    return Observation(
        kind=RunKind.rehearsal if plan.rehearsal else RunKind(submitted.executor),
        launched_unix=run.launched_unix,
        plan=plan,
        runs_dir=str(run.runs),
        now_unix=now,
        stop_unix=stop_unix,
        free_bytes=disk.f_bavail * disk.f_frsize,
        read_only=any(not node.ended and not node.alive for node in nodes) and _is_read_only(run),
        clocks=clocks.words,
        jobs=jobs,
        after=submitted.after,
        job_ids=tuple(submitted.by_id) if submitted.on_slurm else (),
        silence=str(answers) if jobs and isinstance(answers, LaunchError) else None,
        cut_off=launch.cut_off(nodes),
        start=start,
        restarted=_restart(run, start, jobs, now, faults),
        saved=_saved(run, faults),
        kept=_kept(plan, start, nodes, errors),
        spent=None if spent is None else spent.dollars,
        nodes=tuple(_with_stderr(run, node, errors, faults) for node in nodes),
        errors=tuple(sorted(errors, key=lambda error: error.unix)),
        goal=faults.tried(lambda: run.read(run.goal, Goal), None),
        log=log,
        times=read_times(run.metrics, log),
        doings=read_doings(run, plan, started, faults) if stands_still else (),
        gpus=_gpus(run, plan, nodes, faults) if plan.device == "cuda" else (),
        faults=tuple(faults),
    )


def answers_to(looks: Iterable[RunFiles]) -> Answers:
    """What Slurm says of the jobs that runs have to ask about."""
    looks = list(looks)
    try:
        unrecorded = _unrecorded([look for look in looks if look.unrecorded])
        states = slurm_commands.job_states([*(job for look in looks for job in look.asks), *unrecorded.values()])
    except LaunchError as error:
        return error
    return states | {comment: states[job] for comment, job in unrecorded.items() if job in states}


def _unrecorded(looks: Sequence[RunFiles]) -> dict[str, str]:
    """Jobs in the queue whose ids nobody wrote down, by their comments; a run has at most one."""
    queue = slurm_commands.by_comment({owner_of(look.run) for look in looks}) if looks else {}
    found = {}
    for look in looks:
        comment = slurm_commands.comment_of(look.submitted.token)
        for job in set(queue.get(comment, ())) - set(look.asks):
            found[comment] = job
    return found


def _now(look: RunFiles) -> float:
    """Returns this machine's time, but none before the nodes' last signs of life by the file system's: either clock may
    have been set."""
    written = [0.0]
    for name, state in look.states.items():
        with suppress(OSError):
            written += [look.run.node_state(name).stat().st_mtime] if state is not None else []
    return max(time.time(), *written)


def _is_read_only(run: RunDir) -> bool:
    """Whether the file system lets nothing be written. One that became so by an error may still call itself writable;
    opening a file to write, which changes nothing, shows it."""
    try:
        os.close(os.open(run.jobs, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def _stop_unix(run: RunDir, faults: Faults) -> float | None:
    """When the run was asked to stop; that it was, the file shows whatever is in it."""
    request = faults.tried(lambda: run.read(run.stop_request, StopRecord), None)
    if request is not None:
        return request.unix
    try:
        return run.stop_request.lstat().st_mtime
    except OSError:
        return None


def _errors(run: RunDir, plan: Plan, start: Start, faults: Faults) -> Iterator[RankFailure]:
    """Reads the errors of this start, and what ranks say that were started by hand."""
    for path in faults.tried(lambda: entries(run.errors), ()):
        if not fnmatchcase(path.name, "rank-*.json"):
            continue
        error = faults.tried(lambda path=path: run.read(path, RankFailure), None)  # type: ignore[misc]
        if error is None or error.start not in ("", str(start)):
            continue
        if error.rank >= len(plan.ranks) or error.node != plan.nodes[plan.ranks[error.rank].node].name:
            faults.add(f"{path} is damaged: plan.json has no rank {error.rank} on a node {error.node!r}")
            continue
        yield error


def _gpus(run: RunDir, plan: Plan, nodes: tuple[SeenNode, ...], faults: Faults) -> tuple[NodeGpus, ...]:
    ranks = {node.name: len(node.ranks) for node in plan.nodes}

    return tuple(
        NodeGpus(
            node=node.name,
            ranks=ranks[node.name],
            entries=gpu_entries(
                faults.tail(run.node_gpu(node.name), GPU_TAIL_BYTES).decode(errors="replace"), READINGS
            ),
        )
        for node in nodes
        if node.state == "running" and node.alive
    )


def _newest(before: RunFiles, states: Records, jobs: tuple[Job, ...]) -> Start:
    """The newest start that a node has written of; the one after it, if a job waits to be started again."""
    starts = _starts(states)
    newest = max([before.planned, *starts.values()])
    requeued = any(state is not None and state.of == newest and state.state == REQUEUED for state in states.values())
    # What was written only after Slurm had called the job pending does not mean that it waits for yet another start.
    earlier = _starts(before.states)
    waiting = any(job.state and job.state.pending and earlier.get(name) == newest for job in jobs for name in job.nodes)
    return Start(newest.submission, newest.restarts + 1) if requeued or waiting else newest


def _restart(run: RunDir, start: Start, jobs: Sequence[Job], now: float, faults: Faults) -> RestartRecord | None:
    """Why Slurm starts the run again. While its job waits, no agent may be there to write that: Slurm is asked."""
    written = faults.tried(lambda: run.read(run.restarted(str(start)), RestartRecord), None)
    waits = [job.id for job in jobs if job.state is not None and job.state.pending]
    if written is not None or start.restarts == 0 or not waits:
        return written
    try:
        cause = restart_cause([job.id for job in jobs], start, waits[0], ACCOUNTING_S)
    except LaunchError:
        return None
    return None if cause is None else RestartRecord(unix=now, reason=cause.reason)


def _starts(states: Records) -> dict[str, Start]:
    return {name: state.of for name, state in states.items() if state is not None}


def _with_stderr(run: RunDir, node: SeenNode, errors: Iterable[RankFailure], faults: Faults) -> SeenNode:
    died = any(error.node == node.name and error.type == "Killed" for error in errors)
    if not died and not (node.ended and node.exit_code):
        return node
    end = faults.tail(run.node_err(node.name), ERR_TAIL_BYTES, node.err_begin).decode(errors="replace")
    return replace(node, no_memory=memory_sign(end), error=first_error(end))


def _saved(run: RunDir, faults: Faults) -> int | None:
    latest = run.latest_checkpoint
    try:
        name = faults.tried(lambda: read_text(latest).strip(), None)
    except FileNotFoundError:
        return None
    saved = None if name is None else checkpoint_iteration(name)
    if name is not None and saved is None:
        faults.add(f"{latest} is damaged: it names no checkpoint, such as iter_0000050")
    return saved


def _kept(plan: Plan, start: Start, nodes: Sequence[SeenNode], errors: Sequence[RankFailure]) -> int | None:
    """Asks the nodes that are there, where some of an elastic run make a new plan; only its user gets an answer."""
    waiting = any(node.state == REGROUPS for node in nodes)
    if plan.train.save_memory is None or not (waiting or errors):
        return None
    found = newest_kept(plan.files, [node.name for node in nodes if node.alive], str(start))
    return None if found is None else found.at.iteration


_SIGNS = re.compile(
    r"bad_alloc|memoryerror\b|out ?of ?memory|can(not|'t) allocate memory|not enough memory|"
    r"memory allocation (still )?failed|failed to allocate memory|unable to allocate",
    re.IGNORECASE,
)
_OF_A_RANK = re.compile(r"\[rank \d+ \(")
"""What a rank says of its own end, which is in its error file too."""


def memory_sign(stderr: str) -> str | None:
    """The first line that says that memory ran out, other than for a rank that reported it itself."""
    lines = (line.strip() for line in stderr.splitlines())
    return next((line for line in lines if _SIGNS.search(line) and not _OF_A_RANK.match(line)), None)


_OURS = re.compile(r"^(?:\[rank \d[^\]]*\] )?(?:tdpp: )?error: (.+)")
"""How our own programs begin an error; its remedy stands in the same line."""
_NO_ERROR = re.compile(
    r"^\s|\b\w*Warning\b|\bWARNING\b|^(srun|slurmstepd\S*): |^\[?W\d{3}|^During handling|^Current thread |^Traceback \("
)
"""Lines that say nothing of why: within a traceback, warnings, and that a step of Slurm has ended."""


def first_error(stderr: str) -> str | None:
    """The first error of ours; else the last line that says why, such as that of a traceback; None without any."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    ours = next((match[1] for line in lines if (match := _OURS.match(line))), None)
    line = ours or next((line for line in reversed(lines) if not _NO_ERROR.search(line)), None)
    return None if line is None else shortened(line)
