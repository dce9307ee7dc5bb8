"""All ranks must run the same torch, CUDA and NCCL, by the same rules: else messages hang, or sums are wrong."""

from __future__ import annotations

import json
import os
import socket
from typing import Dict, List, Tuple

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.contract.errors import EngineError
from megatron_ext.parallel.comm import annotate_errors

COMMON = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_NTHREADS")
"""Environment: how both sides of a message send it. Others name a node's own devices."""


def same_software(store: Store, rank: int, ranks: int, device: torch.device) -> None:
    """Compares the versions of all ranks, before any of them sends a message; all call it together.

    Raises:
        EngineError: they differ; the message names hosts and versions.
    """
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
