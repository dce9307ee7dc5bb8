"""How two processes of a run prove to each other that they know its secret, and then exchange JSON.

Each signs the other's random number (HMAC-SHA256), so the secret itself never travels. Nothing is encrypted, and
nothing is pickled. A message is its length in 4 bytes, then JSON.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.run_files import RunFiles

HANDSHAKE_S = 20.0
"""What the other side may take to prove itself; a stranger's connection is closed after it."""
LONGEST = 64 * 2**20
"""Bytes of a message."""
NONCE = PROOF = 32
LENGTH = struct.Struct("!I")


def read_secret(folder: Path) -> bytes:
    """The secret of the run in `folder`. Raises EngineError: there is none, it is too short to be one, or others can
    read it."""
    path = RunFiles(folder).secret
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(4096).strip()
    except OSError as error:
        raise EngineError(
            f"{path}: cannot read the run's secret ({error.strerror}); launch the run again, or resume it"
        ) from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise EngineError(f"{path}: others can read the run's secret (mode {stat.S_IMODE(mode):03o}); chmod 600 {path}")
    if len(content) < 32:
        raise EngineError(f"{path}: the run's secret has {len(content)} characters, expected 32 or more")
    return content


def proof(secret: bytes, side: bytes, own: bytes, other: bytes) -> bytes:
    """What shows that `side` knows the secret; each side signs both random numbers, so no answer serves twice."""
    return hmac.new(secret, b"tdpp " + side + own + other, "sha256").digest()


def prove(connection: socket.socket, secret: bytes, greeting: bytes) -> None:
    """Proves this client to a server, which says `greeting` first. Raises EOFError where that does not know the
    secret."""
    if exactly(connection, len(greeting)) != greeting:
        raise EOFError("another program listens there")
    other, own = bytes(exactly(connection, NONCE)), os.urandom(NONCE)
    connection.sendall(own + proof(secret, b"client", own, other))
    if not hmac.compare_digest(bytes(exactly(connection, PROOF)), proof(secret, b"server", other, own)):
        raise EOFError("the other side does not know the secret")


def admit(connection: socket.socket, secret: bytes, greeting: bytes) -> bool:
    """Whether a client knows the secret; if so, this server has proved itself, too."""
    own = os.urandom(NONCE)
    connection.sendall(greeting + own)
    other, found = bytes(exactly(connection, NONCE)), bytes(exactly(connection, PROOF))
    if not hmac.compare_digest(found, proof(secret, b"client", other, own)):
        return False
    connection.sendall(proof(secret, b"server", own, other))
    return True


def framed(content: Any) -> bytes:
    """The bytes of a message."""
    text = json.dumps(content).encode()
    return LENGTH.pack(len(text)) + text


def send(connection: socket.socket, content: Any) -> None:
    """Sends a message."""
    connection.sendall(framed(content))


def receive(connection: socket.socket) -> Any:
    """Receives a message. Raises EOFError where the other side ends before, ValueError where it is not one."""
    (length,) = LENGTH.unpack(exactly(connection, LENGTH.size))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(exactly(connection, length))


def exactly(connection: socket.socket, count: int) -> bytearray:
    """Receives so many bytes. Raises EOFError where the other side ends before."""
    content = bytearray(count)
    left = memoryview(content)
    while left:
        taken = connection.recv_into(left)
        if not taken:
            raise EOFError("the other side has ended the connection")
        left = left[taken:]
    return content
