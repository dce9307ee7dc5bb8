"""A node's container is made once, whole, and again only when asked; whatever fails is told in one message."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema.containers import ImageReference
from conf.schema.experiment import ContainerKind
from launch.errors import LaunchError
from launch.machine.container_runtimes import RunContainer
from launch.node import container_setup
from launch.node.container_setup import Setup, check_program
from launch.node.image_file import record_of
from tests.launch.containers.conftest import Runtime
from tests.support import PATIENCE_S
from tests.support.containers.apptainer_double import MAGIC
from tests.support.launch.live import wait_for
from tests.support.ordinary_user import NOBODY, only_root_is_two_users, ordinary_user

REFERENCE = ImageReference.parse("nvcr.io/nvidia/pytorch:23.04-py3")


@pytest.fixture
def container(image: Path, tmp_path: Path) -> RunContainer:
    """Of the first run, with an image file that is there."""
    (tmp_path / "scratch").mkdir()
    return RunContainer(
        kind=ContainerKind.enroot,
        image=image,
        file=image,
        digest=None,
        mounts=(),
        folder=tmp_path,
        python="python3",
        gpus=False,
        reload=False,
        scratch=tmp_path / "scratch",
        run="tiny/1",
    )


@pytest.fixture
def imported(container: RunContainer, tmp_path: Path) -> RunContainer:
    """The same, with an image of a registry that nobody has brought yet."""
    return replace(container, image=REFERENCE, file=tmp_path / "images" / f"{REFERENCE.file_stem}.sqsh")


def ready(setup: Setup) -> Setup:
    wait_for(setup.step)
    return setup


def done(container: RunContainer, node_rank: int = 0) -> str:
    """A run that comes and goes; the name of its container."""
    with Setup(container, node_rank) as setup:
        return ready(setup).name


def until(setup: Setup, condition: Callable[[], object]) -> None:
    """Steps until something has happened; the container is not ready by then."""
    wait_for(lambda: condition() or setup.step())
    assert setup.doing is not None


def fails(container: RunContainer, node_rank: int = 0) -> str:
    with pytest.raises(LaunchError) as error, Setup(container, node_rank) as setup:
        ready(setup)
    return str(error.value)


def touch_in(enroot: Runtime, name: str) -> Path:
    """A file in the container: gone once it is made anew."""
    path = enroot.data / name / "touched"
    path.touch()
    return path


def test_a_fresh_node_gets_the_container(enroot: Runtime, container: RunContainer) -> None:
    name = done(container)
    assert name.startswith("tdpp-small+1.0-")
    assert enroot("list").stdout.split() == [name]
    assert enroot("start", name, "true").returncode == 0


def test_a_step_never_waits(double: Runtime, container: RunContainer) -> None:
    double.hold.touch()
    with Setup(container, 0) as setup:
        began = time.monotonic()
        assert not any(setup.step() for _ in range(100))
        assert time.monotonic() - began < 30
        assert setup.doing
        double.hold.unlink()
        ready(setup)


def test_the_next_run_uses_the_same_container(enroot: Runtime, container: RunContainer) -> None:
    touched = touch_in(enroot, done(container))
    done(replace(container, run="tiny/2"))
    assert touched.exists()
    assert enroot.calls.count("create") == 1


def test_two_nodes_of_one_machine_share_it(enroot: Runtime, container: RunContainer) -> None:
    with Setup(container, 0) as first, Setup(container, 1) as second:
        wait_for(lambda: first.step() and second.step())
        assert first.name == second.name
    assert enroot.calls.count("create") == 1


def test_two_that_find_nothing_at_the_same_time_share_it(enroot: Runtime, container: RunContainer) -> None:
    with Setup(container, 0) as first, Setup(container, 1) as second:
        wait_for(lambda: all([first.step(), second.step()]))
    assert enroot.calls.count("create") == 1


def test_a_reload_makes_it_anew_once_for_the_run(enroot: Runtime, container: RunContainer) -> None:
    touched = touch_in(enroot, done(container))
    again = replace(container, run="tiny/2", reload=True)
    with Setup(again, 0) as first, Setup(again, 1) as second:
        wait_for(lambda: first.step() and second.step())
    assert not touched.exists()
    done(again)  # as when the run is requeued
    assert enroot.calls.count("create") == 2


def test_a_reload_waits_for_the_run_that_uses_it(enroot: Runtime, container: RunContainer) -> None:
    with Setup(container, 0) as first, Setup(replace(container, run="tiny/2", reload=True), 0) as second:
        touched = touch_in(enroot, ready(first).name)
        until(second, lambda: "another process to release" in str(second.doing))
        for _ in range(10):
            assert not second.step()
        assert touched.exists()
        first.close()
        ready(second)
        assert not touched.exists()


def test_a_changed_image_gives_another_container(enroot: Runtime, container: RunContainer, tmp_path: Path) -> None:
    own = tmp_path / "own.sqsh"
    own.write_bytes(container.file.read_bytes() if container.file else b"")
    container = replace(container, image=own, file=own)
    before = done(container)
    os.utime(own, ns=(1, 1))
    after = done(container)
    assert sorted(enroot("list").stdout.split()) == sorted([before, after])
    assert before != after


def test_a_container_that_somebody_removed_is_made_again(enroot: Runtime, container: RunContainer) -> None:
    enroot("remove", "-f", done(container))
    name = done(container)
    assert enroot("list").stdout.split() == [name]


def test_two_processes_at_once_make_it_once(enroot: Runtime, container: RunContainer) -> None:
    both = [process(container) for _ in range(2)]
    assert [one.wait(PATIENCE_S) for one in both] == [0, 0]
    assert enroot.calls.count("create") == 1


def test_what_a_killed_process_left_half_made_is_made_again(double: Runtime, container: RunContainer) -> None:
    double.hold.touch()
    one = process(container)
    wait_for(lambda: list(double.data.glob("tdpp-*")))
    one.send_signal(signal.SIGKILL)
    one.wait()
    with Setup(container, 0) as setup:  # the orphan that still makes it is waited for
        until(setup, lambda: "another process to release" in str(setup.doing))
        double.hold.unlink()
        touched = touch_in(double, double("list").stdout.strip())
        ready(setup)
        assert not touched.exists()
        assert double("start", setup.name, "true").returncode == 0
    assert double.calls.count("create") == 2


def test_giving_up_ends_what_runs(double: Runtime, container: RunContainer) -> None:
    double.hold.touch()
    setup = Setup(container, 0)
    until(setup, lambda: list(double.data.glob("tdpp-*")))
    setup.close()
    double.hold.unlink()
    assert enroot_processes(double) == []
    touched = touch_in(double, double("list").stdout.strip())
    done(container)
    assert not touched.exists()


def test_node_0_brings_the_image_and_the_others_wait(double: Runtime, imported: RunContainer, image: Path) -> None:
    in_registry(double, image)
    double.hold.touch()
    assert imported.file is not None
    folder = imported.file.parent
    with Setup(imported, 0) as first, Setup(imported, 1) as second:
        until(first, lambda: folder.exists() and list(folder.iterdir()))
        assert not imported.file.exists()
        until(second, lambda: "which node 0 fetches" in str(second.doing))
        double.hold.unlink()
        wait_for(lambda: first.step() and second.step())
    assert sorted(folder.iterdir()) == [imported.file, record_of(imported.file)]
    assert imported.file.read_bytes() == image.read_bytes()
    done(replace(imported, run="tiny/2"))
    assert double.calls.count("import") == 1


def test_two_runs_bring_an_image_once(double: Runtime, imported: RunContainer, image: Path) -> None:
    in_registry(double, image)
    both = [process(replace(imported, run=f"tiny/{number}")) for number in range(2)]
    assert [one.wait(PATIENCE_S) for one in both] == [0, 0]
    assert double.calls.count("import") == 1


def test_giving_up_leaves_no_part_of_an_image(double: Runtime, imported: RunContainer, image: Path) -> None:
    in_registry(double, image)
    double.hold.touch()
    assert imported.file is not None
    folder = imported.file.parent
    with Setup(imported, 0) as setup:
        until(setup, lambda: folder.exists() and list(folder.iterdir()))
    assert list(folder.iterdir()) == []
    assert enroot_processes(double) == []


def test_what_a_killed_process_left_of_an_image_is_brought_again(
    double: Runtime, imported: RunContainer, image: Path
) -> None:
    in_registry(double, image)
    double.hold.touch()
    assert imported.file is not None
    folder = imported.file.parent
    one = process(imported)
    wait_for(lambda: folder.exists() and list(folder.iterdir()))
    one.send_signal(signal.SIGKILL)
    one.wait()
    double.hold.unlink()
    done(imported)
    assert sorted(folder.iterdir()) == [imported.file, record_of(imported.file)]
    assert imported.file.read_bytes() == image.read_bytes()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def fetched(double: Runtime, imported: RunContainer, image: Path) -> RunContainer:
    """With an image that an earlier run has fetched; its container is gone, and the next run asks for one."""
    in_registry(double, image)
    double("remove", "-f", done(imported))
    return replace(imported, run="tiny/2")


def image_of(container: RunContainer) -> Path:
    assert container.file is not None
    return container.file


def test_a_fetched_image_is_only_its_owners_to_write_and_its_digest_is_written_down(
    double: Runtime, imported: RunContainer, image: Path
) -> None:
    in_registry(double, image)
    before = os.umask(0o002)
    try:
        done(imported)
    finally:
        os.umask(before)
    file = image_of(imported)
    assert file.stat().st_mode & 0o022 == 0
    assert record_of(file).read_text() == f"{sha256(file.read_bytes())}  {file.name}\n"
    done(replace(imported, run="tiny/2"))


def test_an_image_that_has_changed_since_it_was_fetched_is_not_used(double: Runtime, fetched: RunContainer) -> None:
    file = image_of(fetched)
    file.write_bytes(file.read_bytes() + b"more")
    said = fails(fetched)
    assert said.startswith(f"{file} on ")
    assert f"has the digest sha256:{sha256(file.read_bytes())}, but {record_of(file)}, written when" in said
    assert double("list").stdout == ""


def test_an_image_with_another_time_and_the_same_content_is_used(double: Runtime, fetched: RunContainer) -> None:
    image_of(fetched).touch()
    assert done(fetched)


def test_a_record_that_holds_no_digest_is_said(double: Runtime, fetched: RunContainer) -> None:
    file = image_of(fetched)
    record_of(file).write_text("e3b0\n")
    os.utime(record_of(file), ns=(1, 1))
    assert fails(fetched).startswith(f"{record_of(file)}: not a SHA-256 ")


@pytest.mark.parametrize("who", ["its group", "everybody"])
@pytest.mark.parametrize("record", [False, True], ids=["image", "record"])
def test_an_image_that_others_can_write_is_not_used(
    double: Runtime, fetched: RunContainer, who: str, record: bool
) -> None:
    file = image_of(fetched)
    path = record_of(file) if record else file
    path.chmod(0o664 if who == "its group" else 0o666)
    said = fails(fetched)
    assert said.startswith(f"container.image_dir={file.parent}: {path} on ")
    assert f"can be written by {who}" in said
    assert double("list").stdout == ""


@only_root_is_two_users
@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
def test_an_image_of_another_user_is_not_used(double: Runtime, fetched: RunContainer, link: bool) -> None:
    """A link that somebody else made may lead to a file of one's own that is another image."""
    file = image_of(fetched)
    if link:
        file.rename(file.with_suffix(".old"))
        file.symlink_to(file.with_suffix(".old"))
    os.chown(file, NOBODY, NOBODY, follow_symlinks=False)
    assert "belongs to nobody, so somebody else could have put code there" in fails(fetched)
    assert double("list").stdout == ""


