"""enroot for a test: the double, or the real one that TDPP_TEST_ENROOT names, each in folders of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import PATIENCE_S
from tests.support.containers import apptainer_double, docker_double, enroot_double
from tests.support.containers.image import write_squashfs, write_tar

REAL = os.environ.get("TDPP_TEST_ENROOT")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image file that the enroot under test takes."""
    folder = tmp_path_factory.mktemp("image")
    path = folder / "small+1.0.sqsh"
    (write_squashfs if REAL else write_tar)(path, folder)
    return path


@dataclass(frozen=True)
class Runtime:
    """A container runtime on PATH, which notes its calls."""

    folder: Path
    program: str

    def __call__(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *map(str, arguments)],
            env=os.environ | environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def popen(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.program, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )

    @property
    def calls(self) -> list[str]:
        """The first word of each call so far."""
        return (self.folder / "calls").read_text().split() if (self.folder / "calls").exists() else []

    @property
    def data(self) -> Path:
        """Where enroot keeps its containers."""
        return self.folder / "data"

    @property
    def hold(self) -> Path:
        """While this file exists, the double waits half-way in what it makes."""
        return self.folder / "hold"

    @property
    def registry(self) -> Path:
        """Images that the double can import, '/' in their names written as '+'."""
        return self.folder / "registry"


def on_path(folder: Path, program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Puts a program on PATH that runs `words`."""
    runtime = Runtime(folder, program)
    for name in ("bin", "registry", "temp"):
        (folder / name).mkdir()
    shim = folder / "bin" / program
    shim.write_text(f'#!/bin/sh\necho "$1" >> {shlex.quote(f"{folder}/calls")}\nexec {shlex.join(words)} "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{Path(words[0]).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TDPP_DOUBLE_HOLD", str(runtime.hold))
    monkeypatch.setenv("TDPP_DOUBLE_REGISTRY", str(runtime.registry))
    return runtime


@pytest.fixture
def enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    if subprocess.run(["unshare", "-r", "-m", "true"], capture_output=True, check=False).returncode != 0:
        message = "this machine lets nobody make a user namespace, as enroot does"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
    folder = tmp_path / "enroot"
    folder.mkdir()
    for name in ("DATA", "RUNTIME", "CACHE", "CONFIG", "TEMP"):
        monkeypatch.setenv(f"ENROOT_{name}_PATH", str(folder / name.lower()))
    return on_path(folder, "enroot", [REAL] if REAL else [sys.executable, "-IS", enroot_double.__file__], monkeypatch)


@pytest.fixture
def double(enroot: Runtime) -> Runtime:
    """For what needs an enroot that waits half-way, or a registry."""
    if REAL:
        pytest.skip("needs the double of enroot")
    return enroot


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    folder = tmp_path / "apptainer"
    folder.mkdir()
    return on_path(folder, "apptainer", [sys.executable, "-IS", apptainer_double.__file__], monkeypatch)


DOCKER_IMAGE = "lab:1"
IMAGE_ID = f"sha256:{'1' * 64}"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """With an image; `data` is its daemon's folder. No container may be left."""
    folder = tmp_path / "docker"
    (folder / "data" / "images").mkdir(parents=True)
    (folder / "data" / "registry").mkdir()
    (folder / "data" / "images" / DOCKER_IMAGE).write_text(IMAGE_ID)
    monkeypatch.setenv("TDPP_DOUBLE_DOCKER", str(folder / "data"))
    yield on_path(folder, "docker", [sys.executable, "-IS", docker_double.__file__], monkeypatch)
    left = list((folder / "data").glob("containers/*"))
    assert left == []
