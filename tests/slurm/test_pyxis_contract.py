"""What the launcher relies on in srun with pyxis. It holds for the double, and for the real plugin that TDPP_TEST_PYXIS
names (see conftest)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.launch.containers.conftest import Runtime
from tests.slurm.conftest import REAL_PYXIS
from tests.support import PATIENCE_S
from tests.support.containers.image import NEW, VARIABLE, WORKING_FOLDER

pytestmark = pytest.mark.usefixtures("slurm", "pyxis")

STEP = ("--nodelist=gpu2-007", "--ntasks=1", "--export=ALL", "--immediate=20")
"""Always on one node: containers may lie on its own disk."""
SEE = "import json, os; print(json.dumps(dict(os.environ)))"
CHILDREN = """
import os
while True:
    try:
        print(*os.waitpid(-1, 0))
    except ChildProcessError:
        break
"""


def srun(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["srun", *STEP, *map(str, words)],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def of_image(image: Path) -> str:
    return f"--container-image={image}"


@pytest.fixture
def box(of_image: str) -> str:
    """The option of a container that is there."""
    name = f"--container-name=contract-{uuid.uuid4().hex[:8]}"
    made = srun(of_image, name, "true")
    assert made.returncode == 0, made.stderr
    return name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--container-images=x"], "unrecognized option '--container-images=x'"),
        (["--container-image="], "pyxis: --container-image: argument required"),
        (["--container-writable=yes"], "'--container-writable' doesn't allow an argument"),
        (["--container-mounts=/a::ro"], "pyxis: --container-mounts: invalid format: /a::ro"),
        (["--container-mounts=a"], "pyxis: mount source must be a relative path, an absolute path"),
        (["--container-mounts=/a:b"], "pyxis: mount target must be a relative path or an absolute path"),
        (["--container-env=A,,B"], "pyxis: --container-env: invalid format: A,,B"),
        (["--container-name=:exec"], "pyxis: --container-name: empty name"),
        (["--container-name=x:again"], "pyxis: --container-name: flag must be"),
        (["--container-mount-home", "--no-container-mount-home"], "pyxis: both --container-mount-home and"),
        (["--container-name=x", "--container-name=y"], "pyxis: --container-name specified multiple times"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_that_it_does_not_take_is_refused_by_srun(of_image: str, words: list[str], told: str) -> None:
    done = srun(of_image, *words, "true")
    assert done.returncode != 0
    assert told in done.stderr


def test_its_options_are_in_the_help_of_srun() -> None:
    options = re.findall(r"--((?:no-)?container-[a-z-]+)", srun("--help").stdout)
    assert {"container-image", "container-mounts", "container-name", "container-env"} <= set(options)


def test_without_an_image_or_a_name_the_command_runs_on_the_host() -> None:
    assert srun("sh", "-c", "echo $PYXIS $#", PYXIS="none").stdout == "none 0\n"


def test_the_command_begins_with_a_child_that_it_did_not_start(box: str) -> None:
    done = srun(box, sys.executable, "-c", CHILDREN)
    assert re.fullmatch(r"\d+ 0\n", done.stdout), done


def environment(*words: str, **given: str) -> dict[str, str]:
    done = srun(*words, sys.executable, "-c", SEE, **given)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_host_s_variables_are_there_but_the_image_s_win(box: str) -> None:
    found = environment(box, OWN="host, 'a' $b", LANG="de_DE.UTF-8", **{VARIABLE[0]: "host"})
    assert found["OWN"] == "host, 'a' $b"
    assert found[VARIABLE[0]] == VARIABLE[1]
    assert found["PATH"] != os.environ["PATH"]
    assert "LANG" not in found
    assert found["SLURM_PROCID"] == "0"


def test_the_host_wins_where_that_is_asked_for(box: str) -> None:
    asked = f"--container-env=OWN,EMPTY,MISSING,LANG,{VARIABLE[0]}"
    found = environment(box, asked, OWN='"a", $b `c` \\n', EMPTY="", LANG="de_DE.UTF-8", **{VARIABLE[0]: "host"})
    assert (found[VARIABLE[0]], found["LANG"], found["EMPTY"]) == ("host", "de_DE.UTF-8", "")
    assert found["OWN"] == '"a", $b `c` \\n'
    assert "MISSING" not in found


def test_the_host_s_empty_value_wins_too(box: str) -> None:
    assert environment(box, f"--container-env={VARIABLE[0]}", **{VARIABLE[0]: ""})[VARIABLE[0]] == ""


def test_it_runs_in_the_image_s_folder_or_where_it_is_told(box: str) -> None:
    assert srun(box, "pwd").stdout == f"{WORKING_FOLDER}\n"
    assert srun(box, "--container-workdir=/etc", "pwd").stdout == "/etc\n"
    missing = srun(box, "--container-workdir=/no/such", "pwd")
    assert missing.returncode != 0
    assert "pyxis: couldn't chdir to /no/such: No such file or directory" in missing.stderr


def test_folders_are_mounted_as_told(box: str, tmp_path: Path) -> None:
    for name in ("plain", "closed", "elsewhere"):
        (tmp_path / name).mkdir()
    mounts = (
        f"{tmp_path}/plain,{tmp_path}/closed:{tmp_path}/closed:ro,{tmp_path}/elsewhere:/there/at,/usr:/o:ro+rprivate"
    )
    script = f"touch {tmp_path}/plain/new && touch /there/at/new && touch {tmp_path}/closed/new; ls /o/bin/env"
    done = srun(box, f"--container-mounts={mounts}", "sh", "-c", script)
    assert "Read-only file system" in done.stderr
    assert done.stdout == "/o/bin/env\n"
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/new")) == [
        "elsewhere/new",
        "plain/new",
    ]
    assert srun(box, "ls", tmp_path / "plain").returncode != 0


def test_a_folder_that_is_not_there_cannot_be_mounted(box: str) -> None:
    done = srun(box, "--container-mounts=/no/such", "true")
    assert done.returncode != 0
    assert "pyxis: --container-mounts: source path does not exist: /no/such" in done.stderr


def test_the_root_is_read_only_unless_asked(box: str) -> None:
    assert srun(box, "touch", f"/{NEW}").returncode != 0
    assert srun(box, "--container-writable", "touch", f"/{NEW}").returncode == 0
    assert srun(box, "ls", f"/{NEW}").returncode == 0


def test_a_named_container_stays_and_needs_no_image_then(of_image: str, box: str) -> None:
    assert srun(box, "--container-writable", "touch", f"/{NEW}").returncode == 0
    assert srun(of_image, box, "ls", f"/{NEW}").returncode == 0
    missing = srun("--container-name=contract-none", "true")
    assert missing.returncode != 0
    assert (
        'a container with name "pyxis_contract-none" does not exist, and --container-image is not set' in missing.stderr
    )


def test_one_that_runs_is_joined_without_its_mounts_unless_told_not_to(box: str, tmp_path: Path) -> None:
    """So it would be with two runs that share a node and a container."""
    (tmp_path / "mine").mkdir()
    words = ["srun", *STEP, box, "sh", "-c", "echo up; exec sleep 60"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        mounts = f"--container-mounts={tmp_path}/mine"
        joined, own = (srun(name, mounts, "ls", tmp_path / "mine") for name in (box, f"{box}:no_exec"))
        first.terminate()
    assert joined.returncode != 0
    assert "pyxis: ignoring --container-mounts when attaching to a running container" in joined.stderr
    assert own.returncode == 0, own.stderr


def test_words_and_exit_codes_pass_unchanged(box: str) -> None:
    done = srun(box, "sh", "-c", 'echo "$#|$1|$2|$3"; exit 7', "x", "a b", "", '$HOME "q"')
    assert (done.returncode, done.stdout) == (7, '3|a b||$HOME "q"\n')
    missing = srun(box, "/no/such")
    assert missing.returncode == 2
    assert "/no/such: No such file or directory" in missing.stderr


def test_an_image_that_is_none_fails_with_what_enroot_says(tmp_path: Path) -> None:
    (tmp_path / "no.sqsh").write_text("no image")
    done = srun(f"--container-image={tmp_path}/no.sqsh", "true")
    assert done.returncode == 1
    assert f"[ERROR] Invalid image format: {tmp_path}/no.sqsh" in done.stderr
    assert f"error: pyxis: failed to create container filesystem for image: {tmp_path}/no.sqsh" in done.stderr


def test_an_image_of_a_registry_is_brought(enroot: Runtime, image: Path) -> None:
    if REAL_PYXIS:
        pytest.skip("needs a registry")
    (enroot.registry / "registry.test#small:1").write_bytes(image.read_bytes())
    name = f"--container-name=contract-{uuid.uuid4().hex[:8]}"
    assert srun("--container-image=registry.test#small:1", name, "true").returncode == 0
    assert srun("--container-image=registry.test#other:1", name, "true").returncode == 0  # it is there
    missing = srun("--container-image=registry.test#other:1", "true")
    assert missing.returncode == 1
    assert "pyxis: failed to import docker image: registry.test#other:1" in missing.stderr


def test_a_container_without_a_name_goes_with_the_step(of_image: str) -> None:
    assert srun(of_image, "sh", "-c", "exit 3").returncode == 3
    assert "pyxis_" not in srun("enroot", "list").stdout
