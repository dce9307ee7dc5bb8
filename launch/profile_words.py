"""The words of `tdpp profile` that are not Hydra's."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf.profile import profile_path
from conf.schema import Precision
from launch.errors import LaunchError

KEYS = ("tensor_sizes", "micro_batches", "seconds", "wait_min", "profile", "overwrite", "add")
OF_IMPORT = ("import", "gpu", "precision", "micro_batch_size", "backward_ratio")
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Files `<files>_<tensor size>.npy` of the public layout, and what they do not tell."""

    files: Path
    gpu: str
    precision: Precision
    micro_batch_size: int
    backward_ratio: float
    """What a backward pass takes, in forward passes."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    tensor_sizes: tuple[int, ...] = ()
    """Empty: all that fit."""
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    seconds: float = 10.0
    """At most, of passes for a tensor size and micro-batch."""
    wait_min: float = 10.0
    profile: str | None = None
    overwrite: bool = False
    add: bool = False
    known_cost: Import | None = None
    overrides: tuple[str, ...] = field(default=())


def parse(argv: Sequence[str]) -> Asked:
    """Takes the command's own words out of the others.

    Raises:
        LaunchError: a word has no such value.
    """
    own, overrides = {}, []
    for word in argv:
        key, _, value = word.partition("=")
        if key in (*KEYS, *OF_IMPORT):
            own[key] = value
        else:
            overrides.append(word)
    asked = Asked(
        tensor_sizes=_sizes("tensor_sizes", own["tensor_sizes"]) if "tensor_sizes" in own else (),
        micro_batches=_sizes("micro_batches", own["micro_batches"]) if "micro_batches" in own else MICRO_BATCHES,
        seconds=_above_0("seconds", own.get("seconds", "10")),
        wait_min=_above_0("wait_min", own.get("wait_min", "10")),
        profile=own.get("profile"),
        overwrite=_flag("overwrite", own.get("overwrite", "false")),
        add=_flag("add", own.get("add", "false")),
        known_cost=_import(own),
        overrides=tuple(overrides),
    )
    if asked.overwrite and asked.add:
        raise LaunchError("overwrite=true and add=true: a file is either replaced or added to; leave out one of them")
    if asked.profile is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", asked.profile):
        raise LaunchError(f"profile={asked.profile!r} cannot name a profile: use letters, digits, '_' and '-'")
    return asked


def check_free(name: str, asked: Asked) -> None:
    """Whether a profile of that name may be written; before anything is measured, so that no time is lost.

    Raises:
        LaunchError: it may not.
    """
    path = profile_path(name)
    if path.exists() and not (asked.overwrite or asked.add):
        raise LaunchError(
            f"profile={name}: {path} exists; choose another name, add=true puts what is measured into it (in the place "
            "of what is there for the same sizes), overwrite=true replaces it"
        )
    if not os.access(path.parent, os.W_OK):
        raise LaunchError(f"profile={name}: you may not write in {path.parent}, where tdpp keeps its profiles")


def _import(own: dict[str, str]) -> Import | None:
    given = [key for key in OF_IMPORT if key in own]
    if not given:
        return None
    missing = [key for key in OF_IMPORT if key not in own]
    if missing:
        raise LaunchError(
            f"{', '.join(f'{key}={own[key]}' for key in given)}: an import needs "
            f"{', '.join(f'{key}=…' for key in missing)}, too: the files do not tell, and nothing is assumed"
        )
    if own["precision"] not in list(Precision):
        raise LaunchError(f"precision={own['precision']} must be one of {', '.join(Precision)}")
    (size,) = _sizes("micro_batch_size", own["micro_batch_size"])[:1]
    return Import(
        files=Path(own["import"]),
        gpu=own["gpu"],
        precision=Precision(own["precision"]),
        micro_batch_size=size,
        backward_ratio=_above_0("backward_ratio", own["backward_ratio"]),
    )


def _sizes(key: str, text: str) -> tuple[int, ...]:
    parts = text.strip("[]").split(",")
    if not all(part.strip().isdecimal() and part.isascii() and int(part) for part in parts):
        raise LaunchError(f"{key}={text} must be numbers of 1 or more, joined by commas, such as {key}=1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _above_0(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise LaunchError(f"{key}={text} must be a number above 0")
    return number


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise LaunchError(f"{key}={text} must be true or false")
    return text == "true"
