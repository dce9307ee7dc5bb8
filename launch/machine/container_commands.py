"""Command lines of the container runtimes: pure functions of what a run's workers are to find in their container.

enroot, apptainer and docker are called by each node's agent; pyxis is a plugin of srun, so there the agent starts a
step of its job on its own node. What a runtime cannot express is refused in `conf.schema.containers`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema.containers import IMAGE_SUFFIX, ImageReference, Mount, mountable
from conf.schema.experiment import Container, ContainerKind, Experiment, RunsMode
from launch.machine import docker
from launch.machine.processes import own_umask
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import TOKEN

PROGRAM = {
    ContainerKind.enroot: "enroot",
    ContainerKind.apptainer: "apptainer",
    ContainerKind.pyxis: "srun",
    ContainerKind.docker: "docker",
}

UNKNOWN_NAME = "<container>"
"""In a dry run: the name holds what only the node knows of the image file."""

_GPU = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_OF_DOCKER = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""Which GPUs says an option of its own."""
_NO_GPU = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""What enroot's hook for NVIDIA's driver goes by; CUDA_VISIBLE_DEVICES narrows it down."""
_INJECTED = ("APPTAINERENV_", "SINGULARITYENV_")
_DEAF = ("sh", "-c", 'trap "" USR2; exec "$@"', "sh")
"""A worker that ignores SIGUSR2 until it listens, as an agent's own children do: Slurm sends it to all of a step."""


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
    group_writes: bool = False
    """Whether the group of the run's folder may write what the worker writes."""


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


def run_container(experiment: Experiment, plan: Plan, run: Path, project: Path) -> RunContainer | None:
    """The container of a run, as configured; None without one. `project` is the folder with the rooms' sources.

    Raises:
        ConfigError: the runtime cannot mount a folder that the ranks need.
    """
    config = experiment.container
    if config.kind is ContainerKind.none:
        return None
    assert config.image is not None
    needed = {"the folder of tdpp": project, f"runs_dir={experiment.runs_dir}, name={experiment.name}": run}
    if plan.rehearsal is None:
        needed[f"data.prefix={experiment.data.prefix}"] = Path(plan.data_prefix).parent
        for corpus in plan.data_blend:
            needed[f"data.blend: {corpus.prefix}"] = Path(corpus.prefix).parent
        if plan.data_cache:  # an older run has none
            needed[f"data.cache={experiment.data.cache}"] = Path(plan.data_cache)
        if plan.train.load:
            needed[f"train.load={experiment.train.load}"] = Path(plan.train.load)
    for key, path in needed.items():
        mountable(config.kind, path, key)
    configured = [Mount.parse(text) for text in config.mounts]
    image = _image(config.kind, config.image)
    return RunContainer(
        kind=config.kind,
        image=image,
        file=image if isinstance(image, Path) else _image_file(config.kind, image, Path(config.image_dir)),
        digest=config.digest,
        mounts=_in_order([*(Mount(path, path) for path in needed.values()), *configured]),
        folder=project,
        python=config.python,
        gpus=plan.device == "cuda",
        reload=config.reload,
        scratch=Path(experiment.cluster.scratch),
        run=plan.run,
        group_writes=experiment.runs_mode is RunsMode.group,
    )


def found_image(config: Container) -> Path | None:
    """The file in `container.image_dir` that stands for an image of a registry; None where there can be none."""
    if config.kind is ContainerKind.none:
        return None
    assert config.image is not None
    image = _image(config.kind, config.image)
    return None if isinstance(image, Path) else _image_file(config.kind, image, Path(config.image_dir))


def container_name(label: str, *told_apart_by: object) -> str:
    """A name that any runtime and file system takes: what differs in the rest gets different ones."""
    label = re.sub(r"[^A-Za-z0-9._+-]", "-", label)[:80]
    digest = hashlib.sha256(repr(told_apart_by).encode()).hexdigest()[:12]
    return f"tdpp-{label}-{digest}"


def fetch(container: RunContainer, file: Path) -> list[str]:
    """Makes an image file of an image in a registry."""
    assert isinstance(container.image, ImageReference)
    if container.kind is ContainerKind.enroot:
        return ["enroot", "import", "-o", str(file), f"docker://{container.image.enroot}"]
    return ["apptainer", "pull", str(file), f"docker://{container.image}"]


def docker_name(container: RunContainer, node_rank: int) -> str:
    """Names a node's container: the run's, and the same whenever it starts."""
    return container_name(container.run, container.run, node_rank).replace("+", "-")


def create(container: RunContainer, name: str, *, anew: bool = False) -> list[str]:
    """Makes a node's container of the image file (enroot); `anew` in the place of one that may be there."""
    return ["enroot", "create", *(["--force"] if anew else []), "-n", name, str(container.file)]


def preparation(container: RunContainer, node_rank: int) -> list[list[str]]:
    """What makes a node ready that has neither the image file nor the container, in order; node 0 brings the file."""
    if container.kind is ContainerKind.docker:
        return [docker.pull(str(container.image))]
    if container.kind is ContainerKind.pyxis or container.file is None:
        return []
    brings = node_rank == 0 and isinstance(container.image, ImageReference)
    fetched = [fetch(container, container.file)] if brings else []
    created = [create(container, UNKNOWN_NAME)] if container.kind is ContainerKind.enroot else []
    return fetched + created


