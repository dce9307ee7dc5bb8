"""Looks at a run: on disk, among the processes of this machine, and by Slurm."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase

from conf.run_folder.gpu_lines import entries as gpu_entries
from conf.run_folder.run_files import entries, read_text
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.owner import has_rights_of, owner_of
from launch.files.records import (
    REQUEUED,
    Goal,
    JobRecord,
    NodeRecord,
    Origin,
    RestartRecord,
    SpentRecord,
    Start,
    StopRecord,
    Submitted,
)
from launch.files.run_files import Faults, RunFiles, read_run_files, states_of
from launch.machine import processes, slurm_commands
from launch.machine.job_states import JobState
from launch.node.missing_run_dir import Unseen, not_started, unlaunched
from launch.node.peers import SILENCE_S
from launch.node.rank_failures import STILL_S, read_doings
from launch.observe.iterations import clocks_of, read_log, read_text_log, read_times
from launch.observe.observation import READINGS, Job, Kind, Node, NodeGpus, Observation
from launch.observe.stderr_signs import first_error, memory_sign
from megatron_ext.contract.failure import RankFailure
from megatron_ext.contract.plan import MEGATRON_LM, Plan
from megatron_ext.contract.run_files import checkpoint_iteration

ERR_TAIL_BYTES = 128 * 1024
"""Of nodes/<node>.err, where a process of the node died."""
GPU_TAIL_BYTES = 16 * 1024
"""Of nodes/<node>.gpu: the last three readings of 16 GPUs, and more."""
SUBMISSION_S = 120.0
"""A launch is cut off if it has not named its jobs after this time, where nothing shows whether it goes on."""
START_S = 5.0
"""A run without a process counts as lost after this time; before, it is still being started."""


States = Mapping[str, NodeRecord | None]
Answers = Mapping[str, JobState] | LaunchError
"""The states of jobs by their ids, and of those whose ids nobody wrote down by their comments; or why Slurm does not
say."""


def observe(run: RunDir, now: float | None = None) -> Observation:
    """Looks at everything once. `now` is in seconds since 1970.

    Raises:
        RunFolderError: plan.json or jobs.json is not what it should be.
    """
    before = read_run_files(run)
    return complete(before, answers_to([before]), now)


def observe_all(runs: Iterable[RunDir]) -> list[Observation]:
    """Looks at several runs, and asks Slurm once about all of them; raises as `observe` does."""
    before = [read_run_files(run) for run in runs]
    answers = answers_to(before)
    return [complete(one, answers) for one in before]


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
    """By this machine's clock, but not before the nodes' last signs of life by the file system's: either may have been
    set."""
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


def complete(before: RunFiles, answers: Answers, now: float | None = None) -> Observation:
    """Looks at everything else, now that Slurm has answered what `before` asks; raises as `observe` does."""
    run, plan, submitted, names = before.run, before.plan, before.submitted, before.names
    measured = now is None
    now = _now(before) if now is None else now
    submitted_unix = run.jobs.stat().st_mtime  # written without jobs first, and last when all are submitted
    states, faults = before.states, Faults()
    jobs: tuple[Job, ...] = ()
    living: set[int] | None = None
    here = _names_here(run, submitted, names)
    if before.asks or not before.settled:
        # Processes and jobs first: what ends in between is then seen by what it left, not taken for lost.
        if submitted.on_slurm:
            jobs = tuple(_jobs(submitted, names, answers))
        elif here:
            living = processes.find(submitted.token)
        states = states_of(run, plan, faults)
    else:
        faults += before.faults
    clocks = clocks_of(run, states, follows_files=measured)
    states = {name: clocks.of_node(name, state) for name, state in states.items()}
    start = _newest(before, states, jobs)
    patience = SUBMISSION_S if submitted.on_slurm else SILENCE_S if living is None or submitted.on_hosts else START_S
    young = now - submitted_unix < patience
    stop_unix = _stop_unix(run, faults)
    launched = {names[rank] for rank in submitted.launched}.union(*(job.nodes for job in jobs))
    going = young and stop_unix is None if before.launching is None else before.launching
    submitting = going and len(launched) < len(names)
    nodes = []
    for name, state in states.items():
        current = state if state is not None and state.of == start else None
        job = next((job for job in jobs if name in job.nodes), None)
        beats = plan.elastic is not None and state is not None and now - state.beat_unix < SILENCE_S
        if submitted.on_slurm:
            node = _slurm_node(name, current, job, submitting, now)
            # The job of an elastic run outlives nodes of it.
            here_once = state is not None and state.of.submission == submitted.submission
            silent = plan.elastic is not None and here_once and not beats
            nodes.append(replace(node, alive=False) if silent else node)
        else:
            seen = living if name in here else None
            starting = submitting or bool(seen) or beats or (name in launched and young)
            nodes.append(_node(name, current, seen, starting, now, submitted_unix))
    if jobs and start.restarts == 0:  # what was said then may stand there still
        unseen = _unseen(run, plan, submitted, jobs)
        nodes = [_with_unseen(node, unseen.get(node.name), submitted_unix) for node in nodes]
    withdrawn = {job: node.name for node in nodes for job in node.withdrew}
    jobs = tuple(_withdrawn(job, withdrawn[job.id]) if job.id in withdrawn else job for job in jobs)
    errors = list(_errors(run, plan, start, faults))
    upstream = plan.engine == MEGATRON_LM
    written = run.node_out(names[-1]) if upstream else run.metrics
    log = read_text_log(written, faults) if upstream else read_log(written, faults)
    log = tuple(clocks.of_line(line, names[plan.ranks[-1].node]) for line in log)
    quiet = errors or not log or now - log[-1].unix > STILL_S
    disk = os.statvfs(run.path)
    return Observation(
        kind=Kind.rehearsal if plan.rehearsal else Kind(submitted.executor),
        launched_unix=run.launched_unix,
        plan=plan,
        runs_dir=str(run.runs),
        now_unix=now,
        stop_unix=stop_unix,
        free_bytes=disk.f_bavail * disk.f_frsize,
        read_only=any(not node.ended and not node.alive for node in nodes) and _is_read_only(run),
        clocks=clocks.words,
        jobs=jobs,
        job_ids=tuple(job.id for job in submitted.jobs if job.id is not None) if submitted.on_slurm else (),
        silence=str(answers) if jobs and isinstance(answers, LaunchError) else None,
        cut_off=not submitting and any(node.state == "absent" and node.name not in launched for node in nodes),
        start=start,
        restarted=faults.tried(lambda: run.read(run.restarted(str(start)), RestartRecord), None),
        saved=_saved(run, faults),
        spent=_spent(run, faults) if plan.train.max_cost is not None else None,
        nodes=tuple(_with_stderr(run, node, errors, faults) for node in nodes),
        errors=tuple(sorted(errors, key=lambda error: error.unix)),
        goal=_goal(run, faults),
        log=log,
        times=read_times(written, upstream, log),
        doings=read_doings(run, plan, _started(nodes), faults) if quiet else (),
        gpus=_gpus(run, plan, tuple(nodes), faults) if plan.device == "cuda" else (),
        faults=tuple(faults),
    )


def _goal(run: RunDir, faults: Faults) -> Goal | None:
    try:
        return faults.tried(lambda: run.read(run.goal, Goal), None)
    except FileNotFoundError:
        return None


def _spent(run: RunDir, faults: Faults) -> float | None:
    try:
        found = faults.tried(lambda: run.read(run.spent, SpentRecord), None)
    except FileNotFoundError:
        return None
    return None if found is None else found.dollars


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
    """Of this start, and what ranks say that were started by hand."""
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


def _started(nodes: Iterable[Node]) -> dict[str, float]:
    return {node.name: node.started_unix for node in nodes if node.started_unix is not None}


def _gpus(run: RunDir, plan: Plan, nodes: tuple[Node, ...], faults: Faults) -> tuple[NodeGpus, ...]:
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


def _jobs(submitted: Submitted, names: list[str], answers: Answers) -> Iterator[Job]:
    """Those that were written down, and one that only its comment shows."""
    for job in submitted.jobs:
        state: JobState | None
        if isinstance(answers, LaunchError):
            state = JobState(id=job.id or "?", state="UNKNOWN", detail="Slurm does not answer")
        else:
            state = answers.get(job.id or slurm_commands.comment_of(submitted.token))
        known = job.id or (state.id if state else None)
        if known is not None:
            yield Job(id=known, nodes=tuple(names[rank] for rank in job.nodes), state=state)


def _unseen(run: RunDir, plan: Plan, submitted: Submitted, jobs: tuple[Job, ...]) -> dict[str, Unseen]:
    """By node, of those that do not see the run's folder, as far as that is known."""
    found: dict[str, Unseen] = {}
    known = submitted.by_id
    for job in (job for job in jobs if job.id in known):
        nodes, hosts = known[job.id].nodes, job.state.hosts if job.state else ()
        found |= {**unlaunched(run, job.id, job.nodes, job.state), **not_started(run, plan, job.id, nodes, hosts)}
    return found


