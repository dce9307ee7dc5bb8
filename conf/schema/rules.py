"""The rules of a configuration, each with its message: keys, values, what does not hold, what would.

Every function returns nothing and raises `ConfigError` when its rule is broken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.partition import Partition

if TYPE_CHECKING:
    from conf.schema.experiment import Cluster, Corpus, Experiment, Parallel, Profile, Train


def divides(key: str, value: int, whole_key: str, whole: int) -> None:
    if whole % value:
        near = ", ".join(map(str, nearest_divisors(whole, value)))
        raise ConfigError(
            f"{whole_key}={whole} is not divisible by {key}={value}; nearest {key} that divide it: {near}"
        )


def nearest_divisors(whole: int, value: int) -> list[int]:
    """The largest divisor of `whole` below `value` and the smallest above, where they exist."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in divisors if d < value][-1:]
    above = [d for d in divisors if d > value][:1]
    return below + above


def gpus(cluster: Cluster) -> None:
    for name, gpu in cluster.gpus.items():
        ranges.check("cluster.gpus.*", gpu, f"cluster.gpus.{name}")


def node_groups(cluster: Cluster) -> None:
    if not cluster.groups:
        raise ConfigError(
            f"cluster.groups of cluster {cluster.name!r} is empty: give it a group, cluster.groups.<name>"
        )
    alone = len(cluster.groups) == 1 and all(group.count == 1 for group in cluster.groups.values())
    for name, group in cluster.groups.items():
        key = f"cluster.groups.{name}"
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"{key}: {name!r} is not a group name; use letters, digits, '.', '_', '-'")
        if group.gpu not in cluster.gpus:
            known = ", ".join(cluster.gpus) or "nothing"
            raise ConfigError(f"{key}.gpu={group.gpu} is not in cluster.gpus, which has: {known}")
        ranges.check("cluster.groups.*", group, key)
        if group.gpus_per_node is None and not alone:
            raise ConfigError(
                f"{key}.gpus_per_node=null (as many ranks as the plan asks for) needs a cluster of one node; "
                "give the number of GPUs per node"
            )
        for option in ("partition", "gres", "mem", "account", "qos", "constraint"):
            if (value := getattr(group, option)) is not None:
                slurm_option(f"{key}.{option}", value)


def slurm_option(key: str, value: str) -> None:
    """Slurm reads a submission script line by line: what follows a line break would be a command of the shell."""
    if not (value.strip() and value.isprintable()):
        raise ConfigError(
            f"{key}={value!r} cannot be an option of Slurm: it is empty, or holds a line break or another control "
            "character; use null to leave the option out"
        )