@pytest.mark.parametrize("kind", [ContainerKind.enroot, ContainerKind.apptainer, ContainerKind.pyxis])
def test_a_file_without_the_digest_of_the_configuration_is_not_used(
    enroot: Runtime, container: RunContainer, kind: ContainerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_setup, "check_program", lambda kind: None)
    digest = sha256(image_of(container).read_bytes())
    right = replace(container, kind=kind, digest=f"sha256:{digest}")
    assert done(right) != done(container)
    wrong = f"sha256:{'0' * 64}"
    assert f"has the digest sha256:{digest}, but container.digest={wrong}; it was not used" in fails(
        replace(right, digest=wrong)
    )


def test_apptainer_brings_an_image_and_needs_no_more(
    apptainer: Runtime, imported: RunContainer, tmp_path: Path
) -> None:
    sif = replace(imported, kind=ContainerKind.apptainer, file=tmp_path / "images" / "it.sif")
    (apptainer.registry / str(REFERENCE).replace("/", "+")).write_bytes(MAGIC)
    for _ in range(2):
        done(sif)
    assert sif.file is not None
    assert sif.file.read_bytes() == MAGIC
    assert apptainer.calls == ["pull"]


@pytest.mark.skipif(not os.access("/usr/bin/srun", os.X_OK), reason="no srun here")
def test_pyxis_needs_nothing_made(container: RunContainer, imported: RunContainer) -> None:
    pyxis = replace(imported, kind=ContainerKind.pyxis, file=None)
    with Setup(pyxis, 0) as setup:
        assert setup.step()
        assert setup.name.startswith("tdpp-nvcr.io-nvidia-pytorch-23.04-py3-")
    assert done(replace(container, kind=ContainerKind.pyxis)) != setup.name


