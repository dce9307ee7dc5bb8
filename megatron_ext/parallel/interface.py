"""The address under which the other nodes of a run reach this one, and the only one on which it listens."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from typing import Iterator, List, NamedTuple, Optional

from megatron_ext.contract.errors import EngineError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment: the interfaces that the ranks' own messages use."""
_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


def meeting_address(nodes: int) -> str:
    """Returns where this node listens in a run of so many nodes: one node alone needs nobody else. Raises EngineError:
    as of `own_address`."""
    return _LOOPBACK if nodes == 1 else own_address()


def listen(host: str, port: int) -> socket.socket:
    """Listens on that address alone; port 0 is any free one. Raises OSError: it cannot listen there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=4096)


def own_address() -> str:
    """Returns that of the interface that `VARIABLES` name, else what the host's name stands for, else the default
    route's. Raises EngineError: no interface has the wanted name, or nothing tells which address others can reach."""
    for variable in VARIABLES:
        wanted = os.environ.get(variable, "")
        if wanted and not wanted.startswith("^"):  # NCCL's "all but these"
            address = next(_addresses(wanted), None)
            if address is None:
                raise EngineError(
                    f"{variable}={wanted}: {socket.gethostname()} has no such interface with an IPv4 address; it has "
                    f"{', '.join(name for _, name in socket.if_nameindex())}; set cluster.environment.{variable} "
                    "(or that of the group of nodes) to one of these"
                )
            return address
    return _of_the_name() or _of_the_default_route()


class Taken(NamedTuple):
    """What the library of the ranks' messages will take, and why."""

    library: str
    address: Optional[str]
    interface: Optional[str]
    why: str


def taken_by(library: str) -> Taken:
    """What `gloo` or `nccl` takes on this host, by the rules of its sources: where its variable names nothing, gloo the
    first address of the host's name that is its own, nccl the first interface by the kind of its name."""
    variable = f"{library.upper()}_SOCKET_IFNAME"
    wanted = os.environ.get(variable, "")
    if library == "gloo":
        address = next(_addresses(wanted), None) if wanted else next(_bindable(), _LOOPBACK)
        why = f"{variable}={wanted}" if wanted else f"what the host's name, {socket.gethostname()}, resolves to"
        return Taken(library, address, None if address is None else name_of(address), why)
    if wanted and not wanted.startswith("^"):
        address = next(_addresses(wanted), None)
        return Taken(library, address, None if address is None else name_of(address), f"{variable}={wanted}")
    excluded = tuple(wanted[1:].split(",")) if wanted else ()
    names = [name for _, name in socket.if_nameindex() if not (excluded and name.startswith(excluded))]
    for name in sorted(names, key=_nccl_rank):
        with suppress(OSError):
            return Taken(library, _address(name), name, f"{variable}={wanted}" if wanted else "nccl's own choice")
    return Taken(library, None, None, f"{variable}={wanted}" if wanted else "nccl's own choice")


def _nccl_rank(name: str) -> int:
    """InfiniBand, then any network card, then containers', then this host alone."""
    return 0 if name.startswith("ib") else 2 if name.startswith("docker") else 3 if name == "lo" else 1


def _bindable() -> Iterator[str]:
    """Addresses of the host's name that are its own, in the order of the resolver."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            yield str(address[0])


def name_of(address: str) -> Optional[str]:
    """Returns the name of the interface that has this IPv4 address; None where none has it."""
    for _, interface in socket.if_nameindex():
        with suppress(OSError):
            if _address(interface) == address:
                return interface
    return None


def _addresses(wanted: str) -> Iterator[str]:
    """Returns those of the interfaces that a list of beginnings of names allows; NCCL takes a name behind = as a
    whole."""
    for name in wanted.lstrip("=").split(","):
        for _, interface in socket.if_nameindex():
            exact = wanted.startswith("=") or any(name == known for _, known in socket.if_nameindex())
            if interface == name if exact else interface.startswith(name):
                with suppress(OSError):  # it is down, or has no IPv4 address
                    yield _address(interface)


def _address(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])


def _of_the_name() -> Optional[str]:
    """What the other nodes take this host's name for; Debian's own hosts file says 127.0.1.1 to the host itself."""
    try:
        found: List[str] = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return None
    return next((address for address in found if not ipaddress.ip_address(address.split("%")[0]).is_loopback), None)


def _of_the_default_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737); nothing is sent
        except OSError as error:
            raise EngineError(
                f"this host's name, {socket.gethostname()}, has no address that other nodes can reach, and "
                f"there is no default route; set cluster.environment.{VARIABLES[0]} to the interface of their network"
            ) from error
        return str(probe.getsockname()[0])
