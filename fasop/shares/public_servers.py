"""The servers of a cluster as IIDP and JABAS describe them, and the configuration that their solver starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasop.errors import SearchError
from fasop.shares.json_files import number_in, object_in, there, whole_in

INFO_FILE, CONFIGURATION = "gpu_cluster_info.json", "config.json"
TFLOPS = "tfplos"
"""Spelt so by the two projects."""


@dataclass(frozen=True, kw_only=True)
class PublicServer:
    """Bandwidths are in bytes a second; None: not known."""

    gpu: str
    gpus: int
    tflops: float
    within: float | None = None
    between: float | None = None


def read_servers(file: Path) -> dict[str, PublicServer]:
    """Those of a gpu_cluster_info, by name; none of another JSON file, because such a file has any name. Raises
    SearchError: a value breaks a rule."""
    found = dict[str, PublicServer]()
    try:
        content = object_in(file)
    except SearchError:
        return found
    if not all(isinstance(info, dict) and {"type", "number"} <= info.keys() for info in content.values()):
        return found
    for name, about in content.items():

        def number(key: str, of: Mapping[str, Any] = about, server: str = name) -> float:
            return number_in(file, f"{server}.{key}", there(file, of, key, f"{server}."), above=0)

        found[name] = PublicServer(
            gpu=str(there(file, about, "type", f"{name}.")),
            gpus=whole_in(file, f"{name}.number", there(file, about, "number", f"{name}.")),
            tflops=number_in(file, f"{name}.{TFLOPS}", about.get(TFLOPS, 0)),
            within=number("intra_network_bandwidth"),
            between=number("inter_network_bandwidth"),
        )
    return found


def server_of(servers: Mapping[str, PublicServer], host: str, gpu: str) -> PublicServer | None:
    """That of a host with this GPU: the one with its name, or else the first with the same GPU."""
    alike = {name: server for name, server in servers.items() if server.gpu == gpu}
    return alike.get(host) or next(iter(alike.values()), None)


def configuration(root: Path, folders: Mapping[str, str], servers: Mapping[str, PublicServer]) -> dict[Path, str]:
    """The files that the public solver reads beside the profiles' folders, which are given by its keys."""
    info = {
        name: {
            "type": server.gpu,
            TFLOPS: server.tflops,
            "number": server.gpus,
            "intra_network_bandwidth": round(server.within or 0),
            "inter_network_bandwidth": round(server.between or 0),
        }
        for name, server in servers.items()
    }
    there = root.absolute()
    content = {key: str(there / name) for key, name in {**folders, "gpu_cluster_info": INFO_FILE}.items()}
    return {
        root / INFO_FILE: json.dumps(info, indent=4),
        root / CONFIGURATION: json.dumps({**content, "available_servers": [*servers]}, indent=4),
    }
