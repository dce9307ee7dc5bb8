"""A test double of docker: the command line takes only the options that the launcher gives, checks their values as the
real one does (docs.docker.com/reference/cli/docker/container/run), and asks a daemon, which makes the container. So a
container lives on when its client dies, and has of the host's environment only what its options name. It does not
isolate. For tests alone:

    TDPP_DOUBLE_DOCKER  a folder: `images/` (by name, '/' written as '+': a file with the image's id), `registry/` (the
                        same, for those that can be pulled), `containers/` (the living ones), `hold`

As in the real one `--env NAME` takes the value of the client's environment, and leaves out what is not there; a signal
to the client goes to the container; its exit code is the container's; a name can be had once.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

WITH_VALUE = {
    *("--name", "--label", "--network", "--ipc", "--pid", "--user", "--workdir", "--entrypoint", "--gpus", "--pull"),
    *("--mount", "--env", "--group-add", "--ulimit"),
}
ONCE = WITH_VALUE - {"--label", "--mount", "--env", "--group-add", "--ulimit"}
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
KEYS = {"type", "source", "destination", "ro"}
DAEMON_ERROR = 125
TICK_S = 0.01


def main(argv: list[str]) -> int:
    match argv:
        case ["shim", begun]:
            shim(int(begun))
        case ["run", *rest]:
            return run(rest)
        case ["image", "inspect", "--format={{.Id}}", image]:
            return inspect(image)
        case ["pull", "--quiet", image]:
            return pull(image)
        case ["rm", "--force", *names] if names:
            return remove(names)
        case ["ps", "--all", "--quiet", "--no-trunc", "--filter", wanted]:
            return ps(wanted)
    print(f"unknown docker command or options: {argv}\n\nRun 'docker --help' for more information", file=sys.stderr)
    return 1


def folder(name: str) -> Path:
    path = Path(os.environ["TDPP_DOUBLE_DOCKER"], name)
    path.mkdir(exist_ok=True)
    return path


def file_of(where: str, image: str) -> Path:
    return folder(where) / image.replace("/", "+")


def inspect(image: str) -> int:
    try:
        print(file_of("images", image).read_text().strip())
    except FileNotFoundError:
        print("")
        print(f"Error response from daemon: No such image: {image}", file=sys.stderr)
        return 1
    return 0


def pull(image: str) -> int:
    wait_while_held()
    there = file_of("registry", image)
    if not there.is_file():
        print(f"Error response from daemon: pull access denied for {image}, repository does not exist", file=sys.stderr)
        return 1
    shutil.copyfile(there, file_of("images", image))
    print(image)
    return 0


def write_at_once(path: Path, text: str) -> None:
    """Nobody reads a part of it: clients of several nodes look at these files while others write them."""
    whole = folder("writing") / f"{path.name}.{os.getpid()}"
    whole.write_text(text)
    whole.replace(path)


def wait_while_held() -> None:
    while (folder(".") / "hold").exists():
        time.sleep(TICK_S)


def ps(wanted: str) -> int:
    label = wanted.removeprefix("label=")
    for path in sorted(folder("containers").iterdir()):
        content = json.loads(path.read_text())
        if label in content["labels"]:
            print(content["id"])
    return 0


def remove(names: list[str]) -> int:
    code = 0
    for name in names:
        found = [
            path
            for path in folder("containers").iterdir()
            if path.name == name or json.loads(path.read_text())["id"] == name
        ]
        if not found:
            print(f"Error response from daemon: No such container: {name}", file=sys.stderr)
            code = 1
        for path in found:
            first = json.loads(path.read_text())["pid"]
            for pid in [first, *descendants(first)] if first else []:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            path.unlink(missing_ok=True)
            print(name)
    return code


def descendants(root: int) -> set[int]:
    """All below a process, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, generation = set(), {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= generation
    return found


def run(argv: list[str]) -> int:
    words, given = list(argv), dict[str, list[str]]()
    flags = set()
    while words and words[0].startswith("-"):
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option == "--rm" and not equals:
            flags.add(option)
        elif option in WITH_VALUE:
            if not equals:
                value = words.pop(0)
            given.setdefault(option, []).append(value)
        else:
            usage(f"unknown flag: {option}")
    for option, values in given.items():
        if option in ONCE and len(values) > 1:
            usage(f"this double takes {option} once")
    if not words:
        usage("'docker run' requires at least 1 argument")
    image, *arguments = words
    check(given)
    environment = environment_of(given.get("--env", []))
    daemon(given, image, [*given.get("--entrypoint", []), *arguments], environment, remove_it="--rm" in flags)
    return follow(folder("containers") / given["--name"][0], given["--name"][0])


def usage(message: str) -> NoReturn:
    print(f"docker: {message}\n\nRun 'docker run --help' for more information", file=sys.stderr)
    raise SystemExit(DAEMON_ERROR)


def refuse(message: str) -> NoReturn:
    print(f"docker: Error response from daemon: {message}", file=sys.stderr)
    raise SystemExit(DAEMON_ERROR)


def check(given: dict[str, list[str]]) -> None:
    if not NAME.fullmatch(given["--name"][0]):
        refuse(f"Invalid container name ({given['--name'][0]}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
    for text in given.get("--mount", []):
        try:
            [fields] = csv.reader([text])
        except ValueError:
            usage(f"invalid argument {text!r} for --mount")
        pairs = dict((*field.split("=", 1), "")[:2] for field in fields)
        if pairs.get("type") != "bind" or not {"source", "destination"} <= set(pairs) <= KEYS:
            usage(f"invalid argument {text!r} for --mount")
        if not Path(pairs["source"]).exists():
            refuse(f'invalid mount config for type "bind": bind source path does not exist: {pairs["source"]}')
    for text in given.get("--gpus", []):
        [fields] = csv.reader([text])  # "device=0,2" with its quotation marks is one field
        for field in fields:
            if field != "all" and not field.isdigit() and not re.fullmatch(r"device=[\w,-]+", field):
                usage(f'invalid argument "{text}" for "--gpus" flag: unexpected key {field!r}')
    for text in given.get("--user", []):
        if not re.fullmatch(r"\d+:\d+", text):
            usage(f"this double takes numbers: --user={text}")
    if given.get("--pull", ["missing"])[0] not in ("always", "missing", "never"):
        usage(f"invalid pull option: {given['--pull'][0]!r}")


def environment_of(entries: list[str]) -> dict[str, str]:
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOSTNAME": "container", "HOME": "/"}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals:
            environment[name] = value
        elif name in os.environ:
            environment[name] = os.environ[name]
    return environment


def daemon(
    given: dict[str, list[str]], image: str, command: list[str], environment: dict[str, str], *, remove_it: bool
) -> None:
    """Makes the container: no child of the client, nor in its session."""
    if not file_of("images", image).is_file():
        refuse(f"No such image: {image}")
    path = folder("containers") / given["--name"][0]
    content = {"id": os.urandom(32).hex(), "labels": given.get("--label", []), "pid": 0}
    content |= {"options": given, "image": image, "command": command}
    whole = folder("writing") / f"{path.name}.{os.getpid()}"
    whole.write_text(json.dumps(content))
    try:
        path.hardlink_to(whole)
    except FileExistsError:
        refuse(f'Conflict. The container name "/{path.name}" is already in use by container')
    finally:
        whole.unlink()
    with (folder(".") / "runs").open("a") as log:
        log.write(json.dumps(content) + "\n")
    begun_read, begun_write = os.pipe()
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.dup2(read, 0)
            os.set_inheritable(begun_write, True)
            for handle in (read, write, begun_read):
                os.close(handle)
            own = {name: os.environ[name] for name in ("TDPP_DOUBLE_DOCKER",)}  # of the daemon's shim, not the client's
            os.execve(sys.executable, [sys.executable, "-IS", __file__, "shim", str(begun_write)], own)
        os._exit(0)
    told = {"path": str(path), "content": content, "environment": environment, "remove": remove_it}
    with os.fdopen(write, "w") as to_shim:
        json.dump(told, to_shim)
    os.close(begun_write)
    os.close(read)
    os.wait()
    os.read(begun_read, 1)  # until the container has begun


def shim(begun: int) -> NoReturn:
    """The parent of the container's first process; what that ends with is in a file beside."""
    told = json.load(sys.stdin)
    path, content = Path(told["path"]), told["content"]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    pid = os.fork()
    if pid == 0:
        try:
            os.umask(0o022)  # a container has its own
            os.chdir(content["options"]["--workdir"][0])
            os.execvpe(content["command"][0], content["command"], told["environment"])
        finally:
            os._exit(127)
    write_at_once(path, json.dumps(content | {"pid": pid}))
    os.write(begun, b"x")
    os.close(begun)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for left in descendants(pid):
        try:
            os.kill(left, signal.SIGKILL)
        except ProcessLookupError:
            continue
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    write_at_once(folder_of(path) / f"{path.name}.ended", str(code if code >= 0 else 128 - code))
    if told["remove"]:
        path.unlink(missing_ok=True)
    os._exit(0)


def folder_of(path: Path) -> Path:
    ended = path.parent.parent / "ended"
    ended.mkdir(exist_ok=True)
    return ended


def follow(path: Path, name: str) -> int:
    """The client: it hands signals on, and waits for the end."""

    def proxy(signum: int, _frame: object) -> None:
        try:
            os.kill(json.loads(path.read_text())["pid"], signum)
        except (OSError, ValueError):
            return

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, proxy)
    ended = folder_of(path) / f"{name}.ended"
    while path.exists() and not ended.exists():
        time.sleep(TICK_S)
    until = time.monotonic() + 1.0
    while not ended.exists() and time.monotonic() < until:
        time.sleep(TICK_S)
    if not ended.exists():
        return 137
    code = int(ended.read_text())
    ended.unlink()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
