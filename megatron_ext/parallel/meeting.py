"""Where the ranks of several nodes meet: the store that the node of rank 0 opens, and publishes in master.json."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta
from typing import Any, Dict

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from megatron_ext.contract.errors import EngineError, PeerLost
from megatron_ext.contract.files import json_line, read_regular, write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import start_of_run
from megatron_ext.parallel import interface
from megatron_ext.parallel.store import AuthenticatedStore, Server, read_secret

LARGEST = 1 << 16
"""Bytes of master.json."""


def open_store(plan: Plan) -> Server:
    """Listens for this run's ranks on the network of its nodes, and publishes where (master.json).

    Raises:
        EngineError: it cannot listen there.
    """
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
