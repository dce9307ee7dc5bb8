"""`tdpp profile`: what a model's parts take on the GPUs of a cluster, and messages between them, as profiles.

A short job on all nodes measures it (megatron_ext.profile); its folder is below `<runs_dir>/profile`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from omegaconf import DictConfig, OmegaConf

from conf.blocks_of_module import can_look, count_blocks, is_user_code
from conf.compose import compose, compose_unchecked, to_object
from conf.reading.files import check_free, check_writable, write_whole
from conf.schema.experiment import Cluster, EngineKind, Executor, Experiment, Model, Rehearse
from conf.schema.values.links import FILE
from fasop.costs.profiles.doubts import profile_doubts
from fasop.costs.profiles.files import name_of, profile_path
from fasop.costs.profiles.profile import LayerProfile, Links
from launch.control.follow import interruptible
from launch.control.planning.dry_run import dry_run
from launch.control.short_job import short_job
from launch.errors import LaunchError
from launch.profile import files, pair_links
from launch.profile.arguments import ADD, Arguments, check_name_free, parse
from launch.profile.files import write
from launch.profile.findings import Found, merged, short_of, too_large, unsettled
from launch.profile.measured import measured, steps_table, tables
from launch.screen import print_table, remark
from megatron_ext.contract.worker import PROFILE

WORKER = "megatron_ext.profile"
"""The module that measures on the ranks."""
FOLDER = "profile"
"""In `runs_dir`."""
BUILD_S = 60
"""For the weights of one tensor size and micro-batch, and its first passes, at most."""
LINKS_S = 300
ROOM_S = 900
"""For trying how large a micro-batch may be, at most; ranks wait for the last one so long."""
DOUBLINGS = 10
"""How often the first micro-batch is doubled, about as often as any GPU has room for."""
PATIENCE_S = 300
"""How long a rank waits for others: those of another node may take longer to make large weights."""
USAGE = """usage: tdpp profile [GROUP=CHOICE ...] [KEY=VALUE ...] [profile=NAME] [tensor_sizes=N,...] ...

Runs a short job on all nodes of a cluster and measures the model there: the time of embedding, layers and head, forward
and backward, the memory that they keep, the time of an optimizer step, and the times of messages and all-reduces by
size. For models of images, and a module of your own (model=module model.code=FILE.py:NAME), it measures every kind of
block. With engine=megatron_core the layers and the optimizer are Megatron-Core's. GROUP, KEY and --config-dir DIR are
those of 'tdpp launch'; the keys of parallel are ignored. It writes a file for every type of GPU, which 'tdpp search'
reads.

  tdpp profile                                    the model 'tiny' on this machine's CPU
  tdpp profile cluster=a10x8 model=xl executor=slurm train.precision=bf16 profile=a10_bf16
  tdpp profile import=known_cost/gpt2XL_A10 gpu=A10 model=xl precision=fp16 micro_batch_size=1 backward_ratio=1.6

  profile=NAME           save the profile under this name (default: the GPU's key in cluster.gpus; with several types
                         of GPU: NAME_KEY)
  profile=FILE.yaml      save it to this file (with several types of GPU: FILE_KEY.yaml)
  links=FILE.yaml        write links between the node groups as a table: cluster.links_file=FILE.yaml uses it
  page=FILE              write a page with the gradient buckets, and what streams gain
  graph_output=FILE      write the model as a graph.txt of PipeDream's, with the times of the largest micro-batch (with
                         several types of GPU: FILE_KEY)
  add=true               add to an existing file; entries of the same sizes and number format are replaced
  overwrite=true         replace an existing file
  tensor_sizes=1,2       tensor sizes to measure (default: all powers of two that the nodes and the model's heads
                         allow; on a CPU 1 and 2)
  micro_batches=1,2,4    micro-batch sizes to measure (default: 1,2,4,8); those that do not fit are left out
  micro_batches=32+      from 32 on, double the size until memory is full
  streams=1,2,4          also train the whole model in so many copies on a GPU, as far as memory has room, to measure
                         what streams gain, and how many of them fit with each micro-batch (parallel.streams)
  seconds=N              measure each tensor size and micro-batch for at most N seconds (10)
  wait_min=N             give up if not all nodes have started after N minutes (10)
  dry_run=true           print what would be submitted

  nccl_tests=FILE[,FILE] read what all_reduce_perf and others of nccl-tests printed, as measured collectives; with
                         add=true into an existing profile
  import=FOLDER/PREFIX   read files PREFIX_<tensor size>.npy instead of measuring: the forward seconds of embedding,
                         layers and head; give gpu=, precision=, micro_batch_size= and backward_ratio=, too
  import=DIR[,DIR]       read folders of IIDP's or JABAS's profilers together, a profile for each type of GPU
  export=DIR             write the imported profiles, or profile=NAME[,NAME], as such a folder; it overwrites nothing"""


def main(argv: Sequence[str], *, worker: str = WORKER) -> int:
    """Runs `tdpp profile <argv>`; returns 0 once all is written.

    Raises:
        TdppError: what is asked for cannot be read, measured or written.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP; the job has been ended.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    arguments, comment = parse(argv), f"Made by: tdpp profile {shlex.join(argv)}".rstrip()
    if arguments.folders or arguments.export is not None:
        from launch.profile import iidp

        return iidp.main(arguments, comment)
    if arguments.nccl_tests:
        from launch.profile import nccl_tests

        return nccl_tests.main(arguments, comment)
    if arguments.known_cost is not None:
        return _import(arguments, comment)
    job = prepare(arguments)
    if job.experiment.dry_run:
        print(dry_run(job.experiment, worker).readable())
        return 0
    for name in job.names.values():
        check_name_free(name, arguments)
        if arguments.add:
            files.check_engine(name, job.experiment.engine)
    if arguments.links is not None:
        check_free(arguments.links, f"links={arguments.links}", replace=arguments.overwrite or arguments.add, more=ADD)
    check_writable(arguments.page)
    if arguments.graph_output is not None:
        for file in files.graph_paths(arguments.graph_output, [*job.names]).values():
            check_free(file, f"graph_output={file}", replace=arguments.overwrite or arguments.add)
    with interruptible():
        found, failure = measured(job.experiment, arguments, job.run_min, worker)
    table = pair_links.measured_table(found)
    profiles = {gpu: _written(gpu, found, table, job, arguments, comment) for gpu in job.names}
    if arguments.graph_output is not None and failure is None:
        for file in files.write_graphs(arguments.graph_output, job.experiment, profiles):
            print(f"written: {file}; 'tdpp search graph={file}' divides it")
    if failure is not None:
        names = ", ".join(job.names.values())
        remark(f"incomplete: {names}; repeat with add=true to measure the rest")
        raise failure
    _tell_pairs(table, arguments, comment)
    if arguments.profile is not None:
        print(f"profile={arguments.profile} uses these times and links in a launch, a search or a simulation")
    if arguments.page is not None:
        from reports.pages.command_pages import profile_page  # few ask for it, and plotly is slow to import

        named = {job.names[gpu]: profile for gpu, profile in profiles.items()}
        write_whole(arguments.page, profile_page(f"tdpp profile {shlex.join(argv)}", named))
        print(arguments.page)
    return 0


