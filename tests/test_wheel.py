"""What pip installs of a built wheel does the first day as the checkout does it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.first

BUILT = ("pyproject.toml", "README.md", "LICENSE")
LIMIT_S = 1800
NO_SOURCE = {"__pycache__", ".mypy_cache", ".ruff_cache"}
BUILDS = ("*.pyx", "*.pxd", "compiled/*.c")
"""Files of the rooms of which a wheel has what is built of them."""


def rooms() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, as building leaves files beside the sources; with the setuptools that is installed, and without
    the optimizations that take a compiler most of its time."""
    tree, output = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in rooms():
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*NO_SOURCE, "*.so", "*.c"))
    for name in BUILT:
        shutil.copy(ROOT / name, tree)
    project = (tree / "pyproject.toml").read_text()
    assert '"-O3"' in project
    (tree / "pyproject.toml").write_text(project.replace('"-O3"', '"-O0"'))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, output], cwd=tree, check=True, capture_output=True, timeout=LIMIT_S)
    (found,) = output.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_rooms(wheel: Path) -> None:
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT).as_posix()
        for room in rooms()
        for path in (ROOT / room).rglob("*")
        if path.is_file() and not NO_SOURCE & {*path.parts} and not any(path.match(name) for name in BUILDS)
    }
    assert packed == there


@pytest.mark.slow
def test_an_installed_wheel_does_the_first_day_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    venv.create(environment)
    (site,) = environment.glob("lib/python3*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    python = environment / "bin" / "python"
    given = {key: value for key, value in os.environ.items() if not key.startswith(("TDPP_", "XDG_", "PYTHON"))}

    def done(*command: str | Path) -> str:
        ran = subprocess.run(
            command, cwd=home, env=given | {"HOME": str(home), "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    pip = ("-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    done(sys.executable, *pip, wheel)
    tdpp = environment / "bin" / "tdpp"
    where = done(python, "-c", "import conf, launch, reports; print(*(m.__file__ for m in (conf, launch, reports)))")
    assert all(Path(path).is_relative_to(site) for path in where.split())
    done(tdpp, "init", "--local")
    assert "train.lr" in done(tdpp, "config", "train.lr")
    done(tdpp, "search", "experiment=mine", "cluster.groups.local.gpus_per_node=4", "plan=best")
    done(tdpp, "data", "prepare", "--source", "stdlib", "--max-mb", "1", "--output", "data/stdlib")
    words = ("experiment=mine", "parallel=single", "executor=local", "train.iterations=6", "train.log_interval=2")
    assert "succeeded" in done(tdpp, "launch", *words)
    pages = done(tdpp, "report").split()
    assert [Path(page).name for page in pages] == ["index.html", "timeline.html"]
    assert sorted(path.name for path in home.iterdir() if not path.name.startswith(".")) == ["data", "runs"]