def _with_unseen(node: Node, unseen: Unseen | None, submitted_unix: float) -> Node:
    """Such a node never comes, and was the first thing that went wrong."""
    if unseen is None or node.state != "absent":
        return node
    return replace(node, alive=False, seen_unix=submitted_unix, unseen=unseen)


def _withdrawn(job: Job, node: str) -> Job:
    """A job that a node took out of the queue, if it was there."""
    if job.state is None or job.state.state != "CANCELLED":
        return job
    detail = f"removed from the queue by node {node}"
    return replace(job, withdrawn=True, state=replace(job.state, detail=detail))


def _newest(before: RunFiles, states: States, jobs: tuple[Job, ...]) -> Start:
    """The newest start that a node has written of; the one after it, if a job waits to be started again."""
    starts = _starts(states)
    newest = max([before.planned, *starts.values()])
    requeued = any(state is not None and state.of == newest and state.state == REQUEUED for state in states.values())
    # What was written only after Slurm had called the job pending does not mean that it waits for yet another start.
    earlier = _starts(before.states)
    waiting = any(job.state and job.state.pending and earlier.get(name) == newest for job in jobs for name in job.nodes)
    return Start(newest.submission, newest.restarts + 1) if requeued or waiting else newest


def _starts(states: States) -> dict[str, Start]:
    return {name: state.of for name, state in states.items() if state is not None}


