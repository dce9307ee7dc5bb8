"""A test double of srun with Slurm's plugin pyxis: what `tests/slurm/test_pyxis_contract.py` promises holds for it and
for the real plugin, as of pyxis 0.24.

It takes the plugin's options out of the command line, and hands all else to the real srun, which refuses what it does
not know. In the task, on its node, it does what the plugin's task_init does: a container of enroot is started as a
child of the task, which stops itself; the task takes over environment and namespaces of that child, lets it go on, and
becomes the command. So the command begins with a child that it did not start, and that has ended. For tests alone:

    TDPP_DOUBLE_SRUN   the real srun
    TDPP_DOUBLE_SCOPE  `job` for a cluster that keeps a container only as long as the job (container_scope)

ENROOT_…_PATH of the environment stand for the site's enroot.conf; the real plugin does not hand them on.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

OPTIONS = {
    "container-image": True,
    "container-mounts": True,
    "container-workdir": True,
    "container-name": True,
    "container-save": True,
    "container-mount-home": False,
    "no-container-mount-home": False,
    "container-remap-root": False,
    "no-container-remap-root": False,
    "container-entrypoint": False,
    "no-container-entrypoint": False,
    "container-entrypoint-log": False,
    "container-writable": False,
    "container-readonly": False,
    "container-env": True,
    "container-unshare": True,
}
"""Whether each of the plugin's options takes an argument."""
OPPOSITES = [("container-mount-home", "no-container-mount-home"), ("container-writable", "container-readonly")]
DONE = {"container-image", "container-mounts", "container-workdir", "container-name", "container-env"}
DONE |= {option for pair in OPPOSITES for option in pair}
"""Options of which this double does what the plugin does."""
NAME_FLAGS = ("auto", "create", "exec", "no_exec")

KEPT_FROM_ENROOT = {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"}
"""Variables of the job that enroot does not get."""
UNSET = ("LANG", "LANGUAGE", "LC_ALL")
"""Variables of the host that the task does not keep, unless asked."""
NAMESPACES = [("user", 0x10000000), ("mnt", 0x00020000)]
"""Those of a container of enroot's, with their flags for setns(2)."""
TASK = "--task"


class Refused(Exception):
    """As the plugin words it."""


def main(argv: list[str]) -> NoReturn:
    srun = os.environ["TDPP_DOUBLE_SRUN"]
    try:
        options, words, command = split(argv)
        check(options)
    except Refused as error:
        raise SystemExit(f"srun: error: pyxis: {error}") from None
    if "--help" in words:
        text = subprocess.run([srun, "--help"], capture_output=True, text=True, check=True).stdout
        print(text + "".join(f"      --{name}{'=…' * valued} [pyxis]\n" for name, valued in OPTIONS.items()))
        raise SystemExit(0)
    if "container-image" not in options and "container-name" not in options:
        os.execv(srun, ["srun", *words, *command])
    if "container-name" in options:
        os.execv(srun, ["srun", *words, *task_of(options), *command])
    name = f"pyxis_{uuid.uuid4().hex}"
    step = subprocess.Popen([srun, *words, *task_of({**options, "unnamed": name}), *command])
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, lambda signum, _: step.send_signal(signum))
    code = step.wait()
    enroot("remove", "-f", name)
    raise SystemExit(code)


def task_of(options: dict[str, str]) -> list[str]:
    return [sys.executable, "-IS", __file__, TASK, json.dumps(options)]


