"""Hosts that only ssh reaches, for tests: each a machine with a network, a host name and a process tree of its own, on
which a real sshd lets in this user's key. Files are shared, as on NFS.

All of it is gone with the process that made it (`tests.support.slurm.machines`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.containers import docker_double
from tests.support.slurm import machines, reap
from tests.support.slurm.login_node import daemons_path
from tests.support.slurm.network import Network

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip")
PACKAGES = ("openssh-server", "openssh-client", "iproute2")
STRANGER = "stranger"
"""A name of the first host under which its key is not known."""
CHANGED = "changed"
"""One whose known key is another."""
LOCKED = "locked"
"""One that does not take the key that is offered."""
OFF = "off"
"""A name with an address that nobody has."""


def missing() -> list[str]:
    """Programs that the hosts need and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=daemons_path()) is None]


class Fleet:
    """Some hosts, and a folder with an `ssh` that knows how they are reached."""

    def __init__(self, base: Path, names: Sequence[str]) -> None:
        self.base = base
        self.names = tuple(names)
        self._hidden: list[tuple[str, Path]] = []
        self._machines: dict[str, machines.Isolated] = {}
        (base / "hosts").touch()
        self._head = machines.Isolated("switch", base / "hosts")
        self._network = Network(self._head)
        self._addresses = {name: self._network.address(number) for number, name in enumerate(names, 11)}
        self._write()
        for name in names:
            self.boot(name)

    @property
    def bin(self) -> Path:
        """First on PATH, of the tests and of the hosts."""
        return self.base / "bin"

    def docker(self, images: Mapping[str, str]) -> dict[str, Path]:
        """Gives every host a docker (the double) with an image `lab:1` of this id; its daemon's folder by host."""
        folders = {}
        for name, image in images.items():
            folders[name] = self.base / f"docker-{name}"
            (folders[name] / "images").mkdir(parents=True, exist_ok=True)
            (folders[name] / "images" / "lab:1").write_text(image)
        shim = self.bin / "docker"
        words = shlex.join([sys.executable, "-IS", docker_double.__file__])
        shim.write_text(f'#!/bin/sh\nexport TDPP_DOUBLE_DOCKER="{self.base}/docker-$(hostname)"\nexec {words} "$@"\n')
        shim.chmod(0o755)
        return folders

    def stop(self) -> None:
        """Ends every process, at once."""
        self._network.disconnect()
        for machine in [*self._machines.values(), self._head]:
            machine.kill()

    def boot(self, name: str) -> None:
        """Power on; returns when its sshd answers."""
        self._machines[name] = machine = machines.Isolated(name, self.base / "hosts")
        self._network.connect(machine, self._addresses[name])
        sshd = shutil.which("sshd", path=daemons_path())
        assert sshd is not None
        log = self.base / f"sshd-{name}.log"
        machine.spawn([sshd, "-D", "-e", "-f", str(self.base / f"sshd_{name}")], log, {"PATH": daemons_path()})
        until = time.monotonic() + 60
        while not _listens(self._addresses[name]):
            if time.monotonic() > until:
                raise RuntimeError(f"sshd of {name} does not listen: {log.read_text()}")
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """Power off: every process of the host is gone, and nobody answers."""
        self._machines.pop(name).kill()

    def call(self, name: str, *argv: str) -> None:
        """Runs a command on a host, without ssh."""
        self._machines[name].call(*argv)

    @contextmanager
    def listening(self, name: str, port: int) -> Iterator[None]:
        """Somebody else's program has a port of a host."""
        program = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(600)"
        log = self.base / "listener.log"
        daemon = self._machines[name].spawn([sys.executable, "-c", program], log, {"PATH": daemons_path()})
        try:
            while not _listens(self._addresses[name], port):
                assert daemon.poll() is None, log.read_text()
                time.sleep(0.05)
            yield
        finally:
            for pid in reap.descendants({daemon.pid}, reap.parents()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            daemon.wait()

    def hide(self, name: str, folder: Path) -> None:
        """Puts an empty folder in a folder's place on this host, until `clear`."""
        self.call(name, "mount", "-t", "tmpfs", "tmpfs", str(folder))
        self._hidden.append((name, folder))

    def processes(self, *names: str) -> dict[int, str]:
        """What runs on these hosts, or on any, but sshd: command lines by the pids they have here."""
        found = {}
        for name in names or self.names:
            if name in self._machines:
                found |= {
                    pid: line for pid, line in self._machines[name].guests().items() if not line.startswith("sshd:")
                }
        return found

    def clear(self) -> list[str]:
        """All hosts up again, and nothing on them; what was there."""
        for name, folder in reversed(self._hidden):
            self.call(name, "umount", str(folder))
        self._hidden.clear()
        for name in self.names:
            if name not in self._machines:
                self.boot(name)
        until = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(left.values())

    def _write(self) -> None:
        base = self.base
        lines = ["127.0.0.1 localhost", f"{self._network.login} {socket.gethostname()}"]
        lines += [f"{address} {name}" for name, address in self._addresses.items()]
        (base / "hosts").write_text("\n".join(lines) + "\n")
        for key in ("user", "other", *(f"host_{name}" for name in self.names)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / key)], check=True)
        shutil.copy(base / "user.pub", base / "authorized")
        known = [f"{name} {(base / f'host_{name}.pub').read_text()}" for name in self.names]
        known += [f"{LOCKED} {(base / f'host_{self.names[0]}.pub').read_text()}"]
        known += [f"{CHANGED} {(base / 'other.pub').read_text()}"]
        (base / "known").write_text("".join(known))
        for name in self.names:
            (base / f"sshd_{name}").write_text(
                f"Port 22\nHostKey {base}/host_{name}\nAuthorizedKeysFile {base}/authorized\nStrictModes no\n"
                "UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
                f"PermitRootLogin prohibit-password\nSetEnv PATH={self.bin}:/usr/local/bin:/usr/bin:/bin\n"
                "PidFile none\n"
            )
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd gives up its rights
        self._write_client()

    def _write_client(self) -> None:
        """ssh takes the user's configuration from the home that the user's account has: a test gives it another one."""
        base, first = self.base, self._addresses[self.names[0]]
        names = {**self._addresses, STRANGER: first, CHANGED: first, LOCKED: first, OFF: self._network.address(200)}
        parts = [
            f"Host {name}\n HostName {address}\n HostKeyAlias {name}\n"
            f" IdentityFile {base}/{'other' if name == LOCKED else 'user'}\n"
            for name, address in names.items()
        ]
        common = f"Host *\n User root\n IdentitiesOnly yes\n UserKnownHostsFile {base}/known\n"
        (base / "config").write_text("".join(parts) + common + " GlobalKnownHostsFile /dev/null\n")
        self.bin.mkdir()
        shim = self.bin / "ssh"
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(shutil.which("ssh") or "ssh")} -F {base}/config "$@"\n')
        shim.chmod(0o755)


def _listens(address: str, port: int = 22) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0
