"""The container runtimes, a class each: pure functions from what a run's container is to command lines.

enroot, apptainer and docker are called by each node's agent; pyxis is a plugin of srun, so there the agent starts a
step of its job on its own node. What a runtime cannot express is refused in `conf.schema.containers`.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from conf.schema.containers import ContainerKind, ImageReference, Mount
from launch.machine import docker
from launch.machine.processes import own_umask
from launch.machine.slurm_commands import environment as without_slurm
from megatron_ext.contract.worker import TOKEN

UNKNOWN_NAME = "<container>"
"""In a dry run: the name holds what only the node knows of the image file."""

_GPU = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_OF_DOCKER = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""An option of docker's own says which GPUs."""
_NO_GPU = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""What enroot's hook for NVIDIA's driver goes by; CUDA_VISIBLE_DEVICES narrows it down."""
_INJECTED = ("APPTAINERENV_", "SINGULARITYENV_")
_DEAF = ("sh", "-c", 'trap "" USR2; exec "$@"', "sh")
"""A worker that ignores SIGUSR2 until it listens, as an agent's own children do: Slurm sends it to all of a step."""


_ENROOT_BUILD = """set -e
base="${1%/*}/.base${1##*/}"
tidy() { rm -f "$base"; enroot remove --force "$1" > /dev/null 2>&1 || true; }
trap 'exit 143' TERM
trap 'tidy "$2"' EXIT
tidy "$2"
enroot import -o "$base" "$3"
enroot create -n "$2" "$base"
NVIDIA_VISIBLE_DEVICES=void enroot start --root --rw -e NVIDIA_VISIBLE_DEVICES "$2" sh -ex -c "$4"
enroot export -o "$1" "$2"
"""
"""Makes the file $1 of what the lines $4 make of the image $3, by the container $2, which a killed build may have left.
It shows each line."""
_APPTAINER_BUILD = """set -e
definition=$(mktemp)
trap 'exit 143' TERM
trap 'rm -f "$definition"' EXIT
printf %s "$2" > "$definition"
apptainer build "$1" "$definition"
"""
"""Makes the file $1 of the definition $2."""


@dataclass(frozen=True, kw_only=True)
class RunContainer:
    """What the workers of a run find in their container; the same on every node."""

    kind: ContainerKind
    """Not none."""
    image: ImageReference | Path
    file: Path | None
    """The image's file; None where pyxis or docker take it from a registry."""
    digest: str | None
    """That the file, or docker's image, must have, sha256:…; None where the configuration does not say."""
    mounts: tuple[Mount, ...]
    """Outer targets come before those inside them."""
    folder: Path
    """Where the worker starts, as far as the runtime lets us say."""
    python: str
    gpus: bool
    reload: bool
    scratch: Path
    """A folder on each node's own disk."""
    run: str
    """The run's name: a container is made anew for it once."""
    recipe: str = ""
    """What the image's sh runs as root to make the file of the image; empty: nothing."""
    group_writes: bool = False
    """Whether the group of the run's folder may write what the worker writes."""

    @property
    def runtime(self) -> Runtime:
        return RUNTIMES[self.kind]


@dataclass(frozen=True)
class Command:
    """A command that starts a worker in its container."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The environment of the runtime itself, over what it inherits."""
    apart: bool = False
    """Whether the worker is not a child of this command: srun, which ends it by force when it has to end, or docker,
    which leaves it to its daemon."""
    remove: tuple[str, ...] = ()
    """A command that ends it, if it still lives, when this one has ended."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """Where pyxis starts the worker: a step on the agent's own node."""

    node: str
    cpus: int | None
    """None leaves it to Slurm."""
    het_group: int | None
    """The component of a heterogeneous job that the node is of; None in any other job."""

    @classmethod
    def own(cls, environment: Mapping[str, str], het_group: int | None) -> SlurmStep:
        """Returns the step of an agent whose environment is the one that Slurm gave it."""
        cpus = environment.get("SLURM_CPUS_PER_TASK")
        return cls(node=environment["SLURMD_NODENAME"], cpus=None if cpus is None else int(cpus), het_group=het_group)


