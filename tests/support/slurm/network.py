"""The network of an isolated cluster: a bridge inside its head machine that leads to the nodes and to this machine.

All of it is gone when the head is, because links end where their network namespace does.
"""

from __future__ import annotations

import itertools
import subprocess

from tests.support.slurm.machines import Isolated


class Network:
    """The addresses are 10.231.N.*, where N is the first that no other cluster on this machine has."""

    def __init__(self, head: Isolated) -> None:
        self._head = head
        self._ports = itertools.count(1)
        self._number = next(number for number in range(1, 255) if _connect(number, head.pid))
        here = f"tdpp{self._number}"
        _ip("addr", "add", f"{self.login}/24", "dev", here)
        _ip("link", "set", here, "up")
        # A bridge without an address of its own takes the lowest of its ports', and changes it as nodes come and go:
        # what others know of it is then wrong for a moment.
        head.ip(
            f"""\
link add nodes address 02:00:00:00:00:01 type bridge forward_delay 0
addr add {self.head}/24 dev nodes
link set nodes up
link set login master nodes up
"""
        )

    @property
    def login(self) -> str:
        """The address of this machine, where the tests run."""
        return self.address(1)

    @property
    def head(self) -> str:
        return self.address(2)

    def address(self, host: int) -> str:
        return f"10.231.{self._number}.{host}"

    def connect(self, machine: Isolated, address: str) -> None:
        """Gives the machine an `eth0`. A machine of the same address may have been here before."""
        port = f"port{next(self._ports)}"
        self._head.ip(
            f"link add {port} type veth peer name eth0 netns {machine.pid}\nlink set {port} master nodes up\n"
        )
        machine.ip(f"addr add {address}/24 dev eth0\nlink set eth0 up\n")

    def disconnect(self) -> None:
        """At once, while the head lives; the kernel would take a moment after its end."""
        _ip("link", "del", f"tdpp{self._number}")


def _connect(number: int, head: int) -> bool:
    """Takes the number, unless another cluster has it: names of links are unique, and the kernel keeps them so."""
    link = ["link", "add", f"tdpp{number}", "type", "veth", "peer", "name", "login", "netns", str(head)]
    made = subprocess.run(["ip", *link], capture_output=True, text=True)
    if made.returncode and "File exists" not in made.stderr:
        raise RuntimeError(f"ip {' '.join(link)}: {made.stderr}")
    return made.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