def _with_stderr(run: RunDir, node: Node, errors: Iterable[RankFailure], faults: Faults) -> Node:
    died = any(error.node == node.name and error.type == "Killed" for error in errors)
    if not died and not (node.ended and node.exit_code):
        return node
    end = faults.tail(run.node_err(node.name), ERR_TAIL_BYTES, node.err_begin).decode(errors="replace")
    return replace(node, no_memory=memory_sign(end), error=first_error(end))


def _saved(run: RunDir, faults: Faults) -> int | None:
    latest = run.latest_checkpoint
    try:
        said = faults.tried(lambda: read_text(latest).strip(), None)
    except FileNotFoundError:
        return None
    saved = None if said is None else checkpoint_iteration(said)
    if said is not None and saved is None:
        faults.add(f"{latest} is damaged: it names no checkpoint, such as iter_0000050")
    return saved


def _names_here(run: RunDir, submitted: Submitted, names: Sequence[str]) -> set[str]:
    """The nodes whose processes can be looked for: of a run on this machine all of them, or none."""
    if submitted.on_slurm:
        return set()
    if not submitted.on_hosts:
        return set(names) if is_here(run, submitted.jobs) else set()
    own = [job for job in submitted.jobs if job.host == socket.gethostname() and job.boot in (None, processes.boot())]
    return {names[rank] for job in own if has_rights_of(owner_of(run)) for rank in job.nodes}


def is_here(run: RunDir, jobs: Iterable[JobRecord]) -> bool:
    """Whether the run's processes are on this machine and this user sees them, so that they can be looked for.

    A run may have been resumed on another machine than it was first started on.
    """
    host = next((job.host for job in jobs if job.host is not None), None)
    if host is None:
        origin = Faults().tried(lambda: run.read(run.provenance, Origin), None)
        host = None if origin is None else origin.host
    return bool(host == socket.gethostname() and has_rights_of(owner_of(run)))


def _node(
    name: str, state: NodeRecord | None, living: set[int] | None, starting: bool, now: float, submitted_unix: float
) -> Node:
    """`living` are the run's processes if they can be seen; otherwise signs of life must do."""
    if state is None:
        return Node(name=name, alive=starting, seen_unix=submitted_unix)
    alive = state.pid in living if living is not None else now - state.beat_unix < SILENCE_S
    node = _from_record(name, state, alive)
    halted = living is not None and node.alive and processes.is_stopped(state.pid)
    return replace(node, halted=f"the agent (process {node.pid})") if halted else node


def _slurm_node(name: str, state: NodeRecord | None, job: Job | None, submitting: bool, now: float) -> Node:
    """A node lives as long as its job does; what its file says last is its own word.

    Where Slurm knows no such job, which may be because it shows users their own jobs only, signs of life must do. A
    node that never came is thought of last: its job may have been cancelled because another node failed.
    """
    alive = submitting if job is None else not job.over
    if (job is None or job.state is None) and state is not None:
        alive = now - state.beat_unix < SILENCE_S
    if state is None:
        return Node(name=name, alive=alive, seen_unix=now, job=job.id if job else None, host=_host(name, job))
    return _from_record(name, state, alive)


def _host(name: str, job: Job | None) -> str | None:
    """Where Slurm runs, or will run, a node's agent."""
    hosts = job.state.hosts if job is not None and job.state is not None else ()
    return hosts[job.nodes.index(name)] if job is not None and len(hosts) == len(job.nodes) else None


def _from_record(name: str, record: NodeRecord, alive: bool) -> Node:
    same = Node.__dataclass_fields__.keys() & NodeRecord.__dataclass_fields__.keys()
    return Node(
        name=name,
        alive=alive and record.state != "ended",
        halted="the worker" if record.worker_stopped else None,
        seen_unix=record.ended_unix or record.beat_unix,
        **{field: getattr(record, field) for field in same},
    )