class Worker(NamedTuple):
    """What is started in a node's container."""

    container: RunContainer
    name: str
    """The container's."""
    environment: Mapping[str, str]
    """All that it finds of the host's (see `Pyxis`)."""
    command: Sequence[str]
    step: SlurmStep | None = None


def container_name(label: str, *told_apart_by: object) -> str:
    """A name that any runtime and file system takes: what differs in the rest gets different ones."""
    label = re.sub(r"[^A-Za-z0-9._+-]", "-", label)[:80]
    digest = hashlib.sha256(repr(told_apart_by).encode()).hexdigest()[:12]
    return f"tdpp-{label}-{digest}"


class Runtime(ABC):
    """What differs between the runtimes."""

    program: str
    has_file: bool = True
    """Whether an image of a registry is fetched into a file that all nodes see."""
    in_step: bool = False
    """Whether srun starts the worker, in a step of the run's job."""
    child: bool = True
    """Whether the worker ends with the agent that started it, and sees that one's process."""

    def preparation(self, container: RunContainer, node_rank: int) -> list[list[str]]:
        """What makes a node ready that has neither the image file nor the container; node 0 brings the file."""
        if node_rank == 0 and container.file is not None and isinstance(container.image, ImageReference):
            return [self.fetch(container, container.file)]
        return []

    def fetch(self, container: RunContainer, file: Path) -> list[str]:
        """Makes an image file of an image in a registry, and of the recipe if there is one."""
        raise NotImplementedError(f"{self.program} takes images from their registry")

    def inherited(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What the runtime itself inherits: nothing that apptainer would hand into the container although nobody gave
        it, and nothing of Slurm, of which enroot's hook for PyTorch would make RANK, MASTER_ADDR, …"""
        kept = {name: value for name, value in environment.items() if not name.startswith(_INJECTED)}
        return kept if self.in_step else without_slurm(kept)

    @abstractmethod
    def start(self, worker: Worker) -> Command:
        """Starts a worker in a node's container."""


class Enroot(Runtime):
    """Containers that are made of the image file once, and started by name."""

    program = "enroot"

    def preparation(self, container: RunContainer, node_rank: int) -> list[list[str]]:
        return [*super().preparation(container, node_rank), self.create(container, UNKNOWN_NAME)]

    def fetch(self, container: RunContainer, file: Path) -> list[str]:
        assert isinstance(container.image, ImageReference) and container.file is not None
        source = f"docker://{container.image.enroot}"
        if container.recipe:
            name = container_name(container.file.stem, str(container.file))  # as its lock, for `tdpp clean`
            return ["sh", "-c", _ENROOT_BUILD, "sh", str(file), name, source, container.recipe]
        return ["enroot", "import", "-o", str(file), source]

    def create(self, container: RunContainer, name: str, *, anew: bool = False) -> list[str]:
        """Makes a node's container of the image file; `anew` in the place of one that may be there."""
        return ["enroot", "create", *(["--force"] if anew else []), "-n", name, str(container.file)]

    def start(self, worker: Worker) -> Command:
        """Variables go by their names alone: everybody on the node can read a command's words, but not its environment.

        The host's own NVIDIA_VISIBLE_DEVICES wins over that of the container, so both are given. Every field of a mount
        is given: enroot would take a last one that holds a comma for options.
        """
        container, name, environment, command, _ = worker
        given = {**(_GPU if container.gpus else _NO_GPU), **environment}
        words = ["enroot", "start"]
        for mount in container.mounts:
            options = "x-create=auto,rbind,ro" if mount.read_only else "x-create=auto,rbind"
            words += ["-m", f"{mount.source}:{mount.target}:none:{options}"]
        for variable in given:
            words += ["-e", variable]
        return Command((*words, name, *command), given)


class Apptainer(Runtime):
    """The image file is run as it is."""

    program = "apptainer"

    def fetch(self, container: RunContainer, file: Path) -> list[str]:
        if container.recipe:
            post = "".join(f"    {line}\n" for line in container.recipe.splitlines())
            definition = f"Bootstrap: docker\nFrom: {container.image}\n\n%post\n    set -ex\n{post}"
            return ["sh", "-c", _APPTAINER_BUILD, "sh", str(file), definition]
        return ["apptainer", "pull", str(file), f"docker://{container.image}"]

    def start(self, worker: Worker) -> Command:
        """Variables go by APPTAINERENV_…: `--env` splits a value at its commas, and both are evaluated like shell code
        without `--no-eval`. A home or working folder that is mounted unasked would bring the user's own packages."""
        container, _, environment, command, _ = worker
        words = ["apptainer", "exec", "--cleanenv", "--no-eval", "--no-mount=home,cwd", f"--pwd={container.folder}"]
        words += ["--nv"] if container.gpus else []
        for mount in container.mounts:
            words += ["--mount", _csv(mount)]
        injected = {f"APPTAINERENV_{variable}": value for variable, value in environment.items()}
        return Command((*words, str(container.file), *command), {**environment, **injected})


class Docker(Runtime):
    """A daemon brings the image, and runs a container of the run's name."""

    program = "docker"
    has_file = False
    child = False

    def preparation(self, container: RunContainer, node_rank: int) -> list[list[str]]:
        return [docker.pull(str(container.image))]

    def name(self, container: RunContainer, node_rank: int) -> str:
        """Names a node's container: the run's, and the same whenever it starts."""
        return container_name(container.run, container.run, node_rank).replace("+", "-")

    def start(self, worker: Worker) -> Command:
        """GPUs have numbers of their own in the container, so that those of CUDA_VISIBLE_DEVICES would be others."""
        container, name, environment, command, _ = worker
        given = {**(_OF_DOCKER if container.gpus else _NO_GPU), **environment}
        devices = f'"device={given.pop("CUDA_VISIBLE_DEVICES")}"' if "CUDA_VISIBLE_DEVICES" in given else "all"
        started = docker.run(
            str(container.image),
            command,
            name=name,
            token=environment.get(TOKEN, ""),
            folder=container.folder,
            gpus=devices if container.gpus else None,
            mounts=[_csv(mount) for mount in container.mounts],
            variables=list(given),
            umask=own_umask() & ~0o070 if container.group_writes else own_umask(),
        )
        return Command(tuple(started), given, apart=True, remove=tuple(docker.removal(name)))


class Pyxis(Runtime):
    """srun makes the container of an image that it brings itself."""

    program = "srun"
    has_file = False
    in_step = True
    child = False

    def start(self, worker: Worker) -> Command:
        """Unlike the others, pyxis shows the host's environment where the image says nothing else.

        The agent's own step holds all of the node: without `--overlap` and `--mem=0` this one would wait for it to end.
        Of a heterogeneous job srun looks only at the first component's nodes unless told. A container without a name is
        made for this step alone; without `no_exec` a step that finds another one in its container joins that one's
        mounts, and gets none of its own.
        """
        container, name, environment, command, step = worker
        assert step is not None
        given = {**(_GPU if container.gpus else _NO_GPU), **environment}
        image = container.image.enroot if isinstance(container.image, ImageReference) else str(container.image)
        mounts = [f"{mount.source}:{mount.target}{':ro' * mount.read_only}" for mount in container.mounts]
        words = ["srun", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1", f"--nodelist={step.node}", "--export=ALL"]
        words += [] if step.cpus is None else [f"--cpus-per-task={step.cpus}"]
        words += [] if step.het_group is None else [f"--het-group={step.het_group}"]
        words += [f"--container-image={image}"]
        words += [] if container.reload else [f"--container-name={name}:no_exec"]
        words += [f"--container-mounts={','.join(mounts)}"]
        words += [f"--container-workdir={container.folder}", "--no-container-mount-home"]
        words += [f"--container-env={','.join(given)}"]
        return Command((*words, *_DEAF, *command), given, apart=True)


RUNTIMES: Mapping[ContainerKind, Runtime] = {
    ContainerKind.enroot: Enroot(),
    ContainerKind.apptainer: Apptainer(),
    ContainerKind.pyxis: Pyxis(),
    ContainerKind.docker: Docker(),
}


def _csv(mount: Mount) -> str:
    fields = [
        "type=bind",
        f"source={mount.source}",
        f"destination={mount.target}",
        *(["ro"] if mount.read_only else []),
    ]
    return ",".join('"' + field.replace('"', '""') + '"' if re.search('[",]', field) else field for field in fields)
