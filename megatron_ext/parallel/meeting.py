"""Where the ranks of several nodes meet: the store that the node of rank 0 opens, and publishes in master.json."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from megatron_ext.contract.errors import EngineError, PeerLost
from megatron_ext.contract.files import json_line, read_regular, write_json
from megatron_ext.contract.handshake import read_secret
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import start_of_run
from megatron_ext.parallel import interface
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.parallel.store import AuthenticatedStore, Server
from megatron_ext.timeline.recorder import Recorder

LARGEST = 1 << 16
"""Bytes of master.json."""


def open_store(plan: Plan) -> Server:
    """Listens for this run's ranks on the network of its nodes, and publishes where (master.json). Raises EngineError:
    it cannot listen there."""
    host = interface.meeting_address(len(plan.used))
    try:
        store = Server(host, plan.master_port or 0, read_secret(plan.folder))
    except OSError as error:
        raise EngineError(
            f"executor.master_port={plan.master_port}: cannot listen there on {host}: {error.strerror}; "
            "choose another port, or null for a free one"
        ) from error
    write_json(plan.files.address, {"start": start_of_run(), "host": store.host, "port": store.port})
    return store


def join_store(plan: Plan) -> Store:
    """Waits until the node of rank 0 has published the store, connects, and waits until all ranks have.

    What takes its time here, such as a node that is still in the queue, must not count as a lost rank later.
    """
    until = time.monotonic() + plan.meeting_timeout_s
    address = _address(plan, until)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address["host"], str(address["port"])
    if address["host"] == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    left = timedelta(seconds=max(1.0, until - time.monotonic()))
    what = f"rank 0's node at {address['host']}:{address['port']}"
    try:
        store = AuthenticatedStore(address["host"], address["port"], read_secret(plan.folder), left)
        what = f"all {plan.world_size} ranks"
        if store.add("here", 1) == plan.world_size:
            store.set("all-here", "")
        store.wait(["all-here"])
        store.set_timeout(timedelta(seconds=plan.train.comm_timeout_s))  # what was left could be a second
    except RuntimeError as error:
        raise PeerLost(
            f"{what} could not be reached within {plan.meeting_timeout_s} s: {str(error).splitlines()[0]}"
        ) from error
    return store


def _address(plan: Plan, until: float) -> Dict[str, Any]:
    path = plan.files.address
    while time.monotonic() < until:
        try:
            address = json_line(read_regular(path, LARGEST).decode(errors="replace")) or {}
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # over NFS a file is stale that was just replaced
                raise
            address = {}
        if address.get("start") == start_of_run() and {"host", "port"} <= address.keys():
            return address
        time.sleep(0.02)
    raise PeerLost(f"the node of rank 0 did not publish its address ({path}) within {plan.meeting_timeout_s} s")


def local_store_suffices(plan: Plan) -> bool:
    """Whether all ranks are on one node, and no port was asked for. nccl keeps the store that its watchdog knows."""
    return len(plan.used) == 1 and plan.master_port is None and plan.device == "cpu"


class LocalStore:
    """Made before the ranks are forked; gone with the last process that has it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("tdpp-store")

    def join(self) -> Store:
        """The store, in a rank."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return FileStore(f"/proc/self/fd/{self._file}")


COMMON = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_NTHREADS")
"""Environment: how both sides of a message send it. Others name a node's own devices."""


def check_same_software(store: Store, rank: int, ranks: int, device: torch.device) -> None:
    """Compares the versions of all ranks, before any of them sends a message; all call it together. Raises EngineError:
    they differ; the message names hosts and versions."""
    with annotate_errors("comparing versions"):
        store.set(f"software/{rank}", json.dumps([socket.gethostname(), _versions(device)]))
        if rank == 0:
            found = [json.loads(store.get(f"software/{other}")) for other in range(ranks)]
            store.set("software", json.dumps(difference([(host, versions) for host, versions in found])))
        message = json.loads(store.get("software"))
    if message:
        raise EngineError(message)


def _versions(device: torch.device) -> str:
    if device.type == "cpu":
        return f"torch {torch.__version__}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    rules = [f"{name}={os.environ[name]}" for name in COMMON if name in os.environ]
    return ", ".join([f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"NCCL {nccl}", *rules])


def difference(found: List[Tuple[str, str]]) -> str:
    """What is wrong with (host, versions) of all ranks; empty if nothing is."""
    hosts: Dict[str, List[str]] = {}
    for host, versions in found:
        if host not in hosts.setdefault(versions, []):
            hosts[versions].append(host)
    if len(hosts) == 1:
        return ""
    told_hosts = "; ".join(f"{versions} on {', '.join(names)}" for versions, names in hosts.items())
    return (
        f"the ranks run different software: {told_hosts}. Use the same container image on every node, "
        "and give variables like NCCL_PROTO to all of them, in cluster.environment"
    )


ROUNDS = 8


def align_clocks(recorder: Recorder, store: Store, name: str) -> None:
    """Writes a `clock` record on every rank; all ranks call it together, each time with another `name`.

    Ranks on one host share the monotonic clock. For any other host rank 0 answers a few round trips with its
    time; the shortest gives the offset, and half of it the uncertainty (Cristian 1989). They go through the store:
    between GPUs each rank would have to connect to rank 0, which takes time and GPU memory for each.
    """
    rank, store = dist.get_rank(), PrefixStore(f"clock/{name}", store)
    with annotate_errors("comparing clocks"):
        store.set(f"host/{rank}", socket.gethostname())
        if rank == 0:
            _answer(store, [store.get(f"host/{other}") for other in range(dist.get_world_size())])
        if store.get("host/0").decode() == socket.gethostname():
            now = time.monotonic_ns()
            recorder.clock(now, now, 0)
        else:
            recorder.clock(*_ask(store, rank))


def _answer(store: Store, hosts: List[bytes]) -> None:
    for remote in (rank for rank, host in enumerate(hosts) if host != hosts[0]):
        for number in range(ROUNDS):
            store.wait([f"ask/{remote}/{number}"])
            store.set(f"answer/{remote}/{number}", str(time.monotonic_ns()))


def _ask(store: Store, rank: int) -> Tuple[int, int, int]:
    """Own time, rank 0's time at that moment, uncertainty; nanoseconds."""
    trips = []
    for number in range(ROUNDS):
        before = time.monotonic_ns()
        store.set(f"ask/{rank}/{number}", "")
        store.wait([f"answer/{rank}/{number}"])
        after = time.monotonic_ns()
        trips.append((after - before, (before + after) // 2, int(store.get(f"answer/{rank}/{number}"))))
    trip, own, rank0 = min(trips)
    return own, rank0, (trip + 1) // 2
