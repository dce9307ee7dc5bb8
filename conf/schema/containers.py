"""Images, mounts and environments as a configuration names them, and what each container runtime can express.

Sources: runtime.sh and enroot-mount.c of enroot 4.1, args.c and pyxis_slurmstepd.c of pyxis 0.24, mount.go and
create.go of Apptainer 1.5, docker's reference of `docker container run`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.schema.values.ranges import config
from conf.visible import without_passwords

if TYPE_CHECKING:  # an agent needs mounts and images, and no OmegaConf
    from conf.schema.cluster import Cluster

IMAGE_SUFFIX = {"enroot": ".sqsh", "pyxis": ".sqsh", "apptainer": ".sif"}
"""The ending of an image file, by container kind; docker takes none."""

_EXAMPLE = "nvcr.io/nvidia/pytorch:23.04-py3"
_COMPONENT = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_REFERENCE = re.compile(
    r"(?:(?P<registry>localhost(?::[0-9]+)?|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?::[0-9]+)?|[A-Za-z0-9-]+:[0-9]+)/)?"
    rf"(?P<name>{_COMPONENT}(?:/{_COMPONENT})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?)",
    re.ASCII,
)

_UNMOUNTABLE: Mapping[str, tuple[str, str]] = {
    # Mounts are lines of an fstab, their fields joined by ':'; a backslash starts an octal escape there.
    "enroot": (r"[\s:\\]", "spaces, ':' and '\\'"),
    # The same, in a list joined by ',', written to a shell script in double quotes.
    "pyxis": (r"[\s:\\,\"$`]", "spaces, ':', ',', '\"', '$', '`' and '\\'"),
    # Fields of a CSV record, which may be quoted.
    "apptainer": (r"[\x00-\x1f]", "control characters"),
    "docker": (r"[\x00-\x1f]", "control characters"),
}
"""What a mounted path may not hold: a pattern, and its words."""

_RESERVED: Mapping[str, tuple[str, str]] = {
    "enroot": (r"ENROOT_.*", "ENROOT_…"),
    "pyxis": (r"(?:ENROOT|SLURM|PYXIS)_.*", "ENROOT_…, SLURM_… and PYXIS_…"),
    "apptainer": (r"HOME|UID|GID", "HOME, UID and GID"),
    "docker": (r"NVIDIA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
}
"""Variables that a runtime sets itself: a pattern of names, and its words."""


@dataclass(frozen=True)
class ImageReference:
    """An image in a registry."""

    registry: str | None
    """With its port, if it has one; None for Docker Hub."""
    name: str
    """With tag or digest: nvidia/pytorch:23.04-py3."""

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        """From Docker's notation. Raises ConfigError: it is none."""
        found = _REFERENCE.fullmatch(text)
        if not found:
            raise ConfigError(
                f"container.image={text!r} is neither a file (.sqsh for enroot and pyxis, .sif for apptainer) nor an "
                f"image in a registry, such as {_EXAMPLE}"
            )
        return cls(found["registry"], found["name"])

    def __str__(self) -> str:
        """In Docker's notation."""
        return f"{self.registry}/{self.name}" if self.registry else self.name

    @property
    def enroot(self) -> str:
        """In enroot's notation, where '#' ends the registry."""
        return f"{self.registry}#{self.name}" if self.registry else self.name

    @property
    def file_stem(self) -> str:
        """A file name for it, as enroot itself would choose, after the registry."""
        return re.sub("[/:@]", "+", str(self))


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host, seen in the container. Both paths are absolute."""

    source: Path
    target: Path
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """From SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro. Raises ConfigError: it is none of these."""
        source, *rest = text.split(":")
        target, *options = rest or [source]
        paths = Path(source), Path(target)
        if options not in ([], ["ro"]) or not all(path.is_absolute() for path in paths) or paths[1] == paths[1].parent:
            raise ConfigError(
                f"container.mounts: {text!r} is not a mount; write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with "
                "absolute paths, TARGET other than /"
            )
        return cls(*paths, read_only=bool(options))


class ContainerKind(StrEnum):
    """What the ranks run in (docs/containers.md)."""

    none = "none"
    enroot = "enroot"
    pyxis = "pyxis"
    apptainer = "apptainer"
    docker = "docker"


@config
class Recipe:
    """What is installed on top of an image of a registry, before anything runs in it."""

    packages: list[str] = field(default_factory=list)
    """Python packages as pip takes them, such as transformers==4.46.0; they are installed first."""
    commands: list[str] = field(default_factory=list)
    """Lines for the image's sh, such as apt-get update && apt-get install -y git; they run as root, in the order given,
    and the first that fails ends the build."""


@config
class Container:
    """What the ranks run in; docs/containers.md tells what they find there."""

    kind: ContainerKind = ContainerKind.none
    image: str | None = None
    """A file (.sqsh for enroot and pyxis, .sif for apptainer), or an image in a registry, such as
    nvcr.io/nvidia/pytorch:23.04-py3."""
    recipe: Recipe = field(default_factory=Recipe)
    """What is built on top of `image`, once, by enroot or apptainer on the first node."""
    image_dir: str = "${runs_dir}/../images"
    """A shared folder for the files of registry images, and for those built of recipes; it is created if missing."""
    digest: str | None = None
    """SHA-256 of the image file, or docker's image ID, sha256:…; tdpp refuses an image with another one."""
    mounts: list[str] = field(default_factory=list)
    """Further mounts from the host: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro."""
    python: str = "python3"
    """The Python interpreter in the image."""
    reload: bool = False
    """Create the container again even if the node already has one."""

    def __post_init__(self) -> None:
        kind = self.kind
        mounts = [Mount.parse(text) for text in self.mounts]
        _check_recipe(self)
        if kind == "none":
            return
        if not self.image:
            raise ConfigError(f"container.kind={kind} needs container.image, such as {_EXAMPLE}")
        if not self.python:
            raise ConfigError("container.python is empty; give the image's interpreter, such as python3")
        suffix = Path(self.image).suffix
        if suffix not in IMAGE_SUFFIX.values():
            ImageReference.parse(self.image)
        elif kind == "docker":
            raise ConfigError(
                f"container.image={self.image} is a file, but docker needs an image name; load it on every node "
                f"(docker load), and give its name"
            )
        elif suffix != IMAGE_SUFFIX[kind]:
            raise ConfigError(
                f"container.image={self.image} is not an image file of {kind}; those end in {IMAGE_SUFFIX[kind]}"
            )
        if self.digest is not None:
            _digest(self.digest, kind, from_registry=suffix != IMAGE_SUFFIX.get(kind))
        for mount in mounts:
            for path in (mount.source, mount.target):
                mountable(kind, path, "container.mounts")


