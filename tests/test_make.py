"""What `make` does to the machine before it runs anything: which packages it installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support import ROOT

MAKE = shutil.which("make")
WANTED = {
    "browser": "chromium",
    "slurm": "slurm-wlm slurmdbd munge mariadb-server iproute2",
    "shells": "bash zsh fish",
    "hosts": "openssh-server openssh-client iproute2",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH on which nothing is installed yet; what apt-get is asked for goes to stderr, too."""
    for name, script in (("id", "echo ${FAKE_UID}"), ("apt-get", 'echo "apt-get $*" >&2')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def make(target: str, path: Path, uid: int, *words: str) -> list[str]:
    """The lines on stderr, in their order."""
    assert MAKE is not None
    command = [MAKE, "--no-print-directory", "-C", str(ROOT), target, *words]
    environment = {"PATH": str(path), "FAKE_UID": str(uid)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize(("target", "packages"), WANTED.items(), ids=WANTED)
def test_root_reads_which_packages_are_installed_before_they_are(target: str, packages: str, path: Path) -> None:
    said, update, install = make(target, path, uid=0)
    assert said.startswith(f"installing Debian's packages {packages}, for the ")
    assert update.startswith("apt-get update")
    assert install.startswith("apt-get install") and install.endswith(f" {packages}")


@pytest.mark.parametrize(("target", "packages"), WANTED.items(), ids=WANTED)
def test_others_read_what_to_install_for_the_tests_that_are_skipped(target: str, packages: str, path: Path) -> None:
    (said,) = make(target, path, uid=1000)
    assert said.endswith(f"are skipped; to run them, install Debian's packages {packages}")


@pytest.mark.parametrize("uid", [0, 1000], ids=["root", "others"])
def test_packages_of_text_are_downloaded_and_not_installed(path: Path, tmp_path: Path, uid: int) -> None:
    for tool in ("mkdir", "ls"):
        (path / tool).symlink_to(shutil.which(tool) or tool)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "gcc-12-locales_1_all.deb").touch()
    said, *done = make("corpora", path, uid, f"CORPORA_IN={tmp_path / 'in'}")
    names = "libreoffice-help-de libreoffice-help-en-us"
    assert said == f"downloading Debian's packages {names}, for the tests of pairs"
    assert done == [*(["apt-get update -qq"] if uid == 0 else []), f"apt-get download -qq {names}"]


def test_without_packages_of_text_their_tests_are_skipped_with_a_word(path: Path, tmp_path: Path) -> None:
    (path / "mkdir").symlink_to(shutil.which("mkdir") or "mkdir")
    (path / "apt-get").write_text("#!/bin/sh\nexit 100\n")
    *_, said = make("corpora", path, 1000, f"CORPORA_IN={tmp_path}")
    assert said.startswith("the tests of pairs on Debian's packages are skipped; to run them, put libreoffice-help-de")


def test_every_test_runs_once_among_those_that_wait_or_among_the_others() -> None:
    assert MAKE is not None
    command = [MAKE, "-n", "-C", str(ROOT), "test"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    waiting, others = re.findall(r"--numprocesses=(.*?) -o cache_dir", planned)
    paths = waiting.split()[1:]
    assert paths and all((ROOT / path).exists() for path in paths)
    assert re.findall(r"--ignore=(\S+)", others) == paths
    assert not re.search(r" tests\S*", re.sub(r"--ignore=\S+", "", others))


def pinned() -> dict[str, list[str]]:
    """By normalised name, the hashes in constraints.txt."""
    entries = re.findall(r"^([\w.-]+)==[^\n]+\\\n((?: +--hash=.*\n)+)", PINNED, re.MULTILINE)
    return {normalised(name): re.findall(r"=sha256:([0-9a-f]{64})\b", hashes) for name, hashes in entries}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


PINNED = (ROOT / "constraints.txt").read_text()


def test_every_package_has_one_version_and_the_hashes_of_its_files() -> None:
    lines = [normalised(name) for name in re.findall(r"^([\w.-]+)", PINNED, re.MULTILINE)]
    assert lines and lines == sorted(set(lines))
    assert set(pinned()) == set(lines)
    assert all(hashes and len(hashes) == len(set(hashes)) for hashes in pinned().values())


def test_all_that_the_project_asks_for_is_pinned_and_what_installs_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"], "pip"]
    wanted += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    names = {normalised(re.split(r"[<>=!~\[; ]", line)[0]) for line in wanted}
    assert names <= set(pinned())


@pytest.mark.parametrize("extras", ["train", "dev", "train,megatron"])
@pytest.mark.parametrize("index", ["", "https://host/simple"])
def test_nothing_is_installed_without_a_look_at_its_hash(extras: str, index: str) -> None:
    assert MAKE is not None
    command = [MAKE, "-n", "-B", "-C", str(ROOT), f".venv/{extras}.installed", f"TORCH_INDEX={index}"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    installs = [line for line in planned.splitlines() if " install " in line]
    (itself,) = [line for line in installs if " -e " in line]
    others = [line for line in installs if line != itself]
    assert all("--require-hashes" in line for line in others)
    assert "--build-constraint constraints.txt --no-deps -e ." in itself
    assert [line for line in others if "--index-url" in line] == [
        line for line in others if index and line.endswith(f" --no-deps --index-url {index} torch")
    ]


def test_no_page_advises_to_search_several_indexes() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    assert [page.name for page in pages if re.search(r"extra.index|find.links", page.read_text(), re.IGNORECASE)] == []
