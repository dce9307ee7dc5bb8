"""The words of `tdpp profile` that are not Hydra's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.reading.values import Reader, above_0, flag, name_of, one_of, own_words, path, several, whole
from conf.reading.writable import why_not_kept
from conf.schema.experiment import Precision
from fasop.costs.profile import profile_path
from launch.errors import LaunchError

MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Files `<files>_<tensor size>.npy` of the public layout, and what they do not say."""

    files: Path
    gpu: str
    precision: Precision
    micro_batch_size: int
    backward_ratio: float
    """What a backward pass takes, in forward passes."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    tensor_sizes: tuple[int, ...] = ()
    """Empty: all that fit."""
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    seconds: float = 10.0
    """At most, of passes for a tensor size and micro-batch."""
    wait_min: float = 10.0
    profile: str | None = None
    links: Path | None = None
    """Where the table of links between node groups is written."""
    overwrite: bool = False
    add: bool = False
    known_cost: Import | None = None
    overrides: tuple[str, ...] = field(default=())


def parse(argv: Sequence[str]) -> Arguments:
    """Takes the command's own words out of the others.

    Raises:
        LaunchError: a word has no such value.
    """
    own, overrides = own_words(argv, {**WORDS, **OF_IMPORT}, LaunchError)
    of_import = {key: own.pop(key) for key in OF_IMPORT if key in own}
    arguments = Arguments(**own, known_cost=_import(of_import) if of_import else None, overrides=tuple(overrides))
    if arguments.overwrite and arguments.add:
        raise LaunchError("overwrite=true and add=true: a file is either replaced or added to; leave out one of them")
    return arguments


def check_free(name: str, arguments: Arguments) -> None:
    """Whether a profile of that name may be written; before anything is measured, so that no time is lost.

    Raises:
        LaunchError: it may not.
    """
    path = profile_path(name)
    if (why := why_not_kept(name, path.parent)) is not None:
        raise LaunchError(f"profile={name}: {why}")
    if path.exists() and not (arguments.overwrite or arguments.add):
        raise LaunchError(
            f"profile={name}: {path} exists; choose another name, add=true puts what is measured into it (in the place "
            "of what is there for the same sizes), overwrite=true replaces it"
        )


def _import(given: Mapping[str, Any]) -> Import:
    missing = [key for key in OF_IMPORT if key not in given]
    if missing:
        raise LaunchError(
            f"{', '.join(f'{key}={value}' for key, value in given.items())}: an import needs "
            f"{', '.join(f'{key}=…' for key in missing)}, too: the files do not tell, and nothing is assumed"
        )
    return Import(files=given["import"], **{key: value for key, value in given.items() if key != "import"})


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(several(whole)(text.strip("[]"))))


WORDS: Mapping[str, Reader[Any]] = {
    "tensor_sizes": _sizes,
    "micro_batches": _sizes,
    "seconds": above_0,
    "wait_min": above_0,
    "profile": name_of("profile"),
    "links": path,
    "overwrite": flag,
    "add": flag,
}
"""By word, which is a field of `Arguments`."""
OF_IMPORT: Mapping[str, Reader[Any]] = {
    "import": path,
    "gpu": str,
    "precision": one_of(Precision),
    "micro_batch_size": whole,
    "backward_ratio": above_0,
}
"""By word, which is a field of `Import`, or its `files`."""
