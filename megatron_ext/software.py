"""All ranks must run the same torch, CUDA and NCCL: between different ones collectives hang or give wrong sums."""

from __future__ import annotations

import json
import socket
from typing import Dict, List, Tuple

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.comm import told
from megatron_ext.errors import EngineError


def same_software(store: Store, rank: int, ranks: int, device: torch.device) -> None:
    """Compares the versions of all ranks, before any of them sends a message; all call it together.

    Raises:
        EngineError: they differ; the message names hosts and versions.
    """
    with told("comparing versions"):
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
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"


def difference(found: List[Tuple[str, str]]) -> str:
    """What is wrong with (host, versions) of all ranks; empty if nothing is."""
    hosts: Dict[str, List[str]] = {}
    for host, versions in found:
        if host not in hosts.setdefault(versions, []):
            hosts[versions].append(host)
    if len(hosts) == 1:
        return ""
    told_hosts = "; ".join(f"{versions} on {', '.join(names)}" for versions, names in hosts.items())
    return f"the ranks run different software: {told_hosts}. Use the same container image on every node"
