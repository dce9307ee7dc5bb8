"""An experiment, whole, and the rules that join its parts, each of which has a module of its own.

Every `_check_…` raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import (
    adapt,
    containers,
    elastic,
    families,
    megatron_lm,
    overlapping,
    placement,
    ranges,
    streams,
    tensor_groups,
)
from conf.schema.adapt import Adapt
from conf.schema.cluster import Cluster, Gpu, NodeGroup
from conf.schema.config_class import config
from conf.schema.containers import Container, ContainerKind
from conf.schema.data import Augment, Corpus, Data
from conf.schema.elastic import Elastic
from conf.schema.executor import Executor, ExecutorKind, Het, Rehearse
from conf.schema.megatron_lm import Engine, EngineKind
from conf.schema.model import Model
from conf.schema.notify import Notify
from conf.schema.parallel import Parallel, Recompute, Schedule, check_data_parallel
from conf.schema.partition import NodeOrder, Partition
from conf.schema.trackers import Tracker
from conf.schema.train import Precision, Train, check_metrics
from megatron_ext.contract.models.model import BERT, NEXT_TOKEN, T5

__all__ = [
    "Adapt",
    "Augment",
    "Cluster",
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
    "Parallel",
    "Precision",
    "Profile",
    "Recompute",
    "Rehearse",
    "RunsMode",
    "Schedule",
    "Train",
]


SPLIT_BY_WEIGHT = (*NEXT_TOKEN, BERT, T5)
"""Whose data are documents that `data.split` shares out."""


class RunsMode(StrEnum):
    """Who may write into a run's folder: its owner, or the folder's group too, who are then trusted like the owner."""

    owner = "owner"
    group = "group"


@config
class Profile:
    timeline: bool = True
    """Record when each rank does what (events/rank-*.bin)."""
    nsys: bool = False
    """Run the ranks of every node under Nsight Systems, which must be installed on the node or in its container."""
    ncu: bool = False
    """The same under Nsight Compute, which runs every kernel except NCCL's several times to measure it."""
    trace_iteration: int | None = None
    """The iteration for which the first rank of each stage writes a torch profiler trace (traces/) for Perfetto; with
    nsys on GPUs, Nsight Systems captures only this iteration instead; null: none."""
    gpu_interval_s: int = 10
    """Seconds between two readings of the GPUs (nodes/<node>.gpu); 0: none."""

    def __post_init__(self) -> None:
        ranges.check("profile", self)
        _check_profilers(self)


def _check_profilers(profile: Profile) -> None:
    if profile.nsys and profile.ncu:
        raise ConfigError(
            "profile.nsys=true and profile.ncu=true: a process runs under one profiler at a time; set one to false"
        )
    if profile.ncu and profile.trace_iteration is not None:
        raise ConfigError(
            f"profile.trace_iteration={profile.trace_iteration} must be null with profile.ncu=true, under which torch "
            "traces nothing; set train.iterations to profile few iterations"
        )


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
    max_jobs: int | None = None
    """Largest number of runs of a sweep at the same time; null: as many as the cluster takes."""
    confirm_gpu_hours: float = 1000.0
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
        _check_sweep(self)
        placement.check_partition(self.partition, self.parallel, self.model)
        order = self.node_order
        placement.check_nodes(order, self.cluster, self.executor)
        ranks = self.ranks_per_node()
        placement.check_ranks(self.parallel, order, self.cluster, self.executor, ranks, self._keeps_rules)
        families.check_measured(self.model, self.parallel, self.engine, self.executor)
        families.check_recompute(self.model, self.parallel)
        families.check_images(self.model, self.data, self.parallel)
        families.check_bucketing(self.model, self.data)
        tensor_groups.check(self.parallel, self.model, self.cluster, self.node_order.groups, self.ranks_per_node())
        families.check_compile(self.train, self.parallel)
        overlapping.check(self.parallel, self.train, self.engine, self.adapt)
        _check_gpu_streams(self)
        if self.parallel.stream is not None:
            streams.check(self.partition, self.model)
        _check_evaluation(self)
        self.price_per_hour()
        containers.check_environment(self.container.kind, self.cluster, self.node_order.groups)
        if self.engine.kind is EngineKind.megatron_lm:
            groups = self.node_order.groups
            megatron_lm.can_run(self.model, self.parallel, self.train, self.cluster, groups, self.executor.rehearse)
            _check_log(self.log)
        _check_rehearsal(self)
        _check_time(self)
        _check_adapt(self)
        _check_notify(self)
        _check_elastic(self)

    def _keeps_rules(self, **changes: Any) -> bool:
        """Whether it still does with these changes of its plan."""
        try:
            replace(self, parallel=replace(self.parallel, **changes))
        except ConfigError:
            return False
        return True

    @property
    def partition(self) -> Partition:
        """Layers per virtual stage, as asked for or even."""
        if self.parallel.partition is None:
            return Partition.even(self.model.counted, self.parallel.virtual_stages)
        return Partition.parse(self.parallel.partition)

    @property
    def overlaps_optimizer(self) -> bool:
        """Whether weights are updated while later gradients are still summed."""
        return overlapping.overlaps(self.parallel, self.train, self.engine, self.adapt)

    @property
    def node_order(self) -> NodeOrder:
        if self.parallel.node_order is None:
            groups = self.cluster.groups
            hosts = len(self.executor.reached)
            counts = dict.fromkeys(groups, hosts) if hosts and len(groups) == 1 else None
            return NodeOrder.of(counts or {name: group.count for name, group in groups.items()})
        return NodeOrder.parse(self.parallel.node_order)

    def price_per_hour(self) -> float | None:
        """Of all its nodes together, in dollars; None where the price of one is not known.

        Raises:
            ConfigError: `train.max_cost` needs it.
        """
        groups = self.node_order.groups
        for name in dict.fromkeys(groups):
            if self.cluster.groups[name].price_per_hour is None:
                if self.train.max_cost is None:
                    return None
                raise ConfigError(
                    f"train.max_cost={self.train.max_cost:g} ends a run by the price of its nodes, but "
                    f"cluster.groups.{name}.price_per_hour is not set; give it, in dollars per node"
                )
        return sum(self.cluster.groups[name].price_per_hour or 0.0 for name in groups)

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


