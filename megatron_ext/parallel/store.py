"""Where the ranks of several nodes meet: a table of keys on node 0, open only to who knows the run's secret.

torch's own TCPStore listens on every interface and answers whoever asks. This one listens on one address, and both
sides prove that they know the secret before a key is read or written (`contract/handshake.py`). The bytes of a value
stand in a message as latin-1.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import socket
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Union

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.contract.handshake import HANDSHAKE_S, LENGTH, LONGEST, NONCE, PROOF, framed, proof, prove, receive
from megatron_ext.parallel import interface

GREETING = b"tdpp store 1\n"


class Server:
    """Keeps the keys, in a thread of its own, until it is closed or this process ends."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """Listens as `interface.listen` does. Raises OSError: it cannot listen there."""
        self._secret = secret
        self._values: Dict[str, bytes] = {}
        self._waiting: Dict[str, Set[asyncio.Future[None]]] = {}
        self._writers: Set[asyncio.StreamWriter] = set()
        self._open = True
        # Every rank holds a connection, and many systems let a process have 1,024 files unless it asks for more.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._socket = interface.listen(host, port)
        self.host: str = self._socket.getsockname()[0]
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and stops listening."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket))
        self._loop.run_forever()
        listening.close()
        # Not by cancelling, which asyncio's streams of some versions of Python report as an error of their own.
        self._open = False
        for future in [future for futures in self._waiting.values() for future in futures]:
            future.cancel()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks(self._loop)
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: none of its words is looked at before it has proved itself."""
        self._writers.add(writer)
        late = self._loop.call_later(HANDSHAKE_S, writer.close)
        try:
            if await self._admit(reader, writer):
                late.cancel()
                while True:
                    request = json.loads(await _receive(reader))
                    writer.write(framed(await self._answer(request)))
                    await writer.drain()
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # the other side is gone, or speaks something else: it is no more than its own loss
        finally:
            late.cancel()
            self._writers.discard(writer)
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        own = os.urandom(NONCE)
        writer.write(GREETING + own)
        other, found = await reader.readexactly(NONCE), await reader.readexactly(PROOF)
        if not hmac.compare_digest(found, proof(self._secret, b"client", other, own)):
            return False
        writer.write(proof(self._secret, b"server", own, other))
        await writer.drain()
        return True

    async def _answer(self, request: Dict[str, Any]) -> Any:
        """The reply to one request. JSON's null stands for keys that did not come in time."""
        do = request["do"]
        if do == "set":
            for key, value in request["values"].items():
                self._set(key, value.encode("latin-1"))
            return True
        if do == "append":
            self._set(request["key"], self._values.get(request["key"], b"") + request["value"].encode("latin-1"))
            return True
        if do == "add":
            total = int(self._values.get(request["key"], b"0")) + int(request["amount"])
            self._set(request["key"], str(total).encode())
            return total
        if do == "compare":
            return self._compare(request["key"], request["expected"], request["wanted"])
        if do == "get":
            await self._wait(request["keys"], request["seconds"])
            found = [self._values.get(key) for key in request["keys"]]
            return None if None in found else [value.decode("latin-1") for value in found if value is not None]
        if do == "check":
            return all(key in self._values for key in request["keys"])
        if do == "delete":
            return self._values.pop(request["key"], None) is not None
        if do == "count":
            return len(self._values)
        raise ValueError(do)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def _compare(self, key: str, expected: str, wanted: str) -> str:
        """Does what TCPStore does: sets what is as expected, or is not there where nothing is expected; returns what is
        there."""
        found = self._values.get(key)
        if (expected == "") if found is None else (found == expected.encode("latin-1")):
            self._set(key, wanted.encode("latin-1"))
            return wanted
        return expected if found is None else found.decode("latin-1")

    async def _wait(self, keys: Sequence[str], seconds: float) -> None:
        """Returns when all keys are there, or the time is over."""
        until = self._loop.time() + seconds
        for key in keys:
            while self._open and key not in self._values and self._loop.time() < until:
                future = self._loop.create_future()
                self._waiting.setdefault(key, set()).add(future)
                await asyncio.wait([future], timeout=until - self._loop.time())
                if not future.done():
                    self._waiting[key].discard(future)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    return await reader.readexactly(length)