def start(
    container: RunContainer, name: str, environment: Mapping[str, str], command: Sequence[str], step: SlurmStep | None
) -> Command:
    """Starts a worker in a node's container. `environment` is all that it finds of the host's (see pyxis)."""
    match container.kind:
        case ContainerKind.enroot:
            return _enroot_start(container, name, environment, command)
        case ContainerKind.apptainer:
            return _apptainer_exec(container, environment, command)
        case ContainerKind.docker:
            return _docker_run(container, name, environment, command)
        case _:
            assert step is not None
            return _pyxis_srun(container, name, environment, command, step)


def inherited_by_runtime(inherited: Mapping[str, str]) -> dict[str, str]:
    """Without what apptainer would hand into the container although nobody gave it."""
    return {name: value for name, value in inherited.items() if not name.startswith(_INJECTED)}


def _enroot_start(
    container: RunContainer, name: str, environment: Mapping[str, str], command: Sequence[str]
) -> Command:
    """Variables go by their names alone: everybody on the node can read a command's words, but not its environment.

    The host's own NVIDIA_VISIBLE_DEVICES wins over that of the container, so both are given.
    """
    given = {**(_GPU if container.gpus else _NO_GPU), **environment}
    words = ["enroot", "start"]
    for mount in container.mounts:
        words += ["-m", _fstab(mount)]
    for variable in given:
        words += ["-e", variable]
    return Command((*words, name, *command), given)


def _fstab(mount: Mount) -> str:
    """Every field is given: enroot would take a last one that holds a comma for options."""
    options = "x-create=auto,rbind,ro" if mount.read_only else "x-create=auto,rbind"
    return f"{mount.source}:{mount.target}:none:{options}"


def _apptainer_exec(container: RunContainer, environment: Mapping[str, str], command: Sequence[str]) -> Command:
    """Variables go by APPTAINERENV_…: `--env` splits a value at its commas, and both are evaluated like shell code
    without `--no-eval`. A home or working folder that is mounted unasked would bring the user's own packages."""
    words = ["apptainer", "exec", "--cleanenv", "--no-eval", "--no-mount=home,cwd", f"--pwd={container.folder}"]
    words += ["--nv"] if container.gpus else []
    for mount in container.mounts:
        words += ["--mount", _csv(mount)]
    injected = {f"APPTAINERENV_{variable}": value for variable, value in environment.items()}
    return Command((*words, str(container.file), *command), {**environment, **injected})


def _csv(mount: Mount) -> str:
    fields = [
        "type=bind",
        f"source={mount.source}",
        f"destination={mount.target}",
        *(["ro"] if mount.read_only else []),
    ]
    return ",".join('"' + field.replace('"', '""') + '"' if re.search('[",]', field) else field for field in fields)


def _docker_run(container: RunContainer, name: str, environment: Mapping[str, str], command: Sequence[str]) -> Command:
    """GPUs have numbers of their own in the container, so that those of CUDA_VISIBLE_DEVICES would be others."""
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


def _pyxis_srun(
    container: RunContainer, name: str, environment: Mapping[str, str], command: Sequence[str], step: SlurmStep
) -> Command:
    """Unlike the others, pyxis shows the host's environment where the image says nothing else.

    The agent's own step holds all of the node: without `--overlap` and `--mem=0` this one would wait for it to end. Of
    a heterogeneous job srun looks only at the first component's nodes unless told. A container without a name is made
    for this step alone; without `no_exec` a step that finds another one in its container joins that one's mounts, and
    gets none of its own.
    """
    given = {**(_GPU if container.gpus else _NO_GPU), **environment}
    image = container.image.enroot if isinstance(container.image, ImageReference) else str(container.image)
    words = ["srun", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1", f"--nodelist={step.node}", "--export=ALL"]
    words += [] if step.cpus is None else [f"--cpus-per-task={step.cpus}"]
    words += [] if step.het_group is None else [f"--het-group={step.het_group}"]
    words += [f"--container-image={image}"]
    words += [] if container.reload else [f"--container-name={name}:no_exec"]
    words += [f"--container-mounts={','.join(map(_pyxis_mount, container.mounts))}"]
    words += [f"--container-workdir={container.folder}", "--no-container-mount-home"]
    words += [f"--container-env={','.join(given)}"]
    return Command((*words, *_DEAF, *command), given, apart=True)


def _pyxis_mount(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}:ro" if mount.read_only else f"{mount.source}:{mount.target}"


def _image(kind: ContainerKind, text: str) -> ImageReference | Path:
    return Path(text).absolute() if Path(text).suffix == IMAGE_SUFFIX.get(kind) else ImageReference.parse(text)


def _image_file(kind: ContainerKind, image: ImageReference, folder: Path) -> Path | None:
    if kind in (ContainerKind.pyxis, ContainerKind.docker):
        return None
    return Path(os.path.abspath(folder)) / f"{image.file_stem}{IMAGE_SUFFIX[kind]}"  # noqa: PTH100  (as in plan.py)


def _in_order(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Outer targets first, lest they hide inner ones; of several mounts with one target the last."""
    by_target = {mount.target: mount for mount in mounts}
    return tuple(by_target[target] for target in sorted(by_target))
