"""What the launcher relies on in enroot. It holds for the double, and for the real one that TDPP_TEST_ENROOT names."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.launch.containers.conftest import Runtime
from tests.support import PATIENCE_S
from tests.support.containers.image import NEW, VARIABLE, WORKING_FOLDER


@pytest.fixture
def box(enroot: Runtime, image: Path) -> Runtime:
    """enroot with a container named box."""
    made = enroot("create", "-n", "box", image)
    assert made.returncode == 0, made.stderr
    return enroot


def shell(enroot: Runtime, script: str, *options: object, **environment: str) -> tuple[int, str]:
    done = enroot("start", *options, "box", "sh", "-c", script, **environment)
    return done.returncode, done.stdout


def test_create_makes_a_folder_named_as_told_or_like_the_image(enroot: Runtime, image: Path) -> None:
    made = enroot("create", "--name", "box", image)
    assert (made.returncode, made.stdout) == (0, "")
    assert (enroot.data / "box" / "etc").is_dir()
    assert enroot("create", image).returncode == 0
    assert enroot("list").stdout.split() == ["box", image.stem]


def test_create_overwrites_only_when_forced(box: Runtime, image: Path) -> None:
    (box.data / "box" / "mine").touch()
    again = box("create", "-n", "box", image)
    assert again.returncode == 1
    assert f"[ERROR] File already exists: {box.data}/box" in again.stderr
    assert box("create", "--force", "-n", "box", image).returncode == 0
    assert not (box.data / "box" / "mine").exists()


@pytest.mark.parametrize(
    ("name", "file", "told"),
    [
        ("a/b", None, "Invalid argument: a/b"),
        ("x", "/no.sqsh", "No such file or directory"),
        ("x", __file__, "Invalid image format"),
    ],
    ids=["slash in the name", "no image file", "not an image"],
)
def test_create_refuses(enroot: Runtime, image: Path, name: str, file: str | None, told: str) -> None:
    done = enroot("create", "-n", name, file or image)
    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("create", "-n", "x"),
        ("create", "--bogus", "x"),
        ("start",),
        ("start", "--bogus", "box", "true"),
        ("start", "nosuch", "true"),
        ("start", "./box", "true"),
        ("bogus",),
        (),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_a_wrong_call_ends_with_1(box: Runtime, words: tuple[str, ...]) -> None:
    assert box(*words).returncode == 1


def test_without_containers_the_list_is_empty(enroot: Runtime) -> None:
    listed = enroot("list")
    assert (listed.returncode, listed.stdout) == (0, "")


def test_remove_asks_unless_forced(box: Runtime) -> None:
    assert box("remove", "box").returncode == 1  # the answer is the end of the file
    assert box("list").stdout == "box\n"
    assert box("remove", "-f", "box").returncode == 0
    assert box("list").stdout == ""
    gone = box("remove", "--force", "box")
    assert gone.returncode == 1
    assert "No such file or directory" in gone.stderr


def test_words_and_exit_codes_pass_unchanged(box: Runtime) -> None:
    said = box("start", "box", "sh", "-c", 'echo "$#|$1|$2|$3"', "x", "a b", "", '$HOME "q"')
    assert said.stdout == '3|a b||$HOME "q"\n'
    assert shell(box, "exit 7") == (7, "")
    assert box("start", "box", "/no/such").returncode == 127
    assert box("start", "--", "box", "true").returncode == 0


def test_the_working_folder_is_the_image_s(box: Runtime) -> None:
    assert shell(box, "pwd") == (0, f"{WORKING_FOLDER}\n")


def test_nothing_of_the_host_is_there_but_what_was_mounted(box: Runtime, tmp_path: Path) -> None:
    assert shell(box, f"ls {tmp_path}")[0] != 0
    assert shell(box, f"ls {tmp_path}/enroot", "-m", f"{tmp_path}/enroot")[0] == 0
    assert shell(box, f"ls {tmp_path}/other", "-m", f"{tmp_path}/enroot")[0] != 0


def test_the_root_is_read_only_and_tmp_fresh(box: Runtime) -> None:
    assert shell(box, f"touch /{NEW}")[0] != 0
    assert shell(box, f"touch /tmp/{NEW}")[0] == 0
    assert shell(box, f"ls /tmp/{NEW}")[0] != 0
    assert shell(box, f"touch /{NEW}", "--rw")[0] == 0
    assert shell(box, f"ls /{NEW}")[0] == 0


def test_the_environment_is_what_was_given_and_the_image_s(box: Runtime) -> None:
    _, out = shell(box, "env", SECRET="host", ENROOT_SECRET="x")
    assert "SECRET" not in out
    assert f"{VARIABLE[0]}={VARIABLE[1]}\n" in out
    given = ("-e", "SECRET", "--env", "B=1 2", "-e", f"{VARIABLE[0]}=3")
    assert shell(box, f"echo $SECRET,$B,${VARIABLE[0]}", *given, SECRET="host") == (0, "host,1 2,3\n")


@pytest.mark.parametrize(
    "value", ["", "  leading", "trailing  ", "a=b,c:d#e", r"a\tb", '$(id) `id` "in"side', "größe", "it's"]
)
def test_a_value_arrives_as_it_was_given(box: Runtime, value: str) -> None:
    assert shell(box, 'printf %s "$VALUE"', "-e", f"VALUE={value}") == (0, value)


@pytest.mark.parametrize("value", ['"quoted"', "'quoted'", '"quoted"  '])
def test_a_value_loses_the_quotes_around_it(box: Runtime, value: str) -> None:
    assert shell(box, 'printf %s "$VALUE"', "-e", f"VALUE={value}") == (0, "quoted")


@pytest.mark.parametrize("variable", ["1BAD=x", "A=1\nsecond line", "A B=x"])
def test_a_variable_needs_a_name_and_one_line(box: Runtime, variable: str) -> None:
    assert box("start", "-e", variable, "box", "true").returncode == 1


def test_a_mount_makes_its_target_and_is_writable(box: Runtime, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "file").write_text("hi")
    everything = ":none:x-create=auto,rbind"
    assert shell(box, "cat /deep/new/file; touch /deep/new/g", "-m", f"{folder}:/deep/new{everything}") == (0, "hi")
    assert (folder / "g").exists()
    assert shell(box, "cat /one/file", "-m", f"{folder}/file:/one/file{everything}") == (0, "hi")
    assert shell(box, f"cat {folder}/file", "-m", f"{folder}:{folder}{everything}") == (0, "hi")
    two = ("-m", f"{folder}:/a{everything}", "-m", f"{folder}:/b{everything}")
    assert shell(box, "ls /a/file /b/file", *two)[0] == 0


def test_a_mount_may_be_read_only(box: Runtime, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("hi")
    code, out = shell(box, "cat /n/f; touch /n/h", "-m", f"{tmp_path}:/n:none:x-create=auto,rbind,ro")
    assert (out, code != 0, (tmp_path / "h").exists()) == ("hi", True, False)


def test_a_later_mount_lies_in_an_earlier_one(box: Runtime, tmp_path: Path) -> None:
    (tmp_path / "outer/inner").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("hi")
    everything = ":none:x-create=auto,rbind"
    nested = ("-m", f"{tmp_path}/outer:/o:none:x-create=auto,rbind,ro", "-m", f"{tmp_path}/other:/o/inner{everything}")
    assert shell(box, "cat /o/inner/file; touch /o/inner/g", *nested) == (0, "hi")


@pytest.mark.parametrize("name", ["with,comma", "größe", 'it\'s"q"', "$x`y`", "-dash", "[a]*"])
def test_a_mount_takes_odd_names_when_every_field_is_told(box: Runtime, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "file").write_text("hi")
    mount = f"{folder}:{folder}:none:x-create=auto,rbind"
    assert box("start", "-m", mount, "box", "cat", folder / "file").stdout == "hi"


@pytest.mark.parametrize(
    "mount",
    ["{}:/mnt:ro", f"{{}}:/{NEW}:bind", "{}/nosuch:/mnt", "a b:/mnt", "{}:/with,comma"],
    ids=["docker's ro", "options without x-create", "no source", "a space", "a comma in the last field"],
)
def test_a_mount_is_refused(box: Runtime, tmp_path: Path, mount: str) -> None:
    spec = mount.format(tmp_path)
    assert box("start", "-m", spec, "box", "ls", "/with,comma").returncode != 0


def test_it_becomes_the_command(box: Runtime) -> None:
    """No process in between: signals, exit codes and the process id are the command's."""
    process = box.popen(
        "start", "box", "sh", "-c", 'trap "echo term; exit 42" TERM; echo $$; while :; do sleep 0.05; done'
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "term\n"
    assert process.wait(PATIENCE_S) == 42


def test_the_user_stays_the_same(box: Runtime) -> None:
    assert shell(box, "id -u") == (0, f"{os.getuid()}\n")


def test_several_run_at_once(box: Runtime) -> None:
    processes = [box.popen("start", "box", "echo", number) for number in range(4)]
    said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert said == [f"{number}\n" for number in range(4)]


@pytest.mark.skipif(shutil.which("nvidia-container-cli") is not None, reason="this machine has GPUs for containers")
def test_gpus_are_asked_for_by_a_variable_and_the_host_s_own_wins(box: Runtime) -> None:
    asked = ("-e", "NVIDIA_VISIBLE_DEVICES=all")
    assert box("start", *asked, "box", "true").returncode == 1
    assert "nvidia-container-cli" in box("start", *asked, "box", "true").stderr
    assert shell(box, "true", *asked, NVIDIA_VISIBLE_DEVICES="void")[0] == 0
    assert shell(box, "true", "-e", "NVIDIA_VISIBLE_DEVICES=void")[0] == 0


def test_import_names_a_scheme_and_never_overwrites(enroot: Runtime, tmp_path: Path) -> None:
    uri = "nvcr.io#nvidia/pytorch:23.04-py3"
    assert "Invalid argument" in enroot("import", "-o", tmp_path / "x.sqsh", uri).stderr
    (tmp_path / "there.sqsh").touch()
    again = enroot("import", "-o", tmp_path / "there.sqsh", f"docker://{uri}")
    assert again.returncode == 1
    assert "File already exists" in again.stderr


def test_root_may_write_where_the_container_is_writable_and_export_keeps_it(
    box: Runtime, image: Path, tmp_path: Path
) -> None:
    written = f"id -u > {WORKING_FOLDER}/user"
    assert shell(box, written, "--root", "--rw") == (0, "")
    assert shell(box, written, "--root")[0] != 0
    file = tmp_path / "new.sqsh"
    assert box("export", "-o", file, "box").returncode == 0
    assert "File already exists" in box("export", "-o", file, "box").stderr
    assert box("create", "-n", "copy", file).returncode == 0
    assert box("start", "copy", "cat", f"{WORKING_FOLDER}/user").stdout == "0\n"
    assert box("export", "-o", tmp_path / "other.sqsh", "nosuch").returncode == 1