class StoreError(RuntimeError):
    """The store cannot be reached, or did not have a key in time; torch's own stores raise a RuntimeError, too."""


class AuthenticatedStore(Store):
    """The store at an address, for a rank. Threads may use it at once: each request has a connection of its own.

    Keys and values are as torch's stores have them: `get` waits for its key until the timeout is over.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout: timedelta) -> None:
        """Connects, for as long as `timeout` allows. Raises StoreError: nobody answers there who knows the secret."""
        super().__init__()
        self._address = (host, port)
        self._secret = secret
        self._timeout = timeout
        self._idle: List[socket.socket] = []
        self._kept: List[AuthenticatedStore] = []
        self._idle.append(self._connect())

    def set(self, key: str, value: Union[str, bytes]) -> None:
        self._ask({"do": "set", "values": {key: _text(value)}})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"do": "add", "key": key, "amount": amount}))

    def append(self, key: str, value: Union[str, bytes]) -> None:
        self._ask({"do": "append", "key": key, "value": _text(value)})

    def compare_set(self, key: str, expected: Union[str, bytes], wanted: Union[str, bytes]) -> bytes:
        request = {"do": "compare", "key": key, "expected": _text(expected), "wanted": _text(wanted)}
        return str(self._ask(request)).encode("latin-1")

    def check(self, keys: List[str]) -> bool:
        return bool(self._ask({"do": "check", "keys": keys}))

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        self._get(keys, self._timeout if timeout is None else timeout)

    def multi_get(self, keys: List[str]) -> List[bytes]:
        return self._get(keys, self._timeout)

    def multi_set(self, keys: List[str], values: Sequence[Union[str, bytes]]) -> None:
        self._ask({"do": "set", "values": {key: _text(value) for key, value in zip(keys, values)}})

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._ask({"do": "delete", "key": key}))

    def num_keys(self) -> int:
        return int(self._ask({"do": "count"}))

    deleteKey, getNumKeys = delete_key, num_keys  # what torch's C++ calls them

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> AuthenticatedStore:
        """Another one of the same keys. torch keeps only its C++ half alive: this one keeps it whole."""
        self._kept.append(AuthenticatedStore(*self._address, self._secret, self._timeout))
        return self._kept[-1]

    def _get(self, keys: List[str], timeout: timedelta) -> List[bytes]:
        seconds = timeout.total_seconds()
        found = self._ask({"do": "get", "keys": keys, "seconds": seconds}, seconds)
        if found is None:
            raise StoreError(f"{', '.join(keys[:3])}{', …' * (len(keys) > 3)} did not come within {seconds:g} s")
        return [str(value).encode("latin-1") for value in found]

    def _ask(self, request: Dict[str, Any], seconds: float = 0.0) -> Any:
        """The reply, for which the store itself may need `seconds`."""
        message = framed(request)
        if (length := len(message) - LENGTH.size) > LONGEST:
            raise StoreError(f"a message of {length} bytes is too long for the store")
        with self._connection() as connection:
            connection.settimeout(seconds + HANDSHAKE_S)
            connection.sendall(message)
            return receive(connection)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """One that no other thread uses meanwhile; after a failure it is not used again."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        except (OSError, EOFError, ValueError) as error:
            connection.close()
            host, port = self._address
            raise StoreError(f"lost the store at {host}:{port}: {str(error) or type(error).__name__}") from error
        except BaseException:  # a signal's: the reply may still be under way
            connection.close()
            raise
        self._idle.append(connection)

    def _connect(self) -> socket.socket:
        until = time.monotonic() + max(1.0, self._timeout.total_seconds())
        while True:
            try:
                return self._try_to_connect(until)
            except OSError as error:
                if time.monotonic() >= until:
                    host, port = self._address
                    raise StoreError(f"no store at {host}:{port}: {error.strerror or error}") from error
            time.sleep(0.05)

    def _try_to_connect(self, until: float) -> socket.socket:
        left = min(HANDSHAKE_S, max(0.1, until - time.monotonic()))
        connection = socket.create_connection(self._address, timeout=left)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            prove(connection, self._secret, GREETING)
        except EOFError as error:
            connection.close()
            raise StoreError(
                f"the store at {self._address[0]}:{self._address[1]} refused this rank: it has another secret, "
                "or another program listens there"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection


def _text(value: Union[str, bytes]) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")