def split(argv: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """The plugin's options, the other options of srun, the command. A short option must not have a word of its own."""
    options: dict[str, str] = {}
    words: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in OPTIONS:
            words.append(word)
            continue
        if OPTIONS[name] and not given:
            value = rest.pop(0) if rest else ""
        elif given and not OPTIONS[name]:
            raise SystemExit(f"srun: option '--{name}' doesn't allow an argument")
        if OPTIONS[name] and not value:
            raise Refused(f"--{name}: argument required")
        if options.setdefault(name, value) != value:
            raise Refused(f"--{name} specified multiple times")
    return options, words, rest


def check(options: dict[str, str]) -> None:
    for one, other in OPPOSITES:
        if one in options and other in options:
            raise Refused(f"both --{one} and --{other} were specified")
    for mount in filter(None, options.get("container-mounts", "").split(",")):
        mount_entry(mount)
    if "" in options.get("container-env", "x").split(","):
        raise Refused(f"--container-env: invalid format: {options['container-env']}")
    name, _, flag = options.get("container-name", "x").partition(":")
    if not name:
        raise Refused("--container-name: empty name")
    if flag not in ("", *NAME_FLAGS):
        raise Refused('--container-name: flag must be "auto", "create", "exec" or "no_exec"')
    if unknown := options.keys() - DONE:
        raise SystemExit(f"this double of pyxis does not do --{min(unknown)}")


def mount_entry(text: str) -> tuple[str, str, str]:
    """Source, target, flags for enroot; the flags' '+' stands for its ','."""
    source, _, rest = text.partition(":")
    target, colon, flags = rest.partition(":") if rest else (source, "", "")
    if not source or not target or (":" in text and not rest):
        raise Refused(f"--container-mounts: invalid format: {text}")
    default = {"tmpfs": "x-create=dir", "umount": "x-detach"}.get(source, "x-create=auto,rbind")
    if source[0] not in "./" and source not in ("tmpfs", "umount"):
        raise Refused('mount source must be a relative path, an absolute path, "tmpfs" or "umount"')
    if target[0] not in "./":
        raise Refused("mount target must be a relative path or an absolute path")
    return source, target, f"{default},{flags.replace('+', ',')}" if colon and flags else default


def task(options: dict[str, str], command: list[str]) -> NoReturn:
    """Becomes the command, in the container."""
    name, joined = container(options)
    if joined and options.pop("container-mounts", None):
        print("pyxis: ignoring --container-mounts when attaching to a running container", file=sys.stderr)
    child = started(options, name)
    of = joined or child
    handles = [(os.open(f"/proc/{of}/ns/{kind}", os.O_RDONLY), flag) for kind, flag in NAMESPACES]
    folder = options.get("container-workdir") or str(Path(f"/proc/{child}/cwd").readlink())
    environment = merged(child, options.get("container-env", "").split(","))
    for handle, flag in handles:
        if ctypes.CDLL(None, use_errno=True).setns(handle, flag) != 0:
            fail(f"couldn't join a namespace: {os.strerror(ctypes.get_errno())}")
        os.close(handle)
    try:
        os.chdir(folder)
    except OSError as error:
        fail(f"couldn't chdir to {folder}: {error.strerror}")
    os.kill(child, signal.SIGCONT)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"slurmstepd: error: execve(): {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


def container(options: dict[str, str]) -> tuple[str, int]:
    """The container's name, and a process of it that the task is to join, or 0; makes the container if it must."""
    if "container-name" not in options:
        make(options["unnamed"], options["container-image"])
        return options["unnamed"], 0
    name, _, flag = options["container-name"].partition(":")
    job = f"{os.environ['SLURM_JOB_ID']}_" if os.environ.get("TDPP_DOUBLE_SCOPE") == "job" else ""
    name = f"pyxis_{job}{name}"
    existing = {line.split()[0]: [*line.split(), "0"][1] for line in enroot("list", "-f").stdout.splitlines()[1:]}
    running = int(existing.get(name, "0"))
    if flag == "create" and name in existing:
        fail('error: "create" flag was passed to --container-name but the container already exists')
    if flag == "exec" and not running:
        fail('error: "exec" flag was passed to --container-name but the container is not running')
    if name not in existing:
        if "container-image" not in options:
            fail(f'error: a container with name "{name}" does not exist, and --container-image is not set')
        make(name, options["container-image"])
    return name, 0 if flag == "no_exec" else running


def make(name: str, image: str) -> None:
    if image[0] in "./":
        if enroot("create", "--name", name, image).returncode != 0:
            fail(f"failed to create container filesystem for image: {image}")
        return
    print(f"pyxis: importing docker image: {image}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        if enroot("import", "--output", f"{folder}/image", f"docker://{image}").returncode != 0:
            fail(f"failed to import docker image: {image}")
        print(f"pyxis: imported docker image: {image}", file=sys.stderr)
        make(name, f"{folder}/image")


def started(options: dict[str, str], name: str) -> int:
    """A child that runs in the container, and has stopped itself."""
    mounts = [mount_entry(mount) for mount in filter(None, options.get("container-mounts", "").split(","))]
    for source, _, _ in mounts:
        if source.startswith("/") and not Path(source).exists():
            fail(f"--container-mounts: source path does not exist: {source}")
    lines = [f'\techo "{escaped(source)} {escaped(target)} {flags}"\n' for source, target, flags in mounts]
    script = "mounts() {\n" + "".join(lines) + "\t:\n}\n"
    script += "hooks() {\n\techo 'exec \"$@\"' > ${ENROOT_ROOTFS}/etc/rc.local\n}\n"
    asked = [variable for variable in options.get("container-env", "").split(",") if variable]
    lines = [f'\t[ -n "${{{variable}-}}" ] && echo "{variable}=${{{variable}}}" || :\n' for variable in asked]
    script += "environ() {\n" + "".join(lines) + "\t:\n}\n"
    with tempfile.NamedTemporaryFile("w", prefix=".enroot_config_") as conf:
        conf.write(script)
        conf.flush()
        words = ["enroot", "start", "--conf", conf.name, name, "sh", "-c", "kill -STOP $$ ; exit 0"]
        with Path("/dev/null").open() as null, tempfile.TemporaryFile() as log:
            streams = [(os.POSIX_SPAWN_DUP2, file.fileno(), to) for to, file in enumerate((null, log, log))]
            child = os.posix_spawnp("enroot", words, for_enroot(options), file_actions=streams)
            _, status = os.waitpid(child, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                log.seek(0)
                print(log.read().decode(errors="replace"), file=sys.stderr, end="")
                fail(f"container start failed with error code: {os.waitstatus_to_exitcode(status)}")
    return child


def escaped(path: str) -> str:
    return re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", path)


def for_enroot(options: dict[str, str]) -> dict[str, str]:
    """Its environment: the job's, but for the way to programs and libraries."""
    environment = {key: value for key, value in os.environ.items() if key not in KEPT_FROM_ENROOT}
    environment["PATH"] = os.environ["PATH"]
    for variable, (yes, no) in zip(("ENROOT_MOUNT_HOME", "ENROOT_ROOTFS_WRITABLE"), OPPOSITES, strict=True):
        if yes in options:
            environment[variable] = "y"
        elif no in options:
            environment.pop(variable, None)
    return environment


def merged(child: int, asked: Sequence[str]) -> dict[str, str]:
    """The host's environment, and over it the container's, but for what was asked of the host."""
    environment = {key: value for key, value in os.environ.items() if key not in UNSET or key in asked}
    for line in Path(f"/proc/{child}/environ").read_bytes().decode(errors="surrogateescape").split("\0"):
        key, equals, value = line.partition("=")
        if equals and not (key in asked and key in environment):
            environment[key] = value
    if "PYTORCH_VERSION" in environment:
        environment |= {"RANK": os.environ["SLURM_PROCID"], "LOCAL_RANK": os.environ["SLURM_LOCALID"]}
    return environment


def enroot(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; of a failure it prints what enroot said."""
    done = subprocess.run(["enroot", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"slurmstepd: error: pyxis: child failed with error code: {done.returncode}", file=sys.stderr)
        print(done.stderr, file=sys.stderr, end="")
    return done


def fail(message: str) -> NoReturn:
    """What the plugin says on the node; the task ends before its command."""
    print(f"slurmstepd: error: pyxis: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == [TASK]:
        task(json.loads(sys.argv[2]), sys.argv[3:])
    main(sys.argv[1:])
