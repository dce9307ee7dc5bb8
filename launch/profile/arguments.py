"""The words of `tdpp profile` that are not Hydra's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.reading.files import check_free
from conf.reading.values import Reader, above_0, flag, name_of, one_of, parse_key_values, path, several, whole
from conf.schema.experiment import Precision
from conf.schema.values.partition import MOST
from fasop.costs.profiles.files import profile_path
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
    room_from: int | None = None
    """The micro-batch from which on larger ones are tried until memory has no room."""
    streams: tuple[int, ...] = ()
    """Copies of the whole model on a GPU that are tried; empty: none are."""
    seconds: float = 10.0
    """At most, of passes for a tensor size and micro-batch."""
    wait_min: float = 10.0
    profile: str | None = None
    links: Path | None = None
    """Where the table of links between node groups is written."""
    page: Path | None = None
    """Where gradient buckets and streams are drawn."""
    graph_output: Path | None = None
    """Where the model is written as a graph.txt."""
    overwrite: bool = False
    add: bool = False
    known_cost: Import | None = None
    folders: tuple[Path, ...] = ()
    """The folders of profiles of IIDP or JABAS to be read."""
    nccl_tests: tuple[Path, ...] = ()
    """Outputs of nccl-tests to be read."""
    export: Path | None = None
    """Where such a folder is written."""
    exported: tuple[str, ...] = ()
    """The profiles that are."""
    overrides: tuple[str, ...] = field(default=())


def parse(argv: Sequence[str]) -> Arguments:
    """Takes the command's own words out of the others. Raises LaunchError: a word has no such value."""
    own, overrides = parse_key_values(argv, {**WORDS, **OF_IMPORT}, LaunchError)
    if (batches := own.get("micro_batches")) is not None:
        own["micro_batches"], own["room_from"] = batches
    of_import = {key: own.pop(key) for key in OF_IMPORT if key in own}
    folders = _folders(of_import)
    names: tuple[str, ...] = own.pop("profile", ())
    if len(names) > 1 and (folders or "export" not in own):
        raise LaunchError(f"profile={','.join(names)}: only export=DIR takes several profiles; name one")
    if "export" in own and not folders and not names:
        raise LaunchError(
            f"export={own['export']}: name the profiles to write with profile=NAME,NAME, or folders with import=DIR,DIR"
        )
    arguments = Arguments(
        **own,
        profile=names[0] if names else None,
        exported=names if "export" in own and not folders else (),
        known_cost=_import(of_import) if of_import and not folders else None,
        folders=folders,
        overrides=tuple(overrides),
    )
    if (folders or "export" in own) and overrides:
        raise LaunchError(
            f"{overrides[0]}: import=DIR and export=DIR take profile=NAME, add=true and overwrite=true only"
        )
    if arguments.page is not None and (of_import or folders or "export" in own):
        raise LaunchError(f"page={arguments.page}: a page shows measurements; leave out import=… and export=…")
    if arguments.overwrite and arguments.add:
        raise LaunchError("overwrite=true and add=true: these exclude each other; leave out one of them")
    return arguments


ADD = "use add=true to add the measurements (those of the same sizes are replaced), or "
"""A way out where a profile or a table of links is there already."""


def check_name_free(name: str, arguments: Arguments) -> None:
    """Raises OutputError where no profile of that name may be written."""
    replace = arguments.overwrite or arguments.add
    check_free(profile_path(name), f"profile={name}", replace=replace, kept_as=name, more=ADD)


def _folders(given: Mapping[str, Any]) -> tuple[Path, ...]:
    """Returns the folders of profiles of IIDP or JABAS; none where files of the public FASOP are meant."""
    if [*given] != ["import"]:
        return ()
    parts = tuple(Path(part.strip()) for part in given["import"].split(","))
    return parts if len(parts) > 1 or parts[0].is_dir() else ()


def _import(given: Mapping[str, Any]) -> Import:
    missing = [key for key in OF_IMPORT if key not in given]
    if missing:
        raise LaunchError(
            f"{', '.join(f'{key}={value}' for key, value in given.items())}: an import needs "
            f"{', '.join(f'{key}=…' for key in missing)}, too; the files do not contain them"
            + (f" ({given['import']} is not a folder of profiles of IIDP or JABAS)" if [*given] == ["import"] else "")
        )
    return Import(files=Path(given["import"]), **{key: value for key, value in given.items() if key != "import"})


def _given(text: str) -> str:
    return str(path(text))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(several(whole)(text.strip("[]"))))


def _micro_batches(text: str) -> tuple[tuple[int, ...], int | None]:
    """Sizes, or `32+`: from there on all that fit."""
    if not text.endswith("+"):
        return _sizes(text), None
    first = whole(text.removesuffix("+"))
    return (first,), first


def _streams(text: str) -> tuple[int, ...]:
    """Reads numbers of streams, one among them: the gain of others is measured against it."""
    found = tuple(sorted({1, *_sizes(text)}))
    if found[-1] > MOST:
        raise ValueError(f"must be at most {MOST}")
    return found


WORDS: Mapping[str, Reader[Any]] = {
    "tensor_sizes": _sizes,
    "micro_batches": _micro_batches,
    "streams": _streams,
    "seconds": above_0,
    "wait_min": above_0,
    "profile": several(name_of("profile")),
    "export": path,
    "nccl_tests": several(path),
    "links": path,
    "page": path,
    "graph_output": path,
    "overwrite": flag,
    "add": flag,
}
"""The reader of each word, which is a field of `Arguments`."""
OF_IMPORT: Mapping[str, Reader[Any]] = {
    "import": _given,
    "gpu": str,
    "precision": one_of(Precision),
    "micro_batch_size": whole,
    "backward_ratio": above_0,
}
"""The reader of each word, which is a field of `Import`, or its `files`."""