def _check_paths(experiment: Experiment) -> None:
    """Of what an empty one would mean, nobody can be sure: the current folder, or nothing."""
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


def _check_sweep(experiment: Experiment) -> None:
    if experiment.sweep_metric is not None:
        _check_sweep_metric(experiment, experiment.sweep_metric)
    if experiment.max_jobs is None:
        return
    if experiment.executor.kind != "slurm" and not experiment.executor.wait:
        where = "this machine" if experiment.executor.kind == "local" else "the hosts"
        raise ConfigError(
            f"max_jobs={experiment.max_jobs} has no effect with executor.wait=false, which starts all runs on {where} "
            "at once; use executor.wait=true, which runs them one after another, or max_jobs=null"
        )


def _check_sweep_metric(experiment: Experiment, metric: str) -> None:
    """That a run of this experiment gives it; its name is looked up when the run is launched."""
    if experiment.dry_run:
        raise ConfigError(f"sweep_metric={metric} needs a run, and dry_run=true starts none; leave one of the two out")
    if experiment.engine.kind is EngineKind.megatron_lm:
        raise ConfigError(
            f"sweep_metric={metric} is read from metrics.jsonl, which a run with engine.kind=megatron_lm does not "
            f"write; use engine=tdpp, or leave it out"
        )
    if metric.startswith("valid/") and experiment.train.eval_interval is None:
        raise ConfigError(f"sweep_metric={metric} needs evaluations; set train.eval_interval, in iterations")
    if metric == "cost" and experiment.price_per_hour() is None:
        groups = dict.fromkeys(experiment.node_order.groups)
        unknown = [name for name in groups if experiment.cluster.groups[name].price_per_hour is None]
        raise ConfigError(
            f"sweep_metric=cost needs the price of every node, and cluster.groups.{unknown[0]}.price_per_hour is not "
            f"set; give it, in dollars per node"
        )


def _check_log(log: list[Tracker]) -> None:
    """Of a run whose metrics are known from Megatron-LM's log alone."""
    if log:
        raise ConfigError(
            f"log={','.join(log)}: with engine.kind=megatron_lm, metrics are read from its log after the run; leave "
            f"it out, and run 'tdpp report RUN --{log[0]}' afterwards"
        )


def _check_gpu_streams(experiment: Experiment) -> None:
    streams, none = f"parallel.streams={experiment.parallel.streams}", "parallel.streams=null"
    if max(experiment.parallel.streams_of) == 1:
        if not experiment.adapt.streams:
            return
        streams, none = f"adapt.streams={experiment.adapt.streams}", "adapt.streams=[]"
        check_data_parallel(experiment.parallel, streams, none)
    for key, value, allowed in (
        ("train.compile", str(experiment.train.compile).lower(), "false"),
        ("engine.kind", str(experiment.engine.kind), str(EngineKind.tdpp)),
        ("executor.rehearse", str(experiment.executor.rehearse), str(Rehearse.none)),
    ):
        if value != allowed:
            raise ConfigError(f"{streams} cannot be combined with {key}={value}; use {key}={allowed}, or {none}")