BUILDERS = ("enroot", "apptainer")
"""The kinds that build images of recipes."""


def _check_recipe(container: Container) -> None:
    """The kind can build the recipe, and the image is one to build on."""
    lines = {
        f"container.recipe.{key}[{number}]": line
        for key in ("packages", "commands")
        for number, line in enumerate(getattr(container.recipe, key))
    }
    if lines and container.kind not in BUILDERS:
        raise ConfigError(
            f"container.recipe is built by enroot or apptainer, not with container.kind={container.kind}; use "
            f"container=enroot or container=apptainer, or put the packages into the image"
        )
    if lines and container.image and Path(container.image).suffix in IMAGE_SUFFIX.values():
        raise ConfigError(
            f"container.recipe builds on an image of a registry, and container.image={container.image} is a file; give "
            f"the image that the file was made of, such as {_EXAMPLE}"
        )
    for key, line in lines.items():
        if not line.strip() or "\0" in line:
            raise ConfigError(f"{key}={line!r} is empty; leave it out")
        if without_passwords(line) != line:
            raise ConfigError(
                f"{key} has a password, which would be written to the run's files; have pip or git read it from a file "
                f"of the image, or build the image yourself"
            )
        if ".packages[" in key and (line.startswith("-") or re.search(r"[\r\n]", line)):
            raise ConfigError(f"{key}={line!r} is not a package; give options of pip in container.recipe.commands")
        if container.kind == "apptainer" and ("{{" in line or re.search(r"^\s*%", line, re.MULTILINE)):
            raise ConfigError(
                f"{key}={line!r}: apptainer takes {{{{ and lines that begin with % for its own; write it differently"
            )


def recipe_script(container: Container) -> str:
    """What the image's sh runs to make the recipe; empty without one."""
    recipe = container.recipe
    packages = [shlex.join([container.python, "-m", "pip", "install", "--no-cache-dir", *recipe.packages])]
    return "\n".join([*(packages if recipe.packages else []), *recipe.commands])


def _digest(text: str, kind: ContainerKind, *, from_registry: bool) -> None:
    if kind == "docker" and not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise ConfigError(
            f"container.digest={text!r} is not an image ID; give what 'docker image inspect --format={{.Id}} IMAGE' "
            f"prints, sha256: and 64 hexadecimal digits"
        )
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise ConfigError(
            f"container.digest={text!r} is not the SHA-256 of an image file; give sha256: and the 64 hexadecimal "
            f"digits that 'sha256sum FILE' prints"
        )
    if kind == "pyxis" and from_registry:
        raise ConfigError(
            "container.digest is for image files, but pyxis fetches the image from the registry; give the registry's "
            "digest in container.image (name@sha256:…), or import the image into a .sqsh file and give that"
        )


def has_digest(container: Container) -> bool:
    """Whether the configuration says which image it must be, not only where it lies."""
    return container.digest is not None or (container.image is not None and "@sha256:" in container.image)


def mountable(kind: ContainerKind, path: Path, asked_by: str) -> None:
    """A path can be mounted. `asked_by` is what names it: a key, perhaps with its value."""
    pattern, words = _UNMOUNTABLE[kind]
    if re.search(pattern, str(path)):
        raise ConfigError(
            f"{asked_by}: {kind} cannot mount {str(path)!r}, because it accepts no path with {words}; use another "
            f"path, such as a link to it"
        )


def check_environment(kind: ContainerKind, cluster: Cluster, groups: Iterable[str]) -> None:
    """What the cluster gives to the ranks of these groups can be given in the container."""
    if kind == "none":
        return
    given = {"cluster": cluster.environment}
    for group in dict.fromkeys(groups):
        given[f"cluster.groups.{group}"] = cluster.groups[group].environment
    for owner, variables in given.items():
        for name, value in variables.items():
            variable(kind, name, value, f"{owner}.environment.{name}")
    for name in cluster.environment_from:
        variable(kind, name, "", "cluster.environment_from")


def variable(kind: ContainerKind, name: str, value: str, key: str) -> None:
    """An environment variable can be given. `key` is what names it."""
    pattern, words = _RESERVED[kind]
    if re.fullmatch(pattern, name):
        raise ConfigError(f"{key}: {kind} sets {words} itself; leave it out")
    if kind in ("apptainer", "docker"):
        return
    # Variables are lines of a file, and a pair of quotes around a value is dropped.
    if "\n" in value or re.fullmatch(r"[\"'].*[\"']\s*", value):
        raise ConfigError(
            f"{key}={value!r}: {kind} accepts no value with a line break, or with quotation marks around it; remove "
            f"them"
        )
