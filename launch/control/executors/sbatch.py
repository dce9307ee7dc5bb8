"""Which Slurm jobs a plan takes, and the text of their scripts: nothing is left to the user's environment."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.cluster import Cluster, NodeGroup
from conf.schema.experiment import Experiment, Het
from conf.schema.values.sbatch import KEYS, merged
from launch.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What all jobs of a run have in common."""

    name: str
    comment: str
    """Tells the run's jobs from all others."""
    python: str
    """The interpreter of the node agents."""
    folder: Path
    """The run's folder of what its agents are to do, and what they print."""
    path: str
    """PYTHONPATH of the node agents."""
    number: int = 0
    """How often the run was submitted before."""
    save_s: int
    """Seconds before a time limit at which the job gets SIGUSR2."""
    requeue: bool
    """Whether Slurm may start a job again after a failure of a node."""
    keep: bool = False
    """Whether Slurm is to leave a job that loses a node its others, and what runs there."""
    group: bool = False
    """Whether the run's folder may be one that its group can write."""
    mail: str | None = None
    """Who gets Slurm's mail about the first job."""
    behind: tuple[str, ...] = ()
    """Ids of jobs that must have ended, however, before the run's first job starts."""
    after: tuple[str, ...] = ()
    """Ids of jobs that must have ended well before it."""


def sbatch_text(submission: Submission, request: JobRequest, after: str | None) -> str:
    """A script for sbatch. `after` is the id of a job that must have started before this one."""
    options = [_options(submission, component) for component in request.components]
    options[0] |= _whole_job(submission, after)
    blocks = ["".join(f"#SBATCH --{name}{_value(value)}\n" for name, value in sorted(of.items())) for of in options]
    header = "#SBATCH hetjob\n".join(blocks)
    own = f"FOLDER={shlex.quote(str(submission.folder))} PYTHONPATH={shlex.quote(submission.path)}"
    exports = f"export SUBMITIT_EXECUTOR=slurm {own}"
    steps = _steps(submission, request) if submission.keep else _srun(submission, request)
    return f"#!/bin/bash\n{header}\n{exports}\n{steps}\n"


def _options(submission: Submission, component: Component) -> dict[str, str | None]:
    always: dict[str, str | None] = {
        "nodes": str(len(component.nodes)),
        "ntasks-per-node": "1",
        "comment": " ".join(filter(None, [component.sbatch.get("comment"), submission.comment])),
        "job-name": submission.name,
        "signal": f"USR2@{submission.save_s}",
        "requeue" if submission.requeue else "no-requeue": None,
    }
    if submission.keep:
        always["no-kill"] = None
    given = {name: getattr(component.asked, key) for name, key in KEYS.items()}
    more = {name: value or None for name, value in component.sbatch.items() if name != "comment"}
    return always | more | {name: str(value) for name, value in given.items() if value is not None}


def _whole_job(submission: Submission, after: str | None) -> dict[str, str | None]:
    log = f"{submission.folder}/".replace("%", "%%") + "%j_batch.out"
    options: dict[str, str | None] = {"open-mode": "append", "output": log, "error": log}
    if after is not None:
        return options | {"dependency": f"after:{after}", "kill-on-invalid-dep": "yes"}
    if submission.mail is not None:
        options |= {"mail-user": submission.mail, "mail-type": "END,FAIL"}
    waits = {"afterany": submission.behind, "afterok": submission.after}
    if found := [":".join((kind, *jobs)) for kind, jobs in waits.items() if jobs]:
        options |= {"dependency": ",".join(found)}
    if submission.after:
        options |= {"kill-on-invalid-dep": "yes"}
    return options


def _value(value: str | None) -> str:
    """Behind an option's name. Slurm reads line by line: the rest of a value with a line break would be a command."""
    if value is None:
        return ""
    if not value.isprintable():
        raise LaunchError(
            f"{value!r} contains a line break or another control character, which Slurm does not accept in a job "
            f"script; choose another name or folder"
        )
    return f"={shlex.quote(value)}"


def _srun(submission: Submission, request: JobRequest) -> str:
    """One step: an agent on every node."""
    return shlex.join(["srun", "--unbuffered", *_srun_words(request, ["bash", "-c", _agent(submission, request)])])


def _steps(submission: Submission, request: JobRequest) -> str:
    """A step on each node: srun ends a step on all its nodes if it cannot reach one, as one that has just died. Raises
    LaunchError: a step of one node could not get its GPUs."""
    for part in request.components:
        if "gpus" in part.sbatch:
            raise LaunchError(
                f"cluster.groups.{part.group}: sbatch.gpus counts the GPUs of a whole job, but nodes of an elastic run "
                f"come and go; use cluster.groups.{part.group}.gres or sbatch.gpus-per-node, which count those of each"
            )
    # Some sites have srun end a step when a task ends badly, or some time after it (KillOnBadExit, WaitTime).
    keep = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--nodes=1", "--ntasks=1"]
    inner = f"export SLURM_PROCID=$1; {_agent(submission, request)}"
    words = shlex.join(_srun_words(request, ["bash", "-c", inner, "agent"]))
    return _EACH_NODE.format(srun=f'{shlex.join(["srun", "--unbuffered", *keep])} --nodelist="$host" {words}')


_EACH_NODE = """\
# Slurm 22.05 starts a job again whose first node could not be reached, but without the GPUs it asked for.
if scontrol show job -d -o "$SLURM_JOB_ID" | grep -q 'JOB_GRES=(null).*TresPer' &&
    mkdir "$FOLDER/${{SLURM_JOB_ID}}_without_gpus"; then
  scontrol update jobid="$SLURM_JOB_ID" requeue=1 && scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
task=0 steps=() codes=
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  {srun} "$task" &
  steps+=($!)
  task=$((task + 1))
done
for step in "${{steps[@]}}"; do
  wait "$step"
  codes+=" $? "
done
# An agent that finds an error ends with 1; what the death of a node, or of an agent, ends with does not fail the job.
[[ $codes != *" 1 "* && $codes == *" 0 "* ]]"""


def _agent(submission: Submission, request: JobRequest) -> str:
    """What the shell of a task is to run.

    The output goes to a file by the task's rank in the whole job; srun's own patterns count within a component.
    """
    settings = RunDir(submission.folder.parent).agent(submission.number, request.role).name
    words = [settings, "group"] if submission.group else [settings]
    agent = f'{shlex.quote(submission.python)} -P -u -m launch.start_agent "$FOLDER" {shlex.join(words)}'
    return f'exec {agent} >>"$FOLDER/${{SLURM_JOB_ID}}_${{SLURM_PROCID}}_log.out" 2>&1'


def _srun_words(request: JobRequest, task: Sequence[str]) -> Iterator[str]:
    """What srun runs, and where: in a heterogeneous job one step over all components."""
    several = len(request.components) > 1
    for number, component in enumerate(request.components):
        if number:
            yield ":"
        if several:
            yield f"--het-group={number}"
        if (cpus := component.asked.cpus_per_task) is not None:
            yield f"--cpus-per-task={cpus}"  # srun stopped taking it from the job in Slurm 22.05
        yield from task


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes of one group, as they are asked for. What is None is left to Slurm's defaults."""

    group: str
    nodes: tuple[int, ...]
    """Node ranks, by task."""
    asked: NodeGroup
    sbatch: Mapping[str, str]
    """The options that have no keys of their own; without a value where that is empty."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job; with several components it is a heterogeneous one, which Slurm starts on all of them at once."""

    role: str
    """Names its file: `job`, or `master` and `slave` of a run of several jobs."""
    components: tuple[Component, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node ranks, by task: those of a heterogeneous job's step go through its components in order."""
        return tuple(node for component in self.components for node in component.nodes)

    @property
    def het_groups(self) -> tuple[int | None, ...]:
        """The component of a heterogeneous job that each task's node belongs to; None in any other job."""
        if len(self.components) == 1:
            return (None,) * len(self.nodes)
        return tuple(number for number, component in enumerate(self.components) for _ in component.nodes)

    @property
    def cpus_per_task(self) -> tuple[int | None, ...]:
        """The CPUs of each task."""
        return tuple(component.asked.cpus_per_task for component in self.components for _ in component.nodes)


def job_requests(experiment: Experiment, nodes: Collection[int] | None = None) -> tuple[JobRequest, ...]:
    """The jobs in the order of their submission: the first has the first node, and the others wait for its start.
    `nodes` are the ranks of those that get jobs now; None: all."""
    groups = {rank: name for rank, name in enumerate(experiment.node_order.groups) if nodes is None or rank in nodes}
    components = tuple(
        component(name, experiment.cluster, tuple(rank for rank, of in groups.items() if of == name))
        for name in dict.fromkeys(groups.values())
    )
    if len(components) == 1 or experiment.executor.het is Het.hetjob:
        return (JobRequest(role="job", components=components),)
    master, *slaves = components
    numbered = len(slaves) > 1
    return (
        JobRequest(role="master", components=(master,)),
        *(
            JobRequest(role=f"slave-{number}" if numbered else "slave", components=(slave,))
            for number, slave in enumerate(slaves, start=1)
        ),
    )


def component(name: str, cluster: Cluster, nodes: tuple[int, ...] = ()) -> Component:
    """Nodes of the group of this name."""
    group = cluster.groups[name]
    return Component(group=name, nodes=nodes, asked=group, sbatch=merged(cluster.sbatch, group.sbatch, cluster.exclude))
