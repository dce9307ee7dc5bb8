"""python -m megatron_ext.checkpoints.keeper RUN NODE SUBMISSION: keeps parts of checkpoints in the memory of a node.

The node's agent starts it, and it ends with the agent. It listens on the address by which the other nodes reach this
one, for who knows the run's secret, and writes where into `nodes/<node>.keeper.json`. It holds two checkpoints at most:
the one being saved, and the newest complete one. Where memory runs out the kernel ends this process before any rank. It
needs Python alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_json
from megatron_ext.contract.handshake import HANDSHAKE_S, admit, exactly, read_secret, receive, send
from megatron_ext.contract.kept import GREETING, TRANSFER_S, At
from megatron_ext.contract.run_files import META, RunFiles
from megatron_ext.parallel import interface

ROOM = 0.05
"""The part of the machine's memory that is to stay free."""


class Part(NamedTuple):
    """The bytes of a part's file, and the digest of its header."""

    digest: str
    content: bytearray


class Memory:
    """What the keeper of a node holds. Threads may use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Dict[At, Dict[str, Part]] = {}

    def make_room(self, at: At, keep: Optional[At], size: int) -> Optional[str]:
        """Forgets what is not `at` or `keep`, for so many bytes more; returns why they cannot be taken, if so."""
        with self._lock:
            if any(one.order > at.order for one in self._held):
                return f"a later checkpoint than iteration {at.iteration} of start {at.start} is being saved"
            for one in [one for one in self._held if one not in (at, keep)]:
                del self._held[one]
        total, available = machine_memory()
        if size > available - ROOM * total:
            return f"{size:,} bytes do not fit into its memory, of which {available:,} bytes are free"
        return None

    def take(self, at: At, name: str, part: Part) -> int:
        """Returns the bytes of all parts."""
        with self._lock:
            self._held.setdefault(at, {})[name] = part
            return sum(len(one.content) for parts in self._held.values() for one in parts.values())

    def get(self, at: At, name: str) -> Optional[bytearray]:
        with self._lock:
            part = self._held.get(at, {}).get(name)
        return None if part is None else part.content

    def listed(self) -> Any:
        """What there is, as `Keeper.held` has it."""
        with self._lock:
            return [
                {
                    "at": at,
                    "meta": json.loads(parts[META].content) if META in parts else None,
                    "parts": {name: part.digest for name, part in parts.items() if name != META},
                }
                for at, parts in self._held.items()
            ]


def machine_memory() -> Any:
    """The bytes of this machine's memory, and those of them that are free or can be freed."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return found["MemTotal"], found["MemAvailable"]


def serve(connection: socket.socket, secret: bytes, memory: Memory) -> None:
    """One connection: nothing is taken from it before it has proved itself."""
    with connection, suppress(OSError, EOFError, ValueError, KeyError, TypeError):
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not admit(connection, secret, GREETING):
            return
        while True:
            connection.settimeout(None)  # a client may think for as long as it likes
            request = receive(connection)
            connection.settimeout(TRANSFER_S)
            _answer(connection, request, memory)


def _answer(connection: socket.socket, request: Dict[str, Any], memory: Memory) -> None:
    do = request["do"]
    if do == "list":
        send(connection, {"answer": memory.listed()})
        return
    at, name = At(*request["at"]), request["part"]
    if do == "get":
        content = memory.get(at, name)
        if content is None:
            send(connection, {"error": f"it does not have {name} of iteration {at.iteration}"})
            return
        send(connection, {"answer": len(content)})
        connection.sendall(content)
    elif do == "put":
        keep = request["keep"] and At(*request["keep"])
        refused = memory.make_room(at, keep, request["bytes"])
        if refused is not None:
            send(connection, {"error": refused})
            return
        send(connection, {"answer": True})
        part = Part(request["digest"], exactly(connection, request["bytes"]))
        send(connection, {"answer": memory.take(at, name, part)})


def main(folder: str, node: str, submission: str) -> None:
    run = RunFiles(Path(folder))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    secret, memory = read_secret(run.path), Memory()
    listening = interface.listen(interface.own_address(), 0)
    host, port = listening.getsockname()[:2]
    write_json(run.keeper(node), {"submission": int(submission), "host": host, "port": port, "pid": os.getpid()})
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve, args=(connection, secret, memory), daemon=True).start()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (EngineError, OSError) as error:
        sys.exit(f"no checkpoints are kept in the memory of this node: {error}")
