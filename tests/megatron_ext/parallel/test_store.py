"""The store's promises: torch's semantics for its ranks, and not a word to anybody else."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.handshake import NONCE, PROOF, proof, read_secret
from megatron_ext.parallel import store as module
from megatron_ext.parallel.store import AuthenticatedStore, Server, StoreError

TOLD = b"0123456789abcdef0123456789abcdef"
SHORT = timedelta(seconds=1)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("127.0.0.1", 0, TOLD)
    yield server
    server.close()


@pytest.fixture
def store(server: Server) -> AuthenticatedStore:
    return AuthenticatedStore(server.host, server.port, TOLD, timedelta(seconds=10))


def connect(server: Server, seconds: float = 5) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=seconds)


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    found = b""
    try:
        while part := connection.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    return found


KEYS = st.sampled_from(["a", "b", "prefix/ä"])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=8) | st.text(max_size=4)),
    st.tuples(st.just("add"), st.just("number"), st.integers(-5, 5)),
    st.tuples(st.just("append"), KEYS, st.binary(max_size=4)),
    st.tuples(st.just("compare_set"), KEYS, st.sampled_from(["", "x"]), st.sampled_from(["x", "y"])),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1)),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("num_keys")),
)


@given(operations=st.lists(OPERATIONS, max_size=20))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_answers_as_torchs_own_store(operations: list[tuple], store: AuthenticatedStore) -> None:
    oracle = HashStore()
    for key in ("a", "b", "prefix/ä", "number"):
        store.delete_key(key)
    for name, *arguments in operations:
        assert getattr(store, name)(*arguments) == getattr(oracle, name)(*arguments), (name, arguments)
    for key in ("a", "b", "prefix/ä"):
        if oracle.check([key]):
            assert store.get(key) == oracle.get(key)


def test_get_and_wait_return_as_soon_as_another_rank_sets_the_key(server: Server, store: AuthenticatedStore) -> None:
    other = AuthenticatedStore(server.host, server.port, TOLD, SHORT)
    threading.Timer(0.2, other.multi_set, [["first", "second"], [b"1", b"2"]]).start()
    began = time.monotonic()
    store.wait(["first", "second"])
    assert store.multi_get(["second", "first"]) == [b"2", b"1"]
    assert time.monotonic() - began < 5


def test_a_key_that_does_not_come_ends_the_wait_with_its_name(store: AuthenticatedStore) -> None:
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(StoreError, match=r"nothing did not come within 0.1 s"):
        store.get("nothing")
    with pytest.raises(StoreError, match=r"nothing did not come within 0.2 s"):
        store.wait(["nothing"], timedelta(seconds=0.2))
    assert not store.check(["nothing"])


def test_threads_use_it_at_once(store: AuthenticatedStore) -> None:
    """nccl's watchdog asks while the rank itself waits for a key."""
    waiting = threading.Thread(target=store.wait, args=(["late"],))
    waiting.start()
    assert store.add("count", 1) == 1
    store.set("late", "")
    waiting.join(5)
    assert not waiting.is_alive()


def test_gloo_meets_at_it_through_torchs_own_prefixes(server: Server) -> None:
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os._exit(_meet(server, rank))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


def _meet(server: Server, rank: int) -> int:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = AuthenticatedStore(server.host, server.port, TOLD, timedelta(seconds=20))
    dist.init_process_group("gloo", store=PrefixStore("all", store), rank=rank, world_size=2)
    total = torch.ones(3)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    store.clone().set(f"sum/{rank}", str(total.tolist()))
    return 0 if store.get(f"sum/{1 - rank}") == b"[2.0, 2.0, 2.0]" else 1


def test_who_has_another_secret_is_refused(server: Server) -> None:
    with pytest.raises(StoreError, match="refused this rank: it has another secret"):
        AuthenticatedStore(server.host, server.port, b"x" * 32, SHORT)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        b"\x00" * 64,
        os.urandom(64),
        b"\x00" * 64 + b'\x00\x00\x00\x0f{"do": "count"}',
    ],
    ids=["nothing", "http", "zeros", "random", "request"],
)
def test_a_stranger_gets_nothing_but_the_greeting(
    server: Server, store: AuthenticatedStore, words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)
    store.set("weights", "private")
    with connect(server) as stranger:
        stranger.sendall(words)
        said = everything(stranger)
    assert said.startswith(module.GREETING)
    assert len(said) == len(module.GREETING) + NONCE
    assert store.get("weights") == b"private"