def _written(
    gpu: str, found: Found, table: pair_links.Table, job: Job, arguments: Arguments, comment: str
) -> LayerProfile:
    """Write the profile of one kind of GPU, print it, and tell what it lacks."""
    name = job.names[gpu]
    profile = merged(found, gpu, "measured by 'tdpp profile'", datetime.now().date().isoformat())
    profile = replace(profile, links=table if len(table) > 1 else {})
    for text in too_large(found, gpu):
        remark(f"{name}: {text} does not fit into memory and was left out")
    if (reason := short_of(found, gpu)) is not None:
        remark(f"{name}: no larger micro-batch of the whole model fits: {reason}")
    for text in unsettled(found, gpu):
        remark(f"{name}: {text} could not be measured to 2 % within seconds={arguments.seconds:g}; allow more seconds")
    write(name, profile, arguments, comment)
    _print_profile(name, profile, [group for group, one in job.experiment.cluster.groups.items() if one.gpu == gpu])
    return profile


def _tell_pairs(table: pair_links.Table, arguments: Arguments, comment: str) -> None:
    """Links between node groups: written where that is asked for, else on stdout, if there are several groups."""
    if arguments.links is not None:
        pair_links.write_table(arguments.links, table, arguments, comment)
        print(f"written: {arguments.links}; {FILE}={arguments.links} uses it")
    elif len(table) > 1:
        print(f"between node groups:\n  {pair_links.override(table)}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be submitted, and under which names its profiles are written."""

    experiment: Experiment
    run_min: int
    names: dict[str, str]
    """The names of the profiles by GPU, as it is called in cluster.gpus."""


def prepare(arguments: Arguments) -> Job:
    """The job on all nodes of the cluster, with all of their GPUs. Raises TdppError: the configuration cannot be
    composed, or a tensor size fits no node or not the model."""
    cfg = compose_unchecked(arguments.overrides)
    of_module = is_user_code(cfg.model)
    if of_module:
        _count(cfg)
    cluster, model = to_object(cfg, Cluster, "cluster"), to_object(cfg, Model, "model")
    tensor_sizes = _tensor_sizes(arguments, cluster, model)
    of_node = max(2, *tensor_sizes) if model.measured else max(tensor_sizes)  # a link has two ends
    hosts = [host.ranks for host in to_object(cfg, Executor, "executor").reached]
    nodes = hosts or [group.gpus_per_node or of_node for group in cluster.groups.values() for _ in range(group.count)]
    layers = [f"model.layers={model.layers}"] if of_module else []
    experiment = compose([*arguments.overrides, *_plain(sum(nodes)), *layers])
    if experiment.executor.rehearse is not Rehearse.none:
        raise LaunchError(
            f"executor.rehearse={experiment.executor.rehearse}: a rehearsal measures nothing; leave this key out"
        )
    if experiment.engine.kind is EngineKind.megatron_core:
        if not model.traits.megatron_lm:
            raise LaunchError(
                f"model.family={model.family}: with engine=megatron_core a profile is of GPTs; measure with "
                "engine=tdpp, whose times a search for Megatron-Core then uses"
            )
        tensor_sizes = _of_megatron_core(arguments, tensor_sizes, nodes)
    for word in _of_the_whole(arguments) if 1 not in tensor_sizes else ():
        raise LaunchError(f"{word} tries the whole model on one GPU: add 1 to tensor_sizes")
    points = len(tensor_sizes) * (len(arguments.micro_batches) if arguments.room_from is None else DOUBLINGS)
    room_s = 0 if arguments.room_from is None else ROOM_S
    sizes = points // len(tensor_sizes)
    steps_s = math.ceil(sizes * len(arguments.streams) * (BUILD_S + 2 * arguments.seconds))
    waits_s = max(PATIENCE_S, room_s + steps_s)
    run_min = math.ceil((points * (BUILD_S + 2 * arguments.seconds) + LINKS_S + room_s + steps_s) / 60)
    request = {
        "padded_vocab_sizes": {str(one): 0 if model.measured else model.padded_vocab(one) for one in tensor_sizes},
        "micro_batch_sizes": arguments.micro_batches,
        "seconds": arguments.seconds,
    }
    if any(_of_the_whole(arguments)):
        memory = {name: int(cluster.gpus[group.gpu].memory_gib * 2**30) for name, group in cluster.groups.items()}
        request |= {"room_from": arguments.room_from, "memory_bytes": memory, "streams": arguments.streams}
    environment = {**experiment.cluster.environment, PROFILE: json.dumps(request, separators=(",", ":"))}
    with_request = replace(
        experiment,
        cluster=replace(experiment.cluster, environment=environment),
        train=replace(
            experiment.train,
            comm_timeout_s=max(waits_s, experiment.train.comm_timeout_s),
            lora_rank=None,  # times of adapters follow from those of all weights
            lora_alpha=None,
            lora_targets=None,
        ),
    )
    gpus = list(dict.fromkeys(group.gpu for group in cluster.groups.values()))
    wanted = arguments.profile
    names = {gpu: gpu if wanted is None else name_of(wanted, gpu, alone=len(gpus) == 1) for gpu in gpus}
    return Job(experiment=short_job(with_request, FOLDER, arguments.wait_min, run_min), run_min=run_min, names=names)


def _of_megatron_core(arguments: Arguments, tensor_sizes: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Returns the tensor sizes for which Megatron-Core can make groups, in which all ranks are."""
    for word in _of_the_whole(arguments):
        raise LaunchError(f"{word} trains the whole model with tdpp's engine: leave it out, or use engine=tdpp")
    for size in arguments.tensor_sizes:
        left_over = [ranks for ranks in nodes if ranks % size]
        if left_over:
            raise LaunchError(
                f"tensor_sizes={size} must divide the ranks of every node with engine=megatron_core, whose groups "
                f"leave no rank out, but a node has {left_over[0]}; leave this size out, or measure these nodes alone"
            )
    return tuple(size for size in tensor_sizes if not any(ranks % size for ranks in nodes))


def _of_the_whole(arguments: Arguments) -> Iterator[str]:
    """The words that have whole models trained on a GPU."""
    if arguments.room_from is not None:
        yield f"micro_batches={arguments.room_from}+"
    if arguments.streams:
        yield f"streams={','.join(map(str, arguments.streams))}"


def _count(cfg: DictConfig) -> None:
    """Sets `model.layers` of a module; where it cannot be looked at here, to any number: its blocks are measured, not
    laid out."""
    if can_look() and str(cfg.container.kind) == "none":
        count_blocks(cfg)
    elif OmegaConf.is_missing(cfg.model, "layers"):
        cfg.model.layers = 1


def _plain(ranks: int) -> list[str]:
    """Overrides for a plan that has so many ranks and nothing else."""
    plan = {
        "tensor": 1,
        "data": ranks,
        "pipeline": 1,
        "expert": 1,
        "chunks": 1,
        "micro_batch_size": 1,
        "global_batch_size": ranks,
        "partition": "null",
        "shares": "null",
        "replicas": "null",
        "node_order": "null",
        "schedule": "one_f_one_b",
        "schedule_file": "null",
        "sequence_parallel": "false",
        "recompute": "none",
        "sharded_optimizer": "false",
    }
    return [f"parallel.{key}={value}" for key, value in plan.items()]


def _tensor_sizes(arguments: Arguments, cluster: Cluster, model: Model) -> tuple[int, ...]:
    """Returns the sizes asked for, or all powers of two that every node can have; each divides the model's heads."""
    if model.measured:
        if arguments.tensor_sizes not in ((), (1,)):
            asked = ",".join(map(str, arguments.tensor_sizes))
            raise LaunchError(
                f"tensor_sizes={asked}: model.family={model.family} has no tensor parallelism; use tensor_sizes=1, or "
                f"leave it out"
            )
        return (1,)
    nodes = [group.gpus_per_node for group in cluster.groups.values() if group.gpus_per_node is not None]
    most = min(nodes, default=max(arguments.tensor_sizes, default=2))
    if not arguments.tensor_sizes:
        powers = [1 << exponent for exponent in range(most.bit_length())]
        return tuple(size for size in powers if model.heads % size == 0)
    for size in arguments.tensor_sizes:
        if size > most:
            raise LaunchError(
                f"tensor_sizes={size}: a tensor group must fit in one node, and the largest has {most} GPUs"
            )
        if model.heads % size:
            raise LaunchError(f"tensor_sizes={size} does not divide model.heads={model.heads}")
    return arguments.tensor_sizes


def _import(arguments: Arguments, comment: str) -> int:
    from launch.profile.pair_links import imported

    assert arguments.known_cost is not None
    if arguments.profile is None:
        raise LaunchError("import=…: name the profile with profile=NAME, or its file with profile=FILE.yaml")
    check_name_free(arguments.profile, arguments)
    model = to_object(compose_unchecked(arguments.overrides), Model, "model")
    profile = imported(arguments.known_cost, model)
    write(arguments.profile, profile, arguments, comment)
    _print_profile(arguments.profile, profile, [])
    return 0


def _print_profile(name: str, profile: LayerProfile, groups: Sequence[str]) -> None:
    """Prints the times, what the links give for the cluster's configuration, and where the profile is written."""
    for what, table in tables(profile):
        print(f"{profile.gpu} ({profile.device or 'device unknown'}), {what}: forward + backward")
        print_table(*table)
    if any(steps.precision is not None for steps in profile.steps):
        how = "" if "cuda" in profile.versions else "; on a CPU they are threads, which share its cores"
        print(f"{profile.gpu}, streams: whole steps with several copies of the model on one rank{how}")
        print_table(*steps_table(profile))
    for precision, nanoseconds in profile.optimizer_ns_per_parameter.items():
        print(f"optimizer, {precision}: {nanoseconds:g} ns per parameter")
    for room in profile.room:
        print(
            f"largest micro-batch with the whole model {room.model} on one GPU: {room.micro_batch_size}, "
            f"{room.precision}"
        )
    for model, sizes in profile.buckets_mib.items():
        print(f"gradient buckets of {model}, in order: {', '.join(f'{size:.4g}' for size in sizes)} MiB")
    for line in _link_lines(profile, groups):
        print(line)
    remark(*(f"{name}: {doubt}" for doubt in profile_doubts(profile)))
    print(f"written: {profile_path(name)}; cluster.gpus.<key>.profile={name} uses it")


def _link_lines(profile: LayerProfile, groups: Sequence[str]) -> Iterator[str]:
    for place, key, links in (("within a node", "intra", profile.within), ("between nodes", "inter", profile.between)):
        parts = [
            f"{what} {times.latency_us:g} us + {times.gbit_per_s:g} Gbit/s"
            for what, times in (("messages", links.p2p), ("all-reduce", links.all_reduce))
            if times is not None
        ]
        if parts:
            yield f"{place}: {', '.join(parts)}"
        yield from _overrides(key, links, groups)


def _overrides(key: str, links: Links, groups: Sequence[str]) -> Iterator[str]:
    if links.p2p is not None:
        for group in groups:
            latency, rate = links.p2p.latency_us, links.p2p.gbit_per_s
            of = f"cluster.groups.{group}.{key}"
            yield f"  {of}_latency_us={latency:g} {of}_gbit_per_s={rate:g}"