def _check_evaluation(experiment: Experiment) -> None:
    train, family = experiment.train, experiment.model.family
    for key in ("eval_interval", "max_cost"):
        value = getattr(train, key)
        if value is not None and experiment.executor.rehearse is not Rehearse.none:
            raise ConfigError(
                f"train.{key}={value} is for training, but executor.rehearse={experiment.executor.rehearse} trains "
                f"nothing; use train.{key}=null"
            )
    if train.epochs is not None and experiment.executor.rehearse is not Rehearse.none:
        raise ConfigError(
            f"train.epochs={train.epochs} counts the samples of the data, but executor.rehearse="
            f"{experiment.executor.rehearse} reads none; use train.iterations or train.samples"
        )
    if train.eval_interval is None:
        return
    check_metrics(train, str(family))
    if family in SPLIT_BY_WEIGHT and not float(experiment.data.split.split(",")[1]):
        raise ConfigError(
            f"train.eval_interval={train.eval_interval} evaluates on the valid split, but data.split="
            f"{experiment.data.split} gives that split no documents; give it some, such as data.split=969,30,1"
        )


def _check_adapt(experiment: Experiment) -> None:
    adapt.check(experiment.adapt, experiment.parallel, experiment.train)
    executor, rule = experiment.executor, experiment.adapt.rule
    if experiment.adapt.on and experiment.engine.kind is not EngineKind.tdpp:
        changes = "adapt.rebalance=true" if experiment.adapt.rebalance else f"adapt.rule={rule}"
        raise ConfigError(
            f"engine.kind={experiment.engine.kind} cannot be combined with {changes}; use "
            f"engine.kind={EngineKind.tdpp}, or "
            "leave adapt out"
        )
    rehearsed = executor.rehearse is not Rehearse.none and rule is not adapt.Rule.none
    if rehearsed and executor.noise is None:
        raise ConfigError(
            f"executor.rehearse={executor.rehearse} computes no gradients, whose noise adapt.rule={rule} needs; give "
            f"the noise scale in samples: executor.noise=2000, \"executor.noise='500,20000'\" at the "
            "beginning and at the end, or executor.noise=FILE.csv"
        )
    if executor.noise is not None and not rehearsed:
        raise ConfigError(
            f"executor.noise={executor.noise} applies only to a rehearsal with a batch that adapts; use "
            f"executor.rehearse=virtual and adapt.rule=noise, or leave it out"
        )


def _check_notify(experiment: Experiment) -> None:
    if experiment.notify.mail is not None and experiment.executor.kind != "slurm":
        raise ConfigError(
            f"notify.mail={experiment.notify.mail} needs Slurm, which sends the mail, but "
            f"executor.kind={experiment.executor.kind}; use "
            "notify.command or notify.webhook"
        )


def _check_elastic(experiment: Experiment) -> None:
    elastic.check(experiment.elastic, experiment.parallel, experiment.train, experiment.ranks_per_node())
    for key, value, allowed in (
        ("engine.kind", str(experiment.engine.kind), str(EngineKind.tdpp)),
        ("executor.rehearse", str(experiment.executor.rehearse), str(Rehearse.none)),
    ):
        if experiment.elastic.enabled and value != allowed:
            raise ConfigError(f"{key}={value} cannot be combined with elastic.enabled=true; use {key}={allowed}")
    executor, groups = experiment.executor, dict.fromkeys(experiment.node_order.groups)
    unpriced = next((name for name in groups if experiment.cluster.groups[name].price_per_hour is None), None)
    if experiment.elastic.by is elastic.By.dollars and unpriced is not None:
        raise ConfigError(
            f"elastic.by=dollars chooses nodes by their price, but cluster.groups.{unpriced}.price_per_hour is not "
            f"set; give it, in dollars per node, or use elastic.by=time"
        )
    if experiment.elastic.by is not None and executor.kind is ExecutorKind.hosts:
        raise ConfigError(
            f"elastic.by={experiment.elastic.by} cannot be combined with executor.kind=hosts, whose machines are "
            f"named one by "
            "one; use executor=slurm or executor=local, or leave elastic.by out"
        )
    on_slurm = executor.kind is ExecutorKind.slurm
    if experiment.elastic.enabled and on_slurm and executor.het is Het.hetjob and len(groups) > 1:
        raise ConfigError(
            "executor.het=hetjob cannot be combined with elastic.enabled=true: Slurm ends a whole heterogeneous job "
            "when one "
            "part loses its nodes; use executor.het=jobs"
        )


def _check_rehearsal(experiment: Experiment) -> None:
    if experiment.executor.rehearse != "none" and experiment.executor.kind != "local":
        raise ConfigError(
            f"executor.rehearse={experiment.executor.rehearse} rehearses the plan on this machine, but "
            f"executor.kind={experiment.executor.kind}; use executor=local, or executor.rehearse=none"
        )


def _check_time(experiment: Experiment) -> None:
    """On Slurm, where the warning comes so early whatever the limit is."""
    if experiment.executor.kind != "slurm":
        return
    for name in dict.fromkeys(experiment.node_order.groups):
        limit, save_s = experiment.cluster.groups[name].time_min, experiment.executor.save_s
        if limit is not None and limit * 60 <= save_s:
            raise ConfigError(
                f"cluster.groups.{name}.time_min={limit} is not more than executor.save_s={save_s} seconds, so the "
                f"run would save and end at once; give it at least {save_s // 60 + 1} minutes, or use a smaller "
                f"executor.save_s"
            )
