"""What the test cluster is made of, and the files that say so to Slurm, munge and MariaDB. Nothing here acts.

Keys are those of slurm.conf(5), gres.conf(5), slurmdbd.conf(5) of Slurm 22.05 (Debian 12) and later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GRACE_S = 4
"""Seconds between the warning of a preempted job and its end."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Equal nodes; they are named `<partition>-001` and so on."""

    name: str
    count: int
    gpu: str
    gpus: int = 4
    cpus: int = 64
    memory_mb: int = 256_000

    @property
    def node_names(self) -> list[str]:
        return [f"{self.name}-{index:03d}" for index in range(1, self.count + 1)]


HGX_AND_GPU2 = (
    Partition(name="hgx", count=1, gpu="a100"),
    Partition(name="gpu2", count=7, gpu="a10"),
)
SCAVENGE = "scavenge"
"""The partition of all nodes whose jobs give way to those of any other."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """`host` is what `hostname` says there; `name` what Slurm calls it."""

    name: str
    host: str
    address: str
    port: int
    partition: Partition


@dataclass(frozen=True, kw_only=True)
class Head:
    """The machine of slurmctld and slurmdbd."""

    host: str
    address: str
    ctld_port: int
    dbd_port: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """One cluster; everything it writes lies in `base`."""

    base: Path
    user: str
    first_job: int
    head: Head
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    pyxis: Path | None
    """Slurm's plugin for containers; the tests' double needs none."""

    @property
    def munge_socket(self) -> Path:
        return self.base / "munge" / "socket"

    @property
    def database(self) -> Path:
        return self.base / "database"

    @property
    def database_socket(self) -> Path:
        return self.base / "database.socket"

    @property
    def logs(self) -> Path:
        return self.base / "log"

    @property
    def slurm_conf(self) -> Path:
        return self.base / "slurm.conf"


def devices(site: Site, node: Node) -> Path:
    """The folder of the stand-ins for the node's /dev/nvidia0 and so on."""
    return site.base / "devices" / node.name


def files(site: Site) -> dict[Path, str]:
    """Every file of configuration, by its path. slurmdbd wants its own to be unreadable to others."""
    return {
        site.slurm_conf: slurm_conf(site),
        site.base / "gres.conf": gres_conf(site),
        site.base / "plugstack.conf": f"required {site.pyxis} runtime_path={site.base}/pyxis\n" if site.pyxis else "",
        site.base / "slurmdbd.conf": slurmdbd_conf(site),
        site.base / "my.cnf": my_cnf(site),
    }


def public(site: Site) -> set[Path]:
    """Files that every user's commands read."""
    return {site.slurm_conf, site.base / "plugstack.conf"}


def hosts(site: Site, login: str, login_address: str) -> str:
    """/etc/hosts of every machine; `login` is the host where the tests run."""
    lines = ["127.0.0.1 localhost", f"{login_address} {login}", f"{site.head.address} {site.head.host}"]
    return "\n".join([*lines, *(f"{node.address} {node.host}" for node in site.nodes), ""])


