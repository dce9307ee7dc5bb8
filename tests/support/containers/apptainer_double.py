"""A test double of apptainer: it takes only the options that the launcher gives, and gives the command only what the
real one would. It does not isolate. For tests alone:

    TDPP_DOUBLE_REGISTRY  as for enroot's double
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

MAGIC = b"double of a SIF\n"
FLAGS = ("--cleanenv", "--no-eval", "--no-mount=home,cwd", "--nv")
NOT_PERMITTED = ("HOME", "APPTAINER_SHELL", "APPTAINER_APPNAME")
KEYS = {"type", "source", "destination", "ro"}


def main(argv: list[str]) -> None:
    if argv[:1] == ["exec"]:
        execute(argv[1:])
    elif argv[:1] == ["pull"] and len(argv) == 3:
        pull(Path(argv[1]), argv[2])
    elif argv[:1] == ["build"] and len(argv) == 3:
        build(Path(argv[1]), Path(argv[2]))
    else:
        fail(f"unknown command or options: {argv}")


def pull(file: Path, uri: str) -> None:
    if file.exists():
        fail(f'Image file already exists: "{file}" - will not overwrite')
    if not uri.startswith("docker://"):
        fail(f"could not determine transport of {uri}")
    image = Path(os.environ["TDPP_DOUBLE_REGISTRY"], uri.removeprefix("docker://").replace("/", "+"))
    if not image.is_file():
        fail(f"While making image from oci registry: reading manifest of {uri}: manifest unknown")
    shutil.copyfile(image, file)


def build(file: Path, definition: Path) -> None:
    """Builds a definition of a header and %post alone, whose lines run in the folder of the definition."""
    header, *sections = re.split(r"^(%\w+.*)$", definition.read_text(), flags=re.MULTILINE)
    keys = dict(line.split(": ", 1) for line in header.split("\n") if line.strip())
    if keys.keys() != {"Bootstrap", "From"} or keys["Bootstrap"] != "docker" or sections[0::2] != ["%post"]:
        fail(f"While building from {definition}: invalid definition")
    if file.exists():
        fail(f"While performing build: build target '{file}' already exists. Use --force")
    pull(file, f"docker://{keys['From']}")
    done = subprocess.run(["/bin/sh", "-ex", "-c", sections[1]], cwd=definition.parent, check=False)
    if done.returncode:
        file.unlink()
        fail(f"While performing build: while running engine: exit status {done.returncode}")


def execute(argv: list[str]) -> None:
    words, folder, given = list(argv), "/", set()
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--mount":
            check_mount(words.pop(0))
        elif word.startswith("--pwd="):
            folder = word.removeprefix("--pwd=")
        elif word in FLAGS:
            given.add(word)
        else:
            fail(f"unknown flag: {word}")
    if len(words) < 2 or "--cleanenv" not in given:
        fail("requires an image, a command and --cleanenv")
    if not Path(words[0]).is_file() or not Path(words[0]).read_bytes().startswith(MAGIC):
        fail(f"could not open image {words[0]}: image format not recognized")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/root", "LANG": "C"}
    for name, value in os.environ.items():
        inside = name.removeprefix("APPTAINERENV_")
        if inside != name and inside not in NOT_PERMITTED:
            if "--no-eval" not in given and "$" in value:
                fail(f"this double does not evaluate {name}={value}")
            environment[inside] = value
    os.chdir(folder)
    os.execvpe(words[1], words[1:], environment)


def check_mount(text: str) -> None:
    [fields] = csv.reader([text])
    pairs = dict((*field.split("=", 1), "")[:2] for field in fields)
    if pairs.get("type") != "bind" or not {"source", "destination"} <= set(pairs) <= KEYS:
        fail(f"invalid mount specification: {text}")
    if not Path(pairs["source"]).exists():
        fail(f"mount source {pairs['source']} doesn't exist")


def fail(message: str) -> NoReturn:
    print(f"FATAL:   {message}", file=sys.stderr)
    raise SystemExit(255)


if __name__ == "__main__":
    main(sys.argv[1:])