def batch_divides(parallel: Parallel) -> None:
    step = parallel.data * parallel.micro_batch_size
    batch = parallel.global_batch_size
    if batch % step:
        near = ", ".join(str(n) for n in (batch // step * step, (batch // step + 1) * step) if n)
        raise ConfigError(
            f"parallel.global_batch_size={batch} is not divisible by parallel.data * "
            f"parallel.micro_batch_size = {parallel.data} * {parallel.micro_batch_size} = {step}; "
            f"nearest that are: {near}"
        )


def chunks_fit(parallel: Parallel) -> None:
    """A schedule of one's own may have any number of chunks."""
    chunks, pipeline = parallel.chunks, parallel.pipeline
    interleaved = parallel.schedule == "interleaved"
    if chunks > 1 and pipeline == 1:
        raise ConfigError(
            f"parallel.chunks={chunks} needs parallel.pipeline of at least 2, not {pipeline}: one stage holds the "
            "whole model; use parallel.chunks=1"
            + (" and another parallel.schedule, such as one_f_one_b" if interleaved else "")
        )
    if parallel.schedule_file is not None:
        return
    if interleaved and chunks == 1:
        raise ConfigError(
            f"parallel.schedule=interleaved needs parallel.chunks of at least 2, not {chunks}; use parallel.chunks=2, "
            "or parallel.schedule=one_f_one_b"
        )
    if chunks > 1 and not interleaved:
        raise ConfigError(
            f"parallel.chunks={chunks} needs parallel.schedule=interleaved, not {parallel.schedule}, which has one "
            "chunk on a stage; use that, or parallel.chunks=1"
        )


def partition_fits(experiment: Experiment) -> None:
    parallel, layers = experiment.parallel, experiment.model.layers
    partition = experiment.partition
    stages, total = len(partition.layers), sum(partition.layers)
    if parallel.chunks > 1 and stages != parallel.virtual_stages:
        raise ConfigError(
            f"parallel.partition={partition} has {stages} part{'s' * (stages != 1)}, but parallel.pipeline * "
            f"parallel.chunks = {parallel.pipeline} * {parallel.chunks} = {parallel.virtual_stages}; use a partition "
            f"such as {Partition.even(layers, parallel.virtual_stages)}"
        )
    if stages != parallel.virtual_stages:
        raise ConfigError(
            f"parallel.partition={partition} has {stages} stage{'s' * (stages != 1)}, but "
            f"parallel.pipeline={parallel.pipeline}; use parallel.pipeline={stages}, or a partition such as "
            f"{Partition.even(layers, parallel.pipeline)}"
        )
    if total != layers:
        raise ConfigError(
            f"parallel.partition={partition} has {' + '.join(map(str, partition.layers))} = {total} layers, "
            f"but model.layers={layers}; nearest that fits: {partition.fitted(layers)}"
        )


def nodes_exist(experiment: Experiment) -> None:
    order, groups = experiment.node_order, experiment.cluster.groups
    for name in dict.fromkeys(order.groups):
        if name not in groups:
            raise ConfigError(
                f"parallel.node_order={order} names the node group {name!r}, which cluster "
                f"{experiment.cluster.name!r} has not; it has: {', '.join(groups)}"
            )
        used, count = order.groups.count(name), groups[name].count
        if used > count:
            raise ConfigError(
                f"parallel.node_order={order} has {used} nodes of group {name!r}, but "
                f"cluster.groups.{name}.count={count}; use at most {count}"
            )


def ranks_fill_nodes(experiment: Experiment) -> None:
    parallel = experiment.parallel
    if parallel.world_size > ranges.MOST_RANKS:
        raise ConfigError(
            f"parallel.tensor * parallel.data * parallel.pipeline = {parallel.tensor} * {parallel.data} * "
            f"{parallel.pipeline} = {parallel.world_size} ranks; a plan has at most {ranges.MOST_RANKS}"
        )
    ranks = experiment.ranks_per_node()
    available = sum(ranks)
    if parallel.world_size == available:
        return
    ways = [f"parallel.{key}={value}" for key, value in _sizes_that_fill(experiment, available)]
    if len(set(ranks)) == 1 and parallel.world_size % ranks[0] == 0:
        count = parallel.world_size // ranks[0]
        ways.append(f"{count} node{'s' * (count != 1)} (cluster.groups.<group>.count)")
    raise ConfigError(
        f"parallel.tensor * parallel.data * parallel.pipeline = {parallel.tensor} * {parallel.data} * "
        f"{parallel.pipeline} = {parallel.world_size} ranks, but the chosen nodes of cluster "
        f"{experiment.cluster.name!r}, {experiment.node_order}, have {available} GPUs"
        + (f"; one of these fits: {'; '.join(ways)}" if ways else "; change these sizes or the node order")
    )


def _sizes_that_fill(experiment: Experiment, ranks: int) -> list[tuple[str, int]]:
    """The changes of one parallel size that give so many ranks and break no other rule."""
    ways = []
    for key in ("tensor", "data", "pipeline"):
        value, rest = divmod(getattr(experiment.parallel, key) * ranks, experiment.parallel.world_size)
        if rest or not value:
            continue
        try:
            replace(experiment, parallel=replace(experiment.parallel, **{key: value}))
        except ConfigError:
            continue
        ways.append((key, value))
    return ways


def tensor_fits(experiment: Experiment) -> None:
    tensor = experiment.parallel.tensor
    divides("parallel.tensor", tensor, "model.heads", experiment.model.heads)
    if experiment.parallel.sequence_parallel:
        divides("parallel.tensor", tensor, "model.sequence_length", experiment.model.sequence_length)
    for name in dict.fromkeys(experiment.node_order.groups):
        per_node = experiment.cluster.groups[name].gpus_per_node
        if per_node is not None and per_node % tensor:
            near = ", ".join(map(str, nearest_divisors(per_node, tensor)))
            raise ConfigError(
                f"parallel.tensor={tensor} does not fit cluster.groups.{name}.gpus_per_node={per_node}: a "
                f"tensor-parallel group lies inside one node; nearest that fit: {near}"
            )


def compiled_layers_put_nothing_off(experiment: Experiment) -> None:
    parallel = experiment.parallel
    if experiment.train.compile and (parallel.schedule == "zb_h1" or parallel.schedule_file is not None):
        raise ConfigError(
            f"train.compile=true does not go with parallel.schedule={parallel.schedule}"
            + (f" parallel.schedule_file={parallel.schedule_file}" if parallel.schedule_file else "")
            + ": compiled layers cannot put their weight gradients off; use train.compile=false or another schedule"
        )


def a_rehearsal_is_on_this_machine(experiment: Experiment) -> None:
    if experiment.executor.rehearse != "none" and experiment.executor.kind != "local":
        raise ConfigError(
            f"executor.rehearse={experiment.executor.rehearse} goes through the plan on this machine, but "
            f"executor.kind={experiment.executor.kind}; use executor=local, or executor.rehearse=none"
        )


def time_is_left_to_train(experiment: Experiment) -> None:
    """On Slurm, where the warning comes so early whatever the limit is."""
    if experiment.executor.kind != "slurm":
        return
    for name in dict.fromkeys(experiment.node_order.groups):
        limit, save_s = experiment.cluster.groups[name].time_min, experiment.executor.save_s
        if limit is not None and limit * 60 <= save_s:
            raise ConfigError(
                f"cluster.groups.{name}.time_min={limit} is not more than executor.save_s={save_s} seconds, at which "
                f"the run saves and ends; give it at least {save_s // 60 + 1} minutes, or use a smaller executor.save_s"
            )


def sweep(experiment: Experiment) -> None:
    if experiment.max_jobs is None:
        return
    if experiment.executor.kind == "local" and not experiment.executor.wait:
        raise ConfigError(
            f"max_jobs={experiment.max_jobs} cannot hold with executor.wait=false, which starts all runs on this "
            "machine at once; use executor.wait=true, which runs them one after another, or max_jobs=null"
        )


def one_profiler(profile: Profile) -> None:
    if profile.nsys and profile.ncu:
        raise ConfigError(
            "profile.nsys=true and profile.ncu=true: a process runs under one profiler at a time; set one to false"
        )


def learning_rate(train: Train) -> None:
    if not 0 <= train.min_lr <= train.lr:
        raise ConfigError(f"train.min_lr={train.min_lr} must be between 0 and train.lr={train.lr}")
    key = "iterations" if train.lr_decay_iterations is None else "lr_decay_iterations"
    decay = getattr(train, key)
    if not 0 <= train.lr_warmup_iterations < decay:
        raise ConfigError(
            f"train.lr_warmup_iterations={train.lr_warmup_iterations} must be at least 0 and less than "
            f"train.{key}={decay}"
        )


def optimizer(train: Train) -> None:
    for key in ("adam_beta1", "adam_beta2"):
        if not 0 <= (beta := getattr(train, key)) < 1:
            raise ConfigError(f"train.{key}={beta} must be at least 0 and less than 1")


def saving(train: Train) -> None:
    if train.save_interval is None:
        return
    if not train.checkpoint:
        raise ConfigError(
            f"train.save_interval={train.save_interval} saves checkpoints, but train.checkpoint=false saves none; use "
            "train.checkpoint=true, or train.save_interval=null"
        )


def split(text: str) -> None:
    weight = r"\s*[0-9]+(\.[0-9]+)?\s*"
    if not re.fullmatch(f"{weight},{weight},{weight}", text) or not float(text.split(",")[0]):
        raise ConfigError(
            f"data.split={text!r} must be three weights for training, validation and test, the first above "
            "0, such as '969,30,1'"
        )


def blend(corpora: Sequence[Corpus]) -> None:
    prefixes = [os.path.abspath(corpus.prefix) for corpus in corpora]  # noqa: PTH100  (takes '..' away, follows no link)
    for number, corpus in enumerate(corpora):
        key = f"data.blend[{number - 1}]" if number else "data"
        ranges.check("data", corpus, key)
        if prefixes[number] in prefixes[:number]:
            raise ConfigError(f"{key}.prefix={corpus.prefix} is in the blend already; give it the weight of both there")


def paths(experiment: Experiment) -> None:
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
            raise ConfigError(f"{key}={path!r} names no file or folder; give the path of one, or leave the key out")


def run_name(name: str) -> None:
    if (
        not name.isprintable()
        or not name.strip()
        or name.startswith((".", "-"))
        or "/" in name
        or name in ("by_job", "sweeps")
    ):
        raise ConfigError(
            f"name={name!r} cannot name a run folder: it must not be empty, start with '.' or '-', hold '/' "
            "or control characters, or be 'by_job' or 'sweeps'"
        )
