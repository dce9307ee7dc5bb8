"""What a cluster consists of: kinds of GPU, groups of nodes, their links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, reworded
from conf.reading.own_folders import is_file
from conf.schema.values import links, ranges, sbatch
from conf.schema.values.ranges import MISSING, config
from conf.schema.values.topology import Leaf, uplinks
from conf.visible import without_passwords
from megatron_ext.contract.keys import Range, from_0, option, positive
from megatron_ext.contract.worker import NODE_RANK, START, TOKEN

Variables = Mapping[str, str]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASS|PASSWD|PASSWORD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE|AUTH)_?KEY)(?:_|$)",
    re.IGNORECASE,
)
"""Names of variables whose values nobody else may see: WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY."""

OWN = (TOKEN, START, NODE_RANK)
"""What tdpp itself gives to a worker."""


def check(of_all: Variables, of_groups: Mapping[str, Variables], names_of_shell: Sequence[str]) -> None:
    """Raises ConfigError for a variable that cannot be given, or not like that."""
    for key, name, value in _given(of_all, of_groups):
        _require_name(key, name)
        if "\0" in value:
            raise ConfigError(f"{key}={value!r} contains a zero byte, which no variable can hold; remove it")
        if _SECRET.search(name) or without_passwords(value) != value:
            what = f"{name} looks like a secret" if _SECRET.search(name) else "it has a password"
            raise ConfigError(
                f"{key}: its value would be written to the run's files, pages and job, where others can read it, and "
                f"{what}; export {name} in your shell and give cluster.environment_from=[{name}], "
                f"which passes it on by name"
            )
    for name in names_of_shell:
        _require_name("cluster.environment_from", name)
        if name in of_all:
            raise ConfigError(
                f"cluster.environment_from names {name}, which cluster.environment also sets; keep one of them"
            )


def _given(of_all: Variables, of_groups: Mapping[str, Variables]) -> Iterator[tuple[str, str, str]]:
    """Yields each variable's key, name and value."""
    owners = {"cluster": of_all, **{f"cluster.groups.{name}": given for name, given in of_groups.items()}}
    for owner, variables in owners.items():
        for name, value in variables.items():
            yield f"{owner}.environment.{name}", name, value


