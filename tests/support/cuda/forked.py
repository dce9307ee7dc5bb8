"""Programs under the stand-in for CUDA, forked from one process that has imported torch: half of a short one's time.

As `python -m tests.support.cuda.forked SOCKET` it is that process, one for each process of the tests. `Forks` asks it
for programs. It ends when its standard input does, and so with whoever has started it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from runpy import run_module, run_path
from typing import Any

from tests.support import ROOT


class Forks:
    """Runs programs as `subprocess.run` does, in forks of a process that is started once."""

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        """`environment` has what a program reads before its first line, such as LD_PRELOAD."""
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._address = str(Path(self._folder.name) / "socket")
        command = [str(python), "-m", __name__, self._address]
        own = {"STANDIN_LOG": str(Path(self._folder.name) / "log")}  # else no fork writes one
        self._server = subprocess.Popen(
            command, cwd=ROOT, env={**environment, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", "the process to fork from has ended"
        atexit.register(self._server.communicate)  # which ends it

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Returns when all that the program has forked has ended, too."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder, socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.sendall(
                json.dumps({"words": words, "environment": dict(environment), "folder": folder}).encode()
            )
            connection.shutdown(socket.SHUT_WR)
            code = b"".join(iter(lambda: connection.recv(64), b"")).decode()
            out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(words, int(code), out, err)


def serve(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    server.close()
                    os._exit(_watch(connection))
            _bury(os.WNOHANG)
    _bury()


def _bury(options: int = 0) -> None:
    """Waits for what has ended, or for all."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _watch(connection: socket.socket) -> int:
    """Runs the program that is asked for, and answers with its exit code."""
    asked = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    pid = os.fork()
    if pid == 0:  # which keeps the connection open, as do its own forks
        os._exit(_program(asked))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(str(code).encode())
    return 0


def _program(asked: Mapping[str, Any]) -> int:
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        os.dup2(os.open(Path(asked["folder"], name), flags | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    module = asked["words"][0] == "-m"
    sys.argv = asked["words"][module:]
    sys.path[1:1] = asked["environment"]["PYTHONPATH"].split(os.pathsep)
    code: object = 0
    try:
        if module:
            run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001  (else it would go on as the process that it was forked from)
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch._inductor.compile_fx  # noqa: F401  (what most programs import: torch, its compiler and the engine)

    import megatron_ext.families.gpt.task  # noqa: F401
    import tests.support.cuda.worker  # noqa: F401

    serve(sys.argv[1])
