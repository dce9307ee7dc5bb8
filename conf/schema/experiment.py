"""An experiment, whole: its parts, each of which has a module of its own, and the order in which its rules are checked.

Every check raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from conf.errors import ConfigError
from conf.schema import containers
from conf.schema.adapt import Adapt, Elastic
from conf.schema.cluster import Cluster, Gpu, NodeGroup
from conf.schema.containers import Container, ContainerKind
from conf.schema.data import Augment, Corpus, Data
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, ExecutorKind, Het, Rehearse
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.profile import Notify, Profile, Tracker
from conf.schema.rules import adaptation, execution, placement, training
from conf.schema.train import Precision, Train
from conf.schema.values import ranges
from conf.schema.values.islands import naming
from conf.schema.values.partition import NodeOrder, Partition
from conf.schema.values.ranges import MISSING, config
from megatron_ext.contract.keys import Range, from_0, option
from megatron_ext.contract.parallel_config import Compress, Offload, Recompute, ReduceDtype, Schedule, Shards

__all__ = [
    "Adapt",
    "Augment",
    "Cluster",
    "Compress",
    "Container",
    "ContainerKind",
    "Corpus",
    "Data",
    "Elastic",
    "Engine",
    "EngineKind",
    "Executor",
    "ExecutorKind",
    "Experiment",
    "Gpu",
    "Het",
    "Model",
    "NodeGroup",
    "Notify",
    "Offload",
    "Parallel",
    "Precision",
    "Profile",
    "Recompute",
    "ReduceDtype",
    "Rehearse",
    "RunsMode",
    "Schedule",
    "Shards",
    "Train",
]


class RunsMode(StrEnum):
    """Who may write into a run's folder: its owner, or the folder's group too, who are then trusted like the owner."""

    owner = "owner"
    group = "group"


@config
class Experiment:
    """One run, whole.

    `OmegaConf.to_object` makes it; making it checks every rule.
    """

    name: str = "${model.name}"
    """Name of the run. Runs with the same name share the folder `<runs_dir>/<name>`."""
    runs_dir: str = "${oc.env:TDPP_RUNS_DIR,runs}"
    """The folder of all runs, at the same path on every node; the variable TDPP_RUNS_DIR sets the default."""
    runs_mode: RunsMode = RunsMode.owner
    dry_run: bool = False
    """Print what would be started and write nothing; what would prevent the start is still an error."""
    skip_existing: bool = False
    """Skip a configuration if a run of this name has succeeded with it, or is queued or running."""
    max_jobs: int | None = option(None, Range(1, 10**6))
    """Largest number of runs of a sweep at the same time; null: as many as the cluster takes."""
    confirm_gpu_hours: float = option(1000.0, from_0(1e12))
    """Ask before submitting more GPU-hours than this to Slurm: GPUs times time limit, summed over a sweep."""
    yes: bool = False
    """Submit without asking."""
    sweep_metric: str | None = None
    """The metric that a sweeper (hydra/sweeper=NAME) minimises or maximises, such as valid/loss, iteration_ms or
    cost."""
    log: list[Tracker] = field(default_factory=list)
    """Trackers that receive the metrics during the run: any of tensorboard, wandb and mlflow."""
    cluster: Cluster = MISSING
    model: Model = MISSING
    parallel: Parallel = MISSING
    container: Container = MISSING
    executor: Executor = MISSING
    train: Train = MISSING
    data: Data = MISSING
    engine: Engine = field(default_factory=Engine)
    profile: Profile = field(default_factory=Profile)
    adapt: Adapt = field(default_factory=Adapt)
    notify: Notify = field(default_factory=Notify)
    elastic: Elastic = field(default_factory=Elastic)

    def __post_init__(self) -> None:
        ranges.check("", self)
        _check_decided(self.parallel)
        _check_name(self.name)
        _check_paths(self)
        if self.sweep_metric is not None:
            execution.check_metric(self.sweep_metric, self.dry_run, self.train)
        execution.check_jobs(self.max_jobs, self.executor)
        for island, (parallel, partition) in enumerate(self.by_island):
            with naming(island if self.parallel.own_plans else None):
                placement.check_partition(partition, parallel, self.model)
        order = self.node_order
        placement.check_nodes(order, self.cluster, self.executor)
        ranks = self.ranks_per_node()
        placement.check_ranks(self.parallel, order, self.cluster, self.executor, ranks, self._keeps_rules)
        training.check_measured(self.model, self.parallel, self.engine, self.executor)
        training.check_recompute(self.model, self.parallel, self.layers_by_stage)
        training.check_offload(self.parallel, self.train)
        training.check_zero(self.parallel, self.adapt, self.elastic)
        training.check_images(self.model, self.data, self.parallel)
        training.check_bucketing(self.model, self.data)
        training.check_adapters(self.model, self.train)
        training.check_packing(self.model, self.data, self.engine)
        placement.check_tensor_groups(self.parallel, self.model, self.cluster, order.groups, ranks)
        training.check_compile(self.train, self.parallel)
        training.check_overlap(self.parallel, self.train, self.engine, self.adapt)
        placement.check_islands(self.parallel, self.train, self.adapt, self.elastic, self.engine, self.executor)
        adaptation.check_gpu_streams(self.parallel, self.adapt, self.train, self.engine)
        if self.parallel.stream is not None:
            placement.check_pipedream(self.partition, self.model)
        training.check(self.train, self.model, self.data, self.executor)
        self.price_per_hour()
        if self.sweep_metric == "cost":
            execution.check_cost(self.unpriced)
        containers.check_environment(self.container.kind, self.cluster, order.groups)
        if self.engine.kind is EngineKind.megatron_lm:
            execution.check_megatron_lm(self.engine, self.model, self.parallel, self.train, self.executor.rehearse)
        execution.check_engine(
            self.engine,
            self.model,
            self.parallel,
            self.train,
            self.adapt,
            self.elastic,
            self.overlaps_optimizer,
            self.executor,
        )
        execution.check_rehearsal(self.executor)
        execution.check_time(self.executor, self.cluster, order.groups)
        adaptation.check(self.adapt, self.parallel, self.train, self.engine, self.executor)
        execution.check_notify(self.notify, self.executor)
        adaptation.check_elastic(
            self.elastic,
            self.parallel,
            self.train,
            self.adapt,
            self.engine,
            self.executor,
            ranks,
            len(set(order.groups)),
            self.unpriced,
        )

    def _keeps_rules(self, **changes: Any) -> bool:
        """Whether it still does with these changes of its plan."""
        try:
            replace(self, parallel=replace(self.parallel, **changes))
        except ConfigError:
            return False
        return True

    @property
    def partition(self) -> Partition:
        """Layers per virtual stage, as asked for or even; of islands that differ, in the one with the most stages."""
        return max((partition for _, partition in self.by_island), key=lambda one: len(one.layers))

    @property
    def by_island(self) -> list[tuple[Parallel, Partition]]:
        """The plan and the layers of each island that has its own; else those of the run."""
        return [
            (
                own,
                Partition.even(self.model.counted, own.virtual_stages)
                if own.partition is None
                else Partition.parse(own.partition),
            )
            for own in self.parallel.own_plans or (self.parallel,)
        ]

    @property
    def layers_by_stage(self) -> list[int]:
        """Layers of each stage, in all its chunks; of islands with their own plans, one island after another."""
        return [
            sum(partition.layers[stage :: parallel.pipeline])
            for parallel, partition in self.by_island
            for stage in range(parallel.pipeline)
        ]

    @property
    def overlaps_optimizer(self) -> bool:
        """Whether weights are updated while later gradients are still summed."""
        return training.overlaps(self.parallel, self.train, self.engine, self.adapt)

    @property
    def node_order(self) -> NodeOrder:
        if self.parallel.node_order is None:
            groups = self.cluster.groups
            hosts = len(self.executor.reached)
            counts = dict.fromkeys(groups, hosts) if hosts and len(groups) == 1 else None
            return NodeOrder.of(counts or {name: group.count for name, group in groups.items()})
        return NodeOrder.parse(self.parallel.node_order)

    @property
    def unpriced(self) -> list[str]:
        """Its node groups whose price is not known."""
        names = dict.fromkeys(self.node_order.groups)
        return [name for name in names if self.cluster.groups[name].price_per_hour is None]

    def on_fixed_nodes(self) -> Experiment:
        """The same as a run that ends with any of its nodes."""
        return replace(self, elastic=Elastic(), train=replace(self.train, save_memory=None))

    def price_per_hour(self) -> float | None:
        """The price of all its nodes together, in dollars; None where the price of one is not known. Raises
        ConfigError: `train.max_cost` needs it."""
        if unpriced := self.unpriced:
            if self.train.max_cost is None:
                return None
            raise ConfigError(
                f"train.max_cost={self.train.max_cost:g} ends a run by the price of its nodes, but "
                f"cluster.groups.{unpriced[0]}.price_per_hour is not set; give it, in dollars per node"
            )
        return sum(self.cluster.groups[name].price_per_hour or 0.0 for name in self.node_order.groups)

    def ranks_per_node(self) -> tuple[int, ...]:
        """Ranks of each node, by node rank."""
        if hosts := self.executor.reached:
            return tuple(host.ranks for host in hosts)
        groups = [self.cluster.groups[name] for name in self.node_order.groups]
        return tuple(
            self.parallel.world_size if group.gpus_per_node is None else group.gpus_per_node for group in groups
        )


def _check_decided(parallel: Parallel) -> None:
    for key in parallel.undecided:
        raise ConfigError(
            f"parallel.{key}=auto: only 'tdpp launch' and 'tdpp doctor' choose the value; give one here, such as "
            f"parallel.{key}={'1' if key == 'micro_batch_size' else 'null'}"
        )


MOST_NAME_BYTES = 255
"""That file systems of Linux take."""


def _check_name(name: str) -> None:
    if (
        not name.isprintable()
        or not name.strip()
        or name.startswith((".", "-"))
        or "/" in name
        or name in ("by_job", "sweeps")
    ):
        raise ConfigError(
            f"name={name!r} cannot name a run folder: it must not be empty, start with '.' or '-', contain '/' or "
            f"control characters, or be 'by_job' or 'sweeps'"
        )
    if (size := len(name.encode())) > MOST_NAME_BYTES:
        raise ConfigError(
            f"name={name[:40]}… has {size} bytes, but a folder's name at most {MOST_NAME_BYTES}; shorten it"
        )


def _check_paths(experiment: Experiment) -> None:
    """Refuses empty paths: nobody can be sure whether one means the current folder, or nothing."""
    container, data, engine = experiment.container, experiment.data, experiment.engine
    given = {
        "runs_dir": experiment.runs_dir,
        "cluster.scratch": experiment.cluster.scratch,
        "container.image": container.image,
        "container.image_dir": container.image_dir,
        "parallel.schedule_file": experiment.parallel.schedule_file,
        "train.load": experiment.train.load,
        "engine.checkout": engine.checkout,
        "engine.vocab_file": engine.vocab_file,
        "engine.merge_file": engine.merge_file,
        "data.prefix": data.prefix,
        "data.cache": data.cache,
        **{f"data.blend[{number}].prefix": corpus.prefix for number, corpus in enumerate(data.blend)},
    }
    for key, path in given.items():
        if path is not None and (not path.strip() or "\0" in path):
            raise ConfigError(f"{key}={path!r} is empty; give a path, or leave the key out")