def _require_name(key: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{key}: {name!r} is not a variable name; use letters, digits and '_'")
    if name in OWN:
        raise ConfigError(f"{key}: tdpp sets {name} itself; leave it out")


CPU = "CPU"
"""The name of what is no GPU, or the first word of it."""


@config
class Gpu:
    """A kind of device. Rates are dense peaks from the maker's data sheet."""

    name: str = MISSING
    """The name that the driver reports, such as NVIDIA A10; tdpp doctor compares it. A name that starts with CPU means
    no GPU."""
    memory_gib: float = option(MISSING, positive())
    """Memory a process can use, GiB."""
    fp32_tflops: float = option(MISSING, positive())
    """Peak rate in fp32, or in TF32 where the GPU has it."""
    fp16_tflops: float = option(MISSING, positive())
    """Peak rate in fp16 with fp32 accumulation."""
    bf16_tflops: float = option(MISSING, positive())
    """Peak rate in bf16 with fp32 accumulation."""
    memory_gb_per_s: float = option(MISSING, positive())
    """Memory bandwidth."""
    host_gb_per_s: float = option(12.0, positive())
    """Bandwidth between it and its node's memory, each way, which parallel.offload needs: about 12 GB/s with PCIe 3.0
    x16, 24 with 4.0, 48 with 5.0."""
    watts: float | None = option(None, positive())
    """Power that it draws while it trains, by which searches for little energy (pareto=energy) choose: the board power
    of the data sheet, or what the page of a run measured."""
    profile: str | None = None
    """Its measured profile, if there is one: a name or the path of a .yaml file."""

    def __post_init__(self) -> None:
        if self.profile is not None and is_file(self.profile):  # a run may be looked at from another folder
            object.__setattr__(self, "profile", str(Path(self.profile).absolute()))

    @property
    def is_cpu(self) -> bool:
        """Whether it is no GPU, but a processor's core."""
        return self.name.split(" ")[0] == CPU

    def is_called(self, found: str) -> bool:
        """Whether its driver may call it so: A100-40GB is NVIDIA A100-SXM4-40GB there."""
        ours, theirs = (set(re.findall(r"[a-z]+|\d+", name.lower())) for name in (self.name, found))
        return ours <= theirs


@config
class NodeGroup:
    """Nodes of one kind."""

    count: int = option(1, Range(1, ranges.MOST_NODES))
    """Number of nodes in the group."""
    gpus_per_node: int | None = option(None, Range(1, 1024))
    """Ranks per node. null, for a cluster of one node: as many as the plan needs."""
    gpu: str = MISSING
    """A key of `cluster.gpus`."""
    partition: str | None = None
    """Slurm partition; null uses the default one."""
    gres: str | None = None
    """Slurm's --gres for the GPUs of a node, such as gpu:a10:8; null requests none."""
    cpus_per_task: int | None = option(None, Range(1, 2**16))
    """Cores for a node's agent and its ranks; null uses Slurm's default."""
    mem: str | None = None
    """Slurm's --mem per node, such as 200G; 0 is all memory, null uses the partition's default."""
    account: str | None = None
    """Slurm account; null uses your default one."""
    qos: str | None = None
    """Slurm's quality of service; null uses the default one."""
    constraint: str | None = None
    """Slurm's --constraint: required features of the nodes."""
    time_min: int | None = option(None, Range(1, 10**7))
    """Slurm time limit in minutes; null uses the partition's."""
    intra_gbit_per_s: float = option(MISSING, positive())
    """Bandwidth between two GPUs of a node."""
    intra_latency_us: float = option(MISSING, from_0())
    """Latency of a message between two GPUs of a node."""
    inter_gbit_per_s: float = option(MISSING, positive())
    """Bandwidth out of a node, shared by its ranks."""
    inter_latency_us: float = option(MISSING, from_0())
    """Latency of a message to another node."""
    nics: int = option(1, Range(1, 64))
    """Network cards of a node that GPUs use, which share `inter_gbit_per_s` equally: a message between two GPUs goes
    through one of them."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the ranks of these nodes; they override `cluster.environment`. For example NCCL_IB_HCA."""
    sbatch: dict[str, str | None] = field(default_factory=dict)
    """More options of sbatch for these nodes; they override `cluster.sbatch`. Null takes one of those back."""
    price_per_hour: float | None = option(None, from_0())
    """Price of one node per hour, in US dollars."""
    failures_per_day: float | None = option(None, from_0())
    """How often one of these nodes ends a run, in a day of training: it fails, or is a spot node that is taken back.
    With it tdpp search pareto= counts what that takes, and train.save_interval=auto follows it. null: as often as
    usual, 6.5 times in a thousand days; a run counts its own history, too."""


@config
class Cluster:
    name: str = MISSING
    """The name of the cluster on pages and in messages."""
    gpus: dict[str, Gpu] = field(default_factory=dict)
    """Kinds of GPU, each under a name that you choose; gpu@cluster.gpus.NAME=a10 uses a shipped one."""
    groups: dict[str, NodeGroup] = field(default_factory=dict)
    """Groups of identical nodes, each under a name that you choose."""
    links: dict[str, Any] = field(default_factory=dict)
    """Links between pairs of groups that differ from the groups' own figures: a table with the sending group as the row
    and the receiving group as the column (`conf.schema.values.links`)."""
    links_file: str | None = None
    """A YAML file with that table, as `tdpp profile` writes it. After reading, the table is in `links`."""
    restart_s: float = option(120.0, from_0())
    """Seconds from a failure until the run has its nodes again and is ready to load a checkpoint, for failures_per_day.
    """
    checkpoint_gb_per_s: float = option(1.0, positive())
    """What the ranks together write or read of a checkpoint, for failures_per_day."""
    topology: dict[str, Leaf] = field(default_factory=dict)
    """Leaf switches, each under a name that you choose, whose uplinks are slower than what their nodes send together;
    tdpp search and predictions count how many ranks share them."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every rank, for example NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME."""
    environment_from: list[str] = field(default_factory=list)
    """Names of variables that every rank gets with their values in the launching shell. No file stores the values."""
    sbatch: dict[str, str | None] = field(default_factory=dict)
    """More options of sbatch for all jobs, by their long names, such as {reservation: summer, licenses: 'matlab:1'}. An
    option without a value has an empty one: {exclusive: ''}."""
    exclude: list[str] = field(default_factory=list)
    """Nodes of Slurm that no job is to get, such as gpu07 or "gpu[03-05]"; `auto`: those that are not healthy by
    `tdpp nodes`."""
    carbon_g_per_kwh: float | None = option(None, from_0(10_000.0))
    """Grams of CO2 for a kWh, by which a run's page turns its energy into carbon."""
    scratch: str = "/tmp"
    """A folder on each node's own disk."""

    def __post_init__(self) -> None:
        ranges.check("cluster", self)
        _check_gpus(self)
        _check_groups(self)
        _read_links(self)
        uplinks(self.topology, self.groups)
        groups = {name: group.environment for name, group in self.groups.items()}
        check(self.environment, groups, self.environment_from)
        sbatch.check("cluster.sbatch", self.sbatch)
        sbatch.check_hosts("cluster.exclude", self.exclude)


def _read_links(cluster: Cluster) -> None:
    if (name := cluster.links_file) is None:
        links.pairs(cluster.links, cluster.groups)
        return
    if cluster.links:
        raise ConfigError(f"cluster.links and {links.FILE}={name} are both given; give only one")
    table = links.from_file(name)
    with reworded(ConfigError, f"{links.FILE}={name}: ", of=ConfigError):
        links.pairs(table, cluster.groups)
    object.__setattr__(cluster, "links", table)  # a run keeps the table, not the file's name
    object.__setattr__(cluster, "links_file", None)


def _check_gpus(cluster: Cluster) -> None:
    for name, gpu in cluster.gpus.items():
        ranges.check(f"cluster.gpus.{name}", gpu)


def _check_groups(cluster: Cluster) -> None:
    if not cluster.groups:
        raise ConfigError(f"cluster.groups of cluster {cluster.name!r} is empty: define a group, cluster.groups.<name>")
    alone = len(cluster.groups) == 1 and all(group.count == 1 for group in cluster.groups.values())
    for name, group in cluster.groups.items():
        group_key = f"cluster.groups.{name}"
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"{group_key}: {name!r} is not a valid group name; use letters, digits, '.', '_', '-'")
        if group.gpu not in cluster.gpus:
            known = ", ".join(cluster.gpus) or "nothing"
            raise ConfigError(f"{group_key}.gpu={group.gpu} is not in cluster.gpus; that has {known}")
        ranges.check(group_key, group)
        if group.gpus_per_node is None and not alone:
            raise ConfigError(
                f"{group_key}.gpus_per_node=null (as many ranks as the plan asks for) needs a cluster of one node; "
                "give the number of GPUs per node"
            )
        if group.nics > (group.gpus_per_node or group.nics):
            raise ConfigError(
                f"{group_key}.nics={group.nics} for gpus_per_node={group.gpus_per_node}: a GPU sends through one card; "
                "give at most as many as a node has GPUs"
            )
        for slurm_key in sbatch.KEYS.values():
            if isinstance(value := getattr(group, slurm_key), str):
                sbatch.check_text(f"{group_key}.{slurm_key}", value)
        sbatch.check(f"{group_key}.sbatch", group.sbatch)
