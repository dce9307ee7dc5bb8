"""`tdpp profile import=DIR,… export=DIR`: profiles of IIDP and JABAS, read and written as their folders are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.errors import ConfigError, reworded
from conf.reading.files import write_whole
from conf.visible import plural
from fasop.costs.profiles.files import name_of, profile_path, read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import Steps
from fasop.shares.in_profiles import profiles_of, public_of
from fasop.shares.public_folders import PublicFolders, files_of, lacking, read_folders
from fasop.shares.public_servers import CONFIGURATION
from launch.errors import LaunchError
from launch.profile.arguments import Arguments, check_name_free
from launch.profile.files import write
from launch.screen import print_table, remark


def main(arguments: Arguments, comment: str) -> int:
    """Reads folders, or profiles that were made of such; writes profiles, folders or both."""
    if not arguments.folders:
        public = public_of({name: _read(name) for name in arguments.exported})
    else:
        public = read_folders(arguments.folders)
        if arguments.profile is None and arguments.export is None:
            raise LaunchError(
                f"import={','.join(map(str, arguments.folders))}: give a destination: profile=NAME writes profiles, "
                f"export=DIR writes one folder"
            )
        if arguments.profile is not None:
            _import(public, arguments.profile, arguments, comment)
    if arguments.export is not None:
        _export(public, arguments.export)
    return 0


def _read(name: str) -> LayerProfile:
    with reworded(LaunchError, f"profile={name}: ", of=ConfigError):
        return read_profile(name)


def _import(public: PublicFolders, wanted: str, arguments: Arguments, comment: str) -> None:
    source = f"imported from {', '.join(folder.name or str(folder) for folder in arguments.folders)}"
    profiles = profiles_of(public, source)
    names = {
        gpu: name_of(wanted, re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_"), alone=len(profiles) == 1)
        for gpu in profiles
    }
    if len({*names.values()}) < len(names):
        raise LaunchError(f"profile={wanted}: two of the GPUs {', '.join(names)} would get the same name")
    for name in names.values():
        check_name_free(name, arguments)
    for gpu, name in names.items():
        write(name, profiles[gpu], arguments, comment)
    print_table(*table(profiles))
    for name in names.values():
        print(f"written: {profile_path(name)}; cluster.gpus.<key>.profile={name} uses it")


def table(profiles: Mapping[str, LayerProfile]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """What was measured on each GPU, by local batch size."""
    heading = ["GPU", "host", "model", "local batch", "room for", "workers: forward + backward ms"]
    return heading, [
        [
            gpu,
            steps.host,
            steps.model or "-",
            str(steps.micro_batch_size),
            "-" if steps.most_workers is None else str(steps.most_workers),
            _times(steps),
        ]
        for gpu, profile in profiles.items()
        for steps in profile.steps
    ]


def _times(steps: Steps) -> str:
    every = [f"{times.workers}: {times.forward:.1f} + {times.backward:.1f}" for times in steps.times]
    return ", ".join(every) or "-"


def _export(public: PublicFolders, root: Path) -> None:
    """Nothing that is there is overwritten; what is there and the same stays."""
    files = files_of(public, root)
    taken = [file for file, content in files.items() if file.exists() and not _is(file, content)]
    if taken:
        raise LaunchError(
            f"export={root}: {taken[0]} already exists with other content"
            + (f" (and {plural(len(taken) - 1, 'more file')})" if len(taken) > 1 else "")
            + "; nothing was written; choose another folder"
        )
    for file, content in files.items():
        with reworded(LaunchError, f"export={root}: cannot create {file.parent}: "):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    print(f"written: {plural(len(files), 'file')} in {root}")
    if (what := lacking(public)) is not None:
        remark(f"no {CONFIGURATION} for IIDP's solver: {what}")
    else:
        print(f"IIDP's solver reads {root / CONFIGURATION}, and so does 'tdpp search iidp={root / CONFIGURATION}'")


def _is(file: Path, content: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == content
    except (OSError, UnicodeDecodeError):
        return False