def test_a_failure_names_command_code_and_last_words(double: Runtime, imported: RunContainer) -> None:
    told = fails(imported)
    assert told.startswith("container.image=nvcr.io/nvidia/pytorch:23.04-py3: enroot import -o ")
    assert "exited with 1 on " in told
    assert told.endswith("\n  [ERROR] URL https://nvcr.io#nvidia/pytorch:23.04-py3 returned error code: 404 Not Found")
    assert imported.file is not None
    assert list(imported.file.parent.iterdir()) == []


def test_a_file_that_is_no_image_is_told(enroot: Runtime, container: RunContainer, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqsh"
    broken.write_text("not an image")
    assert "Invalid image format" in fails(replace(container, image=broken, file=broken))
    assert enroot("list").stdout == ""


def test_a_missing_image_file_is_told(enroot: Runtime, container: RunContainer) -> None:
    told = fails(replace(container, image=Path("/no.sqsh"), file=Path("/no.sqsh")))
    assert told.startswith("container.image=/no.sqsh: no such file on ")
    assert enroot.calls == []


def test_a_missing_runtime_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LaunchError, match=r"container\.kind=enroot: enroot is not on the PATH of"):
        check_program(ContainerKind.enroot)


def test_a_scratch_folder_that_is_not_there_is_told(enroot: Runtime, container: RunContainer, tmp_path: Path) -> None:
    told = fails(replace(container, scratch=tmp_path / "nvme"))
    assert told.startswith(f"cluster.scratch={tmp_path}/nvme: {tmp_path}/nvme/tdpp-")
    assert "No such file or directory" in told


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_another_user_s_folder_is_not_used(
    enroot: Runtime, container: RunContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    container.scratch.chmod(0o777)
    monkeypatch.chdir(container.scratch)
    with ordinary_user():
        Path(f"tdpp-{os.getuid()}").mkdir()
    assert "belongs to another user" in fails(container)


def test_a_wait_is_bounded(enroot: Runtime, imported: RunContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_setup, "LIMIT_S", 0.1)
    assert "which node 0 fetches and gave up" in fails(imported, node_rank=1)


def test_a_command_that_takes_too_long_is_ended(
    double: Runtime, container: RunContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_setup, "LIMIT_S", 1.0)
    double.hold.touch()
    assert " waited 1 s for enroot " in fails(container)  # on a busy machine its list already takes too long
    assert enroot_processes(double) == []


def in_registry(enroot: Runtime, image: Path) -> None:
    (enroot.registry / REFERENCE.enroot.replace("/", "+")).write_bytes(image.read_bytes())


def process(container: RunContainer) -> subprocess.Popen[bytes]:
    """A process of its own that makes the container ready."""
    one = subprocess.Popen([sys.executable, "-c", f"import {__name__} as tests; tests.main()"], stdin=subprocess.PIPE)
    assert one.stdin is not None
    one.stdin.write(pickle.dumps(container))
    one.stdin.close()
    return one


def main() -> None:
    """What it does."""
    done(pickle.load(sys.stdin.buffer))


def enroot_processes(enroot: Runtime) -> list[str]:
    """Command lines of living processes of this test's enroot."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            environment = (entry / "environ").read_bytes() if b"enroot" in words else b""
        except OSError:
            continue
        if f"TDPP_DOUBLE_HOLD={enroot.hold}".encode() in environment and b"pytest" not in words:
            found.append(words.decode())
    return found