def slurm_conf(site: Site) -> str:
    base, head = site.base, site.head
    gpus = ",".join(f"gres/gpu:{gpu}" for gpu in sorted({partition.gpu for partition in site.partitions}))
    lines = [
        "ClusterName=tdpp",
        f"SlurmctldHost={head.host}({head.address})",
        f"SlurmctldPort={head.ctld_port}",
        f"SlurmUser={site.user}",
        f"SlurmdUser={site.user}",
        # A requeued job is held back until its credential has expired: 120 s, where nothing is said.
        f"AuthInfo=socket={site.munge_socket},cred_expire=5",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={head.address}",
        f"AccountingStoragePort={head.dbd_port}",
        # The connection to slurmdbd does not read AuthInfo: its munge socket is named here.
        f"AccountingStoragePass={site.munge_socket}",
        f"AccountingStorageTRES=gres/gpu,{gpus}",
        "JobAcctGatherType=jobacct_gather/linux",
        f"FirstJobId={site.first_job}",
        f"StateSaveLocation={base}/state",
        f"SlurmdSpoolDir={base}/spool/%n",
        f"SlurmctldPidFile={base}/slurmctld.pid",
        f"SlurmdPidFile={base}/slurmd-%n.pid",
        f"SlurmctldLogFile={site.logs}/slurmctld.log",
        f"SlurmdLogFile={site.logs}/slurmd-%n.log",
        f"PlugStackConfig={base}/plugstack.conf",
        "MailProg=/bin/true",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "ProctrackType=proctrack/linuxproc",
        # The nodes claim processors and memory that this machine has not.
        "TaskPlugin=task/none",
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # A job that does not say how much memory it needs would take the whole node.
        "DefMemPerCPU=1000",
        "GresTypes=gpu",
        "ReturnToService=1",
        "InactiveLimit=0",
        "OverTimeLimit=0",
        # What is to make room is asked anew only after the sum of the two; 10 s is what messages have otherwise.
        "KillWait=2",
        "MessageTimeout=4",
        "UnkillableStepTimeout=30",
        # A node is down when it has said nothing for so long; on a busy machine one that is well is silent for 10 s.
        "SlurmdTimeout=20",
        "JobRequeue=1",
        "SchedulerType=sched/backfill",
        # Heterogeneous jobs start through backfill alone, which looks every 30 s where nothing is said.
        "SchedulerParameters=bf_interval=1,bf_resolution=1,bf_hetjob_immediate,sched_interval=1,batch_sched_delay=0",
        "PriorityType=priority/basic",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SlurmctldParameters=preempt_send_user_signal",
    ]
    for node in site.nodes:
        partition = node.partition
        lines.append(
            f"NodeName={node.name} NodeHostname={node.host} NodeAddr={node.address} Port={node.port}"
            f" Sockets=1 CoresPerSocket={partition.cpus} ThreadsPerCore=1 RealMemory={partition.memory_mb}"
            f" Gres=gpu:{partition.gpu}:{partition.gpus} Feature={partition.gpu} State=UNKNOWN"
        )
    times = "DefaultTime=10 MaxTime=INFINITE"
    for partition in site.partitions:
        default = "YES" if partition is site.partitions[-1] else "NO"
        names = ",".join(partition.node_names)
        lines.append(
            f"PartitionName={partition.name} Nodes={names} Default={default} PriorityTier=10 PreemptMode=OFF {times}"
        )
    lines.append(f"PartitionName={SCAVENGE} Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} {times}")
    return "\n".join([*lines, ""])


def gres_conf(site: Site) -> str:
    """Without `File` nodes are invalid; without the flag CUDA_VISIBLE_DEVICES is not set."""
    return "AutoDetect=off\n" + "".join(
        f"NodeName={node.name} Name=gpu Type={node.partition.gpu}"
        f" File={devices(site, node)}/nvidia[0-{node.partition.gpus - 1}] Flags=nvidia_gpu_env\n"
        for node in site.nodes
    )


def slurmdbd_conf(site: Site) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={site.munge_socket}
DbdHost={site.head.host}
DbdAddr={site.head.address}
DbdPort={site.head.dbd_port}
SlurmUser={site.user}
LogFile={site.logs}/slurmdbd.log
PidFile={site.base}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def my_cnf(site: Site) -> str:
    """A private MariaDB that starts on an empty folder: without privileges there is nothing to install first.

    Files in `tmpdir` are named by the process's number, which is the same in every machine with a PID namespace.
    """
    return f"""\
[mysqld]
user={site.user}
datadir={site.database}/data
tmpdir={site.database}/tmp
socket={site.database_socket}
pid-file={site.base}/mariadbd.pid
log-error={site.logs}/mariadbd.log
skip-networking
skip-grant-tables
skip-name-resolve
skip-log-bin
performance_schema=off
innodb_flush_method=nosync
innodb_flush_log_at_trx_commit=0
innodb_doublewrite=0
innodb_use_native_aio=0
innodb_buffer_pool_size=64M
innodb_log_file_size=4M
innodb_file_per_table=0
innodb_data_file_path=ibdata1:4M:autoextend
innodb_autoextend_increment=1
innodb_lock_wait_timeout=900
"""
