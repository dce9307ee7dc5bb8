"""A run on disk: `RunDir` and `RunFiles` own every file name; `docs/formats.md` says what is in the files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import RunFolderError, reworded
from conf.run_folder import run_files, run_folders
from conf.run_folder.json_values import typed
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault
from megatron_ext.contract.plan_content import KEYS
from megatron_ext.contract.run_files import FileName, RunFiles

T = TypeVar("T")
SCHEDULE = "schedule.json"
"""What plan.json calls the copy of `parallel.schedule_file` in the run's folder."""
CODE = "code"
"""The folder of the user's code in a run's folder."""


def _shared(folder: Path) -> None:
    """Makes a folder that everybody may write in who may write in the one it lies in."""
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def is_full(error: OSError) -> bool:
    """Whether a disk, or somebody's share of it, has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _digest(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class RunDir(RunFiles):
    """`runs/<name>/<time>-<hash>/`, in UTC. Making the object touches nothing; `create` makes the folder."""

    @classmethod
    def create(cls, runs: Path, name: str, identity: str, now: datetime, *, group: bool = False) -> RunDir:
        """A new folder; two runs never share one. Runs of one `identity` (conf/identity.py) have the same hash. With
        `group` its group may write wherever ranks do; submitit's folder stays its owner's.

        Raises:
            RunFolderError: the folder cannot be made.
        """
        digest = _digest(identity)
        stamp = run_folders.stamp(now)
        try:
            runs.mkdir(parents=True, exist_ok=True)
            _shared(runs / name)
            for attempt in range(1000):
                path = runs / name / (f"{stamp}-{digest}" + (f".{attempt}" if attempt else ""))
                try:
                    path.mkdir(0o755)
                except FileExistsError:
                    continue
                run = cls(path.absolute())
                for folder in (run.nodes, run.events, run.errors, run.checkpoints, run.submitit):
                    folder.mkdir(0o755)
                for folder in (run.path, run.nodes, run.events, run.errors, run.checkpoints) if group else ():
                    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISGID | stat.S_IRWXG)
                return run
        except OSError as error:
            raise RunFolderError(
                f"runs_dir={runs}: cannot create a run folder there ({error.strerror}: {error.filename}); choose a "
                f"folder that you may write to"
            ) from error
        raise RunFolderError(f"{runs / name}: too many runs of this configuration in one second")

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return run_folders.is_run(path)

    @classmethod
    def all(cls, runs: Path) -> Iterator[RunDir]:
        """Every run below `runs`, oldest first; others may be made and deleted meanwhile."""
        for path in run_folders.by_time(run_folders.folders(runs)):
            if run_folders.is_run(path):
                yield cls(path.absolute())

    @classmethod
    def everything(cls, runs: Path) -> list[RunDir]:
        """The same with the folders that are no run: not yet, not any more, or they never became one."""
        found = run_folders.by_time(run_folders.folders(runs))
        return [cls(path.absolute()) for path in found if run_folders.is_run(path) or run_folders.is_begun(path)]

    @classmethod
    def alike(cls, runs: Path, name: str, identity: str) -> list[RunDir]:
        """Runs of that name whose folders have the hash of `identity`, latest first."""
        pattern = re.compile(rf"\d{{8}}-\d{{6}}Z?-{_digest(identity)}(\.(?P<attempt>\d+))?")
        found = []
        for path in run_folders.entries(runs / name):
            if (match := pattern.fullmatch(path.name)) and cls.is_one(path):
                found.append((run_folders.made_unix(path) or 0.0, int(match["attempt"] or 0), path))
        return [cls(path.absolute()) for _, _, path in sorted(found, reverse=True)]

    @classmethod
    def find(cls, runs: Path, wanted: str | None) -> RunDir:
        """The run that a user means by `wanted`; raises RunFolderError as `run_folders.find` does."""
        return cls(run_folders.find(runs, wanted))

    def keep_secret(self) -> None:
        """Gives the run what its ranks know each other by, unless it has it; nobody but its owner can read it. One that
        is not whole counts as none."""
        try:
            if re.fullmatch(r"[0-9a-f]{64}\n", run_files.read_text(self.secret)):
                return
        except (FileNotFoundError, RunFolderError):
            pass
        write_atomic(self.secret, secrets.token_hex(32) + "\n", mode=0o600)

    def link_job(self, job: str) -> None:
        """Makes by_job/<job> lead here. A local job's id is a process id: an older run may have had it. Raises
        RunFolderError: it cannot be made."""
        link = self.runs / run_folders.BY_JOB / job
        fresh = link.with_name(f".{job}.{os.getpid()}")
        with reworded(
            RunFolderError,
            f"{link}: cannot create this link to the run (",
            f"); everybody who starts runs in {self.runs} needs write permission for {link.parent}; ask for it, or "
            "choose a runs_dir of your own",
        ):
            _shared(link.parent)
            fresh.symlink_to(os.path.relpath(self.path, link.parent))
            fresh.replace(link)

    @property
    def name(self) -> str:
        """`<name>/<time>-<hash>`, unique below the runs folder."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def launched_unix(self) -> float:
        """When the folder was made, by its name; a folder of another name has the time of its plan."""
        made = run_folders.made_unix(self.path)
        return self.plan.stat().st_mtime if made is None else made

    @property
    def runs(self) -> Path:
        return self.path.parent.parent

    config = FileName("config.yaml")
    overrides = FileName("overrides.txt")
    provenance = FileName("provenance.json")
    diff = FileName("diff.patch")
    code_tree = FileName(CODE, "tree")
    """The user's code as it was at the launch, from which ranks run."""
    code_diff = FileName(CODE, "diff.patch")
    """What it had beyond its commit, where it lay in a git tree."""
    schedule = FileName(SCHEDULE)
    jobs = FileName("jobs.json")
    launch_lock = FileName("launch.lock")
    """Held by who launches the run, as long as that takes."""
    submitit = FileName("submitit")
    """What starts the run's agents, and what they print. Nobody but the run's user may write there."""

    def agent(self, submission: int, role: str) -> Path:
        """What the agents of a job are to do (launch/node/settings.py)."""
        return self.submitit / f"agent-{submission}-{role}.json"

    notify = FileName("submitit", "notify.json")
    """Who is told of the run's end, where somebody is; with what nobody but its owner may write."""

    def notified(self, start: str) -> Path:
        """There once the end of a start is being told."""
        return self.path / f"notified-{start}.json"

    def restarted(self, start: str) -> Path:
        """Why Slurm started the run again."""
        return self.path / f"restart-{start}.json"

    def submitit_of(self, node: str) -> Path:
        """What the agent of one host among several prints: process ids may be those of another one too."""
        return self.submitit / node

    def cache(self, node: str) -> Path:
        """What the compilers of a node's ranks keep; they run what they find there."""
        return self.path / "cache" / node

    stop_request = FileName("stop.json")

    def save_request(self, start: str) -> Path:
        """There when the nodes are to save and end, because one of them is running out of time."""
        return self.path / f"save-{start}.json"

    def change_request(self, start: str) -> Path:
        """That an elastic run is to save in this start, and to go on with other nodes."""
        return self.path / f"change-{start}.json"

    joins = FileName("joins")
    """The jobs that were submitted for nodes that an elastic run had lost."""

    def join(self, start: str, node: str) -> Path:
        """The job that one of them, lost by this start, was given."""
        return self.joins / f"{start}-{node}.json"

    def claim(self, submission: int, node: str, number: int) -> Path:
        """The right of an agent to run a node of an elastic run."""
        return self.path / "claims" / f"{submission}-{node}-{number}.json"

    def join_script(self, submission: int, node: str) -> Path:
        """The script of such a job."""
        return self.submitit / f"join-{submission}-{node}.sh"

    sbatch = FileName("sbatch")
    """What was submitted to Slurm."""

    def node_out(self, node: str) -> Path:
        return self.nodes / f"{node}.out"

    def node_err(self, node: str) -> Path:
        return self.nodes / f"{node}.err"

    def node_gpu(self, node: str) -> Path:
        return self.nodes / f"{node}.gpu"

    def node_energy(self, node: str) -> Path:
        return self.nodes / f"{node}.energy.json"

    def node_state(self, node: str) -> Path:
        return self.nodes / f"{node}.json"

    trackers = FileName("trackers")
    """What the writers of TensorBoard and its like keep for themselves (launch/tracking)."""

    def tracker_log(self, tracker: str) -> Path:
        """What the library of a tracker prints."""
        return self.trackers / f"{tracker}.log"

    traces = FileName("traces")
    """torch's own traces of an iteration."""
    nsys = FileName("nsys")
    """What Nsight Systems saw of each node."""
    ncu = FileName("ncu")
    """What Nsight Compute saw of each node."""

    def evaluation(self, split: str) -> Path:
        """What `tdpp evaluate` found on a split."""
        return self.path / f"evaluation-{split}.json"

    report = FileName("report")

    def read_json(self, path: Path) -> Any:
        """The content of one of the run's JSON files, or None if it is not there yet. Raises RunFolderError: it cannot
        be read, or is not JSON."""
        try:
            return run_files.parse_json(run_files.read_text(path), str(path))
        except FileNotFoundError:
            return None

    def read_plan(self) -> Plan:
        """What plan.json says. Raises RunFolderError: it is not there, or is not a plan."""
        content = self.read_object(self.plan, KEYS)
        if content is None:
            raise RunFolderError(f"{self.path} is not a run: it has no {self.plan.name}")
        with reworded(RunFolderError, f"{self.plan}: ", of=PlanFault):
            return Plan.parse(content, self.path)

    def read(self, path: Path, kind: type[T]) -> T | None:
        """The same as a dataclass; raises RunFolderError also where it does not fit."""
        content = self.read_json(path)
        return None if content is None else typed(kind, content, str(path))

    def read_object(self, path: Path, keys: Collection[str]) -> dict[str, Any] | None:
        """The same of a file that holds an object with certain keys. Raises RunFolderError: it holds something else."""
        content = self.read_json(path)
        if content is None:
            return None
        if not isinstance(content, dict):
            raise RunFolderError(f"{path} is damaged: it is not a JSON object")
        if lacking := [key for key in keys if key not in content]:
            raise RunFolderError(f"{path} is damaged, or of another version of tdpp: it lacks {', '.join(lacking)}")
        return content

    def write_json(self, path: Path, value: Any) -> None:
        write_atomic(path, json.dumps(value, indent=1) + "\n")