@pytest.mark.parametrize(
    "request_",
    [[], 1, None, "x", {}, {"do": "set"}, {"do": "set", "values": [1]}, {"do": "get", "keys": 3, "seconds": "x"},
     {"do": "add", "key": [], "amount": {}}, {"do": "set", "values": {"weights": 1}}, {"do": "no"}, [[[]]] * 9],
    ids=str,
)  # fmt: skip
def test_a_rank_that_talks_nonsense_loses_its_connection_and_no_more(
    server: Server, store: AuthenticatedStore, request_: object, capfd: pytest.CaptureFixture[str]
) -> None:
    store.set("weights", "kept")
    with pytest.raises(StoreError, match="lost the store"):
        AuthenticatedStore(server.host, server.port, TOLD, SHORT)._ask(request_)  # type: ignore[arg-type]
    assert store.get("weights") == b"kept"
    server.close()
    assert capfd.readouterr().err == ""


def test_torchs_own_client_cannot_read_or_write(server: Server, store: AuthenticatedStore) -> None:
    with pytest.raises(RuntimeError):
        TCPStore(server.host, server.port, None, False, SHORT).set("gate", "open")
    assert not store.check(["gate"])


def test_a_recorded_proof_opens_nothing_a_second_time(server: Server) -> None:
    with connect(server) as once:
        greeting = once.recv(4096)
        own = b"n" * NONCE
        words = own + proof(TOLD, b"client", own, greeting[-NONCE:])
        once.sendall(words)
        assert len(once.recv(4096)) == PROOF
    with connect(server) as again:
        again.sendall(words)
        assert len(everything(again)) == len(greeting)


def test_a_rank_tells_nothing_to_a_false_store(tmp_path: Path) -> None:
    """Not even where it hands back the rank's own proof."""
    heard = []

    def false_store() -> None:
        connection, _ = listening.accept()
        connection.sendall(module.GREETING + b"n" * NONCE)
        heard.append(connection.recv(4096))
        connection.sendall(heard[0][-PROOF:])
        heard.append(everything(connection))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=false_store)
        thread.start()
        with pytest.raises(StoreError, match="another program listens there"):
            AuthenticatedStore(*listening.getsockname(), TOLD, SHORT)  # type: ignore[call-arg]
        thread.join(5)
    assert TOLD not in heard[0]
    assert heard[1] == b""


def test_strangers_who_say_nothing_hold_nobody_up(server: Server) -> None:
    silent = [connect(server) for _ in range(50)]
    began = time.monotonic()
    AuthenticatedStore(server.host, server.port, TOLD, timedelta(seconds=10)).set("key", "")
    assert time.monotonic() - began < 5
    for connection in silent:
        connection.close()


def test_it_listens_on_its_address_alone(server: Server) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), timeout=1)


def test_a_store_that_ends_is_told_by_its_address(server: Server, store: AuthenticatedStore) -> None:
    server.close()
    with pytest.raises(StoreError, match=f"lost the store at 127.0.0.1:{server.port}"):
        store.set("key", "")


def test_the_secret_is_read_only_where_nobody_else_can(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(EngineError, match="cannot read the run's secret"):
        read_secret(tmp_path)
    secret.write_bytes(TOLD + b"\n")
    secret.chmod(0o640)
    with pytest.raises(EngineError, match=r"others can read the run's secret \(mode 640\)"):
        read_secret(tmp_path)
    secret.chmod(0o600)
    assert read_secret(tmp_path) == TOLD
    secret.write_bytes(b"short")
    with pytest.raises(EngineError, match="has 5 characters"):
        read_secret(tmp_path)
    secret.unlink()
    secret.symlink_to("/dev/zero")
    with pytest.raises(EngineError, match="cannot read the run's secret"):
        read_secret(tmp_path)
