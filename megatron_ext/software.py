"""All ranks must run the same torch and NCCL: between different ones collectives hang or give wrong sums."""

from __future__ import annotations

import socket
from typing import Dict, List, Tuple

import torch
import torch.distributed as dist

from megatron_ext.comm import told
from megatron_ext.errors import EngineError


def same_software(device: torch.device) -> None:
    """Compares the versions of all ranks; all of them call it together.

    Raises:
        EngineError: they differ; the message names hosts and versions.
    """
    nccl = torch.cuda.nccl.version() if device.type == "cuda" else "not used"  # type: ignore[no-untyped-call]
    own = (socket.gethostname(), f"torch {torch.__version__}, NCCL {nccl}")
    found: List[Tuple[str, str]] = [own] * dist.get_world_size()
    with told("comparing versions"):
        dist.all_gather_object(found, own)
    message = difference(found)
    if message:
        raise EngineError(message)


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
