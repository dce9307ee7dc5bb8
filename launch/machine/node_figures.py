"""python -m launch.machine.node_figures: what this machine says of itself, as a line of JSON behind a mark."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.run_folder.json_values import typed
from launch.errors import LaunchError
from launch.machine.gpus import GpuFigures, Gpus

MODULE = "launch.machine.node_figures"
MARK = "tdpp-node: "
"""Before the line: a prologue of Slurm's may print something first."""
SYS = Path("/sys/class")


@dataclass(frozen=True, kw_only=True)
class NodeFigures:
    """A machine, as far as a plan needs to know it."""

    host: str
    cpus: int
    """That its kernel knows."""
    gpus: tuple[GpuFigures, ...] = ()
    no_gpus: str | None = None
    """Why there are none."""
    network_gbit_per_s: float | None = None
    """The rate of its InfiniBand adapters together, or else of its fastest network card; None: not known."""

    def as_line(self) -> str:
        return f"{MARK}{json.dumps(asdict(self))}"

    @classmethod
    def parse(cls, text: str) -> NodeFigures:
        """Reads what the module has printed.

        Raises:
            LaunchError: the line is not there.
            RunFolderError: it is another version's.
        """
        lines = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
        if not lines:
            raise LaunchError(f"no answer in the output: {text.strip()[-200:] or 'nothing'}")
        return typed(cls, json.loads(lines[-1]), "its answer")


def node_figures() -> NodeFigures:
    """Returns the figures of this machine."""
    gpus: tuple[GpuFigures, ...] = ()
    why = None
    try:
        gpus = Gpus().figures()
    except LaunchError as error:
        why = str(error)
    rate = network_gbit_per_s(SYS)
    return NodeFigures(
        host=socket.gethostname(), cpus=os.cpu_count() or 1, gpus=gpus, no_gpus=why, network_gbit_per_s=rate
    )


def network_gbit_per_s(sys_class: Path) -> float | None:
    """What `/sys/class` says of a machine's way to others."""
    return sum(_infiniband(sys_class)) or max(_cards(sys_class), default=None)


def _infiniband(sys_class: Path) -> Iterator[float]:
    for port in sys_class.glob("infiniband/*/ports/*"):
        rate = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
        if rate and "ACTIVE" in _text(port / "state"):
            yield float(rate[1])


def _cards(sys_class: Path) -> Iterator[float]:
    """Lists the network cards that are hardware and connected."""
    for card in sys_class.glob("net/*"):
        speed = _text(card / "speed")
        if (card / "device").exists() and speed.isdigit() and int(speed) > 0:
            yield int(speed) / 1000


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a card that is down has no speed
        return ""


if __name__ == "__main__":
    print(node_figures().as_line())
    sys.exit(0)
