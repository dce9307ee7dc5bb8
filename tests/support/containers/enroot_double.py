"""A test double of enroot, as strict as the real one: what `test_enroot_contract.py` promises holds for both.

It isolates as enroot does, with a user and a mount namespace and another root, and needs no rights for that. Its images
are tar files instead of squashfs. It knows only what a launcher uses, and refuses everything else. For tests alone:

    TDPP_DOUBLE_REGISTRY  a folder whose files are the images that can be imported, '/' in their names written as '+'
    TDPP_DOUBLE_HOLD      for as long as this file exists, create and import wait half-way
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "remount": 32, "bind": 4096, "rbind": 4096 | 16384, "rslave": 0}
MS_SLAVE = 1 << 19 | 16384
MNT_DETACH = 2
ST_KEPT = 1 | 2 | 4 | 8 | 1024 | 2048
"""Flags of a mount that a user namespace may not take away, as statvfs tells them."""

SYSTEM = """
/proc        /proc        none  x-create=dir,rbind
/sys         /sys         none  x-create=dir,rbind
/dev         /dev         none  x-create=dir,rbind
tmpfs        /tmp         tmpfs x-create=dir
tmpfs        /var/run     tmpfs x-create=dir
/etc/hosts   /etc/hosts   none  x-create=file,bind,ro
"""

libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> None:
    commands: dict[str, Callable[[list[str]], None]] = {
        "create": create,
        "export": export,
        "import": import_,
        "list": list_,
        "remove": remove,
        "start": start,
    }
    if not argv or argv[0] not in commands:
        usage()
    commands[argv[0]](argv[1:])


def create(argv: list[str]) -> None:
    options, rest = parse(argv, valued={"-n": "name", "--name": "name"}, flags={"-f": "force", "--force": "force"})
    if len(rest) != 1:
        usage()
    image = Path(rest[0])
    if not image.is_file():
        fail(f"No such file or directory: {image}")
    if not tarfile.is_tarfile(image):
        fail(f"Invalid image format: {image}")
    root = data_path() / named(options["name"][-1] if options["name"] else image.name.removesuffix(".sqsh"))
    if root.exists():
        if not options["force"]:
            fail(f"File already exists: {root}")
        shutil.rmtree(root)
    print("[INFO] Extracting squashfs filesystem...", file=sys.stderr)
    with tarfile.open(image) as archive:
        members = archive.getmembers()
        for number, member in enumerate(members):
            archive.extract(member, root)
            if number == len(members) // 2:
                hold()


def import_(argv: list[str]) -> None:
    options, rest = parse(argv, valued={"-o": "output", "--output": "output"}, flags={})
    if len(rest) != 1 or not options["output"]:
        usage()
    if not rest[0].startswith("docker://"):
        fail(f"Invalid argument: {rest[0]}")
    reference, output = rest[0].removeprefix("docker://"), Path(options["output"][-1])
    if output.exists():
        fail(f"File already exists: {output}")
    image = Path(os.environ.get("TDPP_DOUBLE_REGISTRY", "/nonexistent"), reference.replace("/", "+"))
    if not image.is_file():
        fail(f"URL https://{reference} returned error code: 404 Not Found")
    content = image.read_bytes()
    with output.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        hold()
        file.write(content[len(content) // 2 :])


def export(argv: list[str]) -> None:
    options, rest = parse(
        argv, valued={"-o": "output", "--output": "output"}, flags={"-f": "force", "--force": "force"}
    )
    if len(rest) != 1:
        usage()
    root = existing(rest[0])
    output = Path(options["output"][-1] if options["output"] else f"{rest[0]}.sqsh")
    if output.exists() and not options["force"]:
        fail(f"File already exists: {output}")
    print("[INFO] Creating squashfs filesystem...", file=sys.stderr)
    with tarfile.open(output, "w") as archive:
        archive.add(root, arcname=".")


def list_(argv: list[str]) -> None:
    options, rest = parse(argv, valued={}, flags={"-f": "fancy", "--fancy": "fancy"})
    if rest:
        usage()
    running = roots() if options["fancy"] else {}
    if options["fancy"]:
        print("NAME PID")
    for root in sorted(data_path().iterdir()):
        print(root.name, *running.get(in_file_system(root), [])[:1])


def roots() -> dict[str, list[str]]:
    """By what is mounted as its root, as a path in its file system: the processes that have another root than we."""
    found: dict[str, list[str]] = {}
    ours = Path("/proc/self/ns/mnt").readlink()
    for process in sorted(
        (path for path in Path("/proc").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    ):
        try:
            mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
            theirs = (process / "ns/mnt").readlink()
        except OSError:  # ended meanwhile, or another user's
            continue
        for fields in mounts:
            if fields[4] == "/" and theirs != ours:
                found.setdefault(fields[3], []).append(process.name)
    return found


def in_file_system(path: Path) -> str:
    mounted = next(folder for folder in (path, *path.parents) if os.path.ismount(folder))
    return f"/{path.resolve().relative_to(mounted)}"


def remove(argv: list[str]) -> None:
    options, rest = parse(argv, valued={}, flags={"-f": "force", "--force": "force"})
    if not rest:
        usage()
    for name in rest:
        root = existing(name)
        if not options["force"] and sys.stdin.readline().strip() not in ("y", "Y"):
            raise SystemExit(1)
        shutil.rmtree(root)


def start(argv: list[str]) -> None:
    valued = {"-e": "env", "--env": "env", "-m": "mount", "--mount": "mount", "-c": "conf", "--conf": "conf"}
    options, rest = parse(argv, valued=valued, flags={"-w": "rw", "--rw": "rw", "-r": "root", "--root": "root"})
    if not rest:
        usage()
    root = existing(rest[0])
    mounts = [line for mount in options["mount"] for line in mount.split("\n")]
    given = [line for variable in options["env"] for line in variable.split("\n")]
    for mount in mounts:
        if not re.fullmatch(r"\S+(:\S+)*", mount):
            fail(f"Invalid argument: {mount}")
    for variable in given:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*(=|$)", variable):
            fail(f"Invalid argument: {variable}")
    conf = options["conf"][-1] if options["conf"] else None
    environment = container_environment(root, [*configured(conf, "environ", root), *given])
    gpu_hook(environment)
    configured(conf, "hooks", root)

    enter_namespaces(as_root=bool(options["root"]))
    call(libc.mount, "none", "/", None, MS_SLAVE, None)
    call(libc.mount, root, root, None, MS["rbind"], None)
    for line in (*SYSTEM.splitlines(), *read_lines(root / "etc/fstab")):
        mount_entry(root, line.split()[:4])
    for line in configured(conf, "mounts", root):
        mount_entry(root, line.split())
    for mount in mounts:
        mount_entry(root, mount.split(":"))
    if not options["rw"] and not os.environ.get("ENROOT_ROOTFS_WRITABLE"):
        call(libc.mount, "none", root, None, MS["bind"] | MS["remount"] | MS["ro"] | kept_flags(root), None)
    os.chdir(root)
    call(libc.pivot_root, ".", ".")  # who joins the namespace later finds this root
    call(libc.umount2, ".", MNT_DETACH)
    os.chdir("/")
    os.execve("/bin/sh", ["/bin/sh", "/etc/rc", *rest[1:]], environment)


def configured(conf: str | None, function: str, root: Path) -> list[str]:
    """The lines that a function of a configuration prints, which is a script for bash; none where it has none."""
    if conf is None:
        return []
    script = 'set -eu; . "$1"; if declare -F "$2" > /dev/null; then "$2"; fi'
    environment = os.environ | {"ENROOT_ROOTFS": str(root)}
    done = subprocess.run(
        ["bash", "-c", script, "bash", conf, function], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        fail(done.stderr)
    return done.stdout.splitlines()


def container_environment(root: Path, given: Iterable[str]) -> dict[str, str]:
    """Nothing of the host's but what is given; as enroot does, without a pair of quotes around a value."""
    lines = [*read_lines(root / "etc/environment")]
    lines += [line if "=" in line else f"{line}={os.environ.get(line, '')}" for line in given]
    environment = {"PATH": "/usr/bin:/bin", "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    for line in lines:
        name, _, value = line.partition("=")
        quoted = re.fullmatch(r"[\"'](.*)[\"']\s*", value)
        if not name.startswith("ENROOT_"):
            environment[name] = quoted[1] if quoted else value
    return environment


def gpu_hook(environment: dict[str, str]) -> None:
    devices = os.environ.get("NVIDIA_VISIBLE_DEVICES", environment.get("NVIDIA_VISIBLE_DEVICES", "void"))
    if devices != "void" and shutil.which("nvidia-container-cli") is None:
        fail("Command not found: nvidia-container-cli, see https://github.com/NVIDIA/libnvidia-container")


def enter_namespaces(*, as_root: bool) -> None:
    user, group = os.getuid(), os.getgid()
    inside = (0, 0) if as_root else (user, group)
    call(libc.unshare, CLONE_NEWUSER | CLONE_NEWNS)
    maps = (("setgroups", "deny"), ("gid_map", f"{inside[1]} {group} 1"), ("uid_map", f"{inside[0]} {user} 1"))
    for name, text in maps:
        Path("/proc/self", name).write_text(text)


def mount_entry(root: Path, fields: list[str]) -> None:
    """A line of an fstab, of which enroot guesses what is not told."""
    if not fields or fields[0].startswith("#"):
        return
    source, target, kind, options = (*fields, *[""] * 4)[:4]
    if target and not kind and is_option(target):
        target, options = "", target
    if kind and not options and is_option(kind):
        kind, options = "none", kind
    target, kind = target or source, kind or "none"
    chosen = (options or "rbind,x-create=auto").split(",")
    flags = 0
    for option in chosen:
        flags |= MS.get(option, 0)
    inside = root / target.lstrip("/")
    create_target(inside, Path(source), chosen)
    call(libc.mount, source, inside, kind, flags & ~MS["ro"] if flags & MS["bind"] else flags, None)
    if flags & MS["bind"] and "ro" in chosen:
        call(libc.mount, "none", inside, None, MS["bind"] | MS["remount"] | MS["ro"] | kept_flags(inside), None)


def is_option(field: str) -> bool:
    return "," in field or field in MS or field.startswith("x-create=")


def create_target(target: Path, source: Path, options: list[str]) -> None:
    if "x-create=file" in options or ("x-create=auto" in options and source.is_file()):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    elif "x-create=dir" in options or ("x-create=auto" in options and source.exists()):
        target.mkdir(parents=True, exist_ok=True)


def kept_flags(path: Path) -> int:
    return os.statvfs(path).f_flag & ST_KEPT & ~MS["ro"]


def parse(argv: list[str], valued: dict[str, str], flags: dict[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options up to the first word that is none, by name; the rest."""
    options: dict[str, list[str]] = {name: [] for name in (*valued.values(), *flags.values())}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word in valued and rest:
            options[valued[word]].append(rest.pop(0))
        elif word in flags:
            options[flags[word]].append(word)
        else:
            usage()
    return options, rest


def data_path() -> Path:
    path = Path(os.environ.get("ENROOT_DATA_PATH") or Path.home() / ".local/share/enroot")
    path.mkdir(parents=True, exist_ok=True)
    return path


def named(name: str) -> str:
    if "/" in name or not name:
        fail(f"Invalid argument: {name}")
    return name


def existing(name: str) -> Path:
    root = data_path() / named(name)
    if not root.is_dir():
        fail(f"No such file or directory: {root}")
    return root


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def hold() -> None:
    while Path(os.environ.get("TDPP_DOUBLE_HOLD", "/nonexistent")).exists():
        time.sleep(0.01)


def call(function: Callable[..., int], *arguments: object) -> None:
    words = [os.fsencode(word) if isinstance(word, str | Path) else word for word in arguments]
    if function(*words) != 0:
        reason = os.strerror(ctypes.get_errno())
        fail(f"{function.__name__} {' '.join(map(str, arguments))}: {reason}")


def fail(message: str) -> NoReturn:
    print(f"[ERROR] {message}", file=sys.stderr)
    raise SystemExit(1)


def usage() -> NoReturn:
    print("Usage: enroot COMMAND [ARG...]", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
