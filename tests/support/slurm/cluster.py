"""A real Slurm cluster on this machine, for tests: start it, use it, break it, mend it, end it.

Ended in order or killed, the process that starts a cluster leaves no process, network link or mount behind. Files stay
in `base`. Every user of this machine who can reach `base` is a user of the cluster.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.support.slurm import configuration, machines
from tests.support.slurm.configuration import HGX_AND_GPU2, Head, Node, Partition, Site
from tests.support.slurm.login_node import ClusterError, LoginNode, daemons_path
from tests.support.slurm.network import Network

PROGRAMS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "sbatch", "ip")
PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server", "iproute2")
HEAD = "head"
FOLDERS = ("munge", "log", "state", "database", "spool", "devices")
DATABASE = 'mkdir "$1/data" "$1/tmp"; exec mariadbd "$2"'
TOO_LONG_FOR_SOCKETS = 60
"""Characters of `base`: what Slurm adds must fit the 107 of a socket's path (unix(7))."""


class DaemonEnded(ClusterError):
    """A daemon of the head node has ended by itself."""


def missing() -> list[str]:
    """Programs that the cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=daemons_path()) is None]


class Cluster(LoginNode):
    """With `isolated`, every node has a network, a host name, pids and a /dev/shm of its own; files are shared."""

    def __init__(
        self, base: Path, partitions: Sequence[Partition] = HGX_AND_GPU2, *, isolated: bool, pyxis: Path | None = None
    ) -> None:
        if len(str(base)) > TOO_LONG_FOR_SOCKETS or " " in str(base):
            raise ClusterError(
                f"{base}: Slurm bears no spaces, and sockets below it at most {TOO_LONG_FOR_SOCKETS} characters;"
                " choose another folder with pytest --basetemp"
            )
        super().__init__(base)
        self.isolated = isolated
        self.nodes = tuple(name for partition in partitions for name in partition.node_names)
        self._partitions = tuple(partitions)
        self._pyxis = pyxis
        self._user = pwd.getpwuid(os.getuid()).pw_name
        self._network: Network | None = None
        self._machines: dict[str, machines.Machine] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._broken: set[str] = set()

    def start(self) -> None:
        """Returns when every node is idle.

        At times slurmdbd gets no answer to its first question to a new database, and ends; seldom the database crashes.
        Then all of it begins anew.
        """
        for _ in range(3):
            try:
                self._start()
            except DaemonEnded:
                self.stop()
            else:
                return
            for folder in FOLDERS:
                shutil.rmtree(self.base / folder, ignore_errors=True)
        self._start()

    def _start(self) -> None:
        base = self.base
        for folder in (*FOLDERS, *(f"spool/{name}" for name in self.nodes)):
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "hosts").touch()
        self._machines[HEAD] = head = self._machine(HEAD)
        if isinstance(head, machines.Isolated):
            self._network = Network(head)
            head.call("mount", "-t", "tmpfs", "tmpfs", str(base / "database"))
        self._site = site = self._plan()
        self._write()
        munged = ["munged", "--foreground", "--force", "--num-threads=4", f"--key-file={base}/munge/key"]
        munged += [f"--{kind}-file={base}/munge/{kind}" for kind in ("pid", "log", "seed")]
        self._daemon("munged", *munged, f"--socket={site.munge_socket}")
        for node in site.nodes:
            self._boot(node)
        self._wait("munged", site.munge_socket.is_socket)
        site.database_socket.unlink(missing_ok=True)
        self._daemon(
            "mariadbd", "sh", "-ec", DATABASE, "database", str(site.database), f"--defaults-file={base}/my.cnf"
        )
        self._wait("mariadbd", site.database_socket.is_socket)
        # Only so does slurmdbd take the path of a socket.
        self._daemon("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(site.database_socket))
        self._wait("slurmdbd", partial(_listens, site.head.address, site.head.dbd_port))
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        self._wait("slurmctld", lambda: self.run("scontrol", "ping").returncode == 0)
        # A slurmd that finds no slurmctld tries again a second later.
        for node in site.nodes:
            self._slurmd(node)
        self._wait("nodes", lambda: set(self.states().values()) == {"idle"})

    def stop(self) -> None:
        """Ends every process, at once."""
        if self._network:
            self._network.disconnect()
        self._daemons.clear()
        while self._machines:
            self._machines.popitem()[1].kill()
        shutil.rmtree(self.base / "database")

    def resume(self, *names: str) -> None:
        """Until these nodes are idle: Slurm may take one down again for what a job has left there."""

        def idle() -> bool:
            states = self.states()
            for name in names:
                if states[name].startswith(("down", "drain")):  # if it is back by now, Slurm calls this an error
                    self.run("scontrol", "update", f"nodename={name}", "state=resume")
            return all(states[name] == "idle" for name in names)

        self._wait(f"nodes that are resumed: {', '.join(names)}", idle, 300)

    def forget_lost_gpus(self) -> None:
        """Slurm 22.05 counts GPUs of a job whose first node could not be reached as taken, after its end, until now."""
        assert self.run("scontrol", "reconfigure").returncode == 0
        self._wait("free GPUs", lambda: "AllocTRES=gres" not in self.run("scontrol", "show", "nodes").stdout)

    def kill_node(self, name: str) -> None:
        """Power off: every process of the node is gone. It takes Slurm half a minute to notice; `set_node` tells it."""
        self._machines.pop(name).kill()
        self._broken.discard(name)

    def start_node(self, name: str) -> None:
        """Power on, after `kill_node`, until Slurm can reach it: one that was soon back never was down to Slurm."""
        node = next(node for node in self._site.nodes if node.name == name)
        self._boot(node)
        self._slurmd(node)
        self._wait(f"slurmd of {name}", partial(_listens, node.address, node.port))

    def cut(self, name: str) -> None:
        """Pulls the node's network cable; its processes go on. Isolated clusters only."""
        self._isolated(name).ip("link set eth0 down\n")
        self._broken.add(name)

    def mend(self, name: str) -> None:
        """Plugs it in again."""
        self._isolated(name).ip("link set eth0 up\n")
        self._broken.discard(name)

    def hide(self, name: str, folder: Path) -> None:
        """Puts an empty folder in a folder's place on this node, until `clear`. Isolated clusters only."""
        self._isolated(name).call("mount", "-t", "tmpfs", "tmpfs", str(folder))
        self._broken.add(name)

    def processes(self, *names: str) -> dict[int, str]:
        """What jobs have running on these nodes, or on any: command lines by the pids they have here."""
        found = {}
        for name in names or self.nodes:
            if name in self._machines:  # not where the power is off
                found.update(self._machines[name].guests())
        return found

    def clear(self) -> list[str]:
        """Back to idle nodes and no jobs. Returns what it found: jobs, and processes that outlived theirs."""
        # What ran on a node without network is not the jobs' fault: nobody could tell it to end.
        for name in sorted(self._broken):
            self.kill_node(name)
        for name in self.nodes:
            if name not in self._machines:
                self.start_node(name)
        left = [str(job) for job in self.jobs() if job.state != "COMPLETING"]
        self.cancel_all()
        self._wait("end of the jobs", lambda: not self.jobs())
        until = time.monotonic() + 3
        while (strays := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.resume(*self.nodes)
        return [*left, *strays.values()]

    def _machine(self, host: str) -> machines.Machine:
        return machines.Isolated(host, self.base / "hosts") if self.isolated else machines.Plain()

    def _isolated(self, name: str) -> machines.Isolated:
        machine = self._machines[name]
        assert isinstance(machine, machines.Isolated), "without root, nodes have no network of their own"
        return machine

    def _plan(self) -> Site:
        partitions = [partition for partition in self._partitions for _ in partition.node_names]
        if self._network:
            head = Head(host=HEAD, address=self._network.head, ctld_port=6817, dbd_port=6819)
            hosts = [(name, self._network.address(number), 6818) for number, name in enumerate(self.nodes, 11)]
        else:
            ctld_port, dbd_port, *ports = _free_ports(2 + len(self.nodes))
            here = socket.gethostname().partition(".")[0]
            head = Head(host=here, address="127.0.0.1", ctld_port=ctld_port, dbd_port=dbd_port)
            hosts = [("localhost", "127.0.0.1", port) for port in ports]
        nodes = tuple(
            Node(name=name, host=host, address=address, port=port, partition=partition)
            for name, partition, (host, address, port) in zip(self.nodes, partitions, hosts, strict=True)
        )
        # Job ids of the last cluster would be those of other jobs in people's folders.
        first_job = time.time_ns() // 1_000_000 % 60_000_000 + 1
        return Site(
            base=self.base,
            user=self._user,
            first_job=first_job,
            head=head,
            partitions=self._partitions,
            nodes=nodes,
            pyxis=self._pyxis,
        )

    def _write(self) -> None:
        for path, text in configuration.files(self._site).items():
            path.touch(mode=0o644 if path in configuration.public(self._site) else 0o600)
            path.write_text(text)
        if self._network:
            hosts = configuration.hosts(self._site, socket.gethostname(), self._network.login)
            (self.base / "hosts").write_text(hosts)
        key = self.base / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for node in self._site.nodes:
            folder = configuration.devices(self._site, node)
            folder.mkdir(parents=True)
            for index in range(node.partition.gpus):
                (folder / f"nvidia{index}").symlink_to("/dev/null")

    def _boot(self, node: Node) -> None:
        self._machines[node.name] = machine = self._machine(node.host)
        if self._network:
            assert isinstance(machine, machines.Isolated)
            self._network.connect(machine, node.address)

    def _slurmd(self, node: Node) -> None:
        log = self._site.logs / f"slurmd-{node.name}.out"
        self._machines[node.name].spawn(["slurmd", "-D", "-N", node.name], log, self.env)

    def _daemon(self, name: str, *argv: str, **environment: str) -> None:
        log = self._site.logs / f"{name}.out"
        self._daemons[name] = self._machines[HEAD].spawn(argv, log, self.env | environment)

    def _wait(self, what: str, condition: Callable[[], bool], seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while not condition():
            if ended := [name for name, daemon in self._daemons.items() if daemon.poll() is not None]:
                raise DaemonEnded(f"{what}: {', '.join(ended)} ended\n{self.log_tail()}")
            if time.monotonic() > until:
                raise ClusterError(f"{what}: not within {seconds} s\n{self.log_tail()}")
            time.sleep(0.01)


def _listens(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports
