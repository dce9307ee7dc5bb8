"""What is to be searched, from the configurations that `tdpp launch` reads.

A search chooses the plan. Of `parallel` only the global batch counts, and what the command line itself gives; so a
configuration whose plan does not fit its cluster can be searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from conf.blocks_of_module import Asked, blocks_of, can_look, is_user_code
from conf.compose import compose_parts, compose_unchecked, to_object
from conf.errors import ConfigError
from conf.origins import SEARCHED, defaults_taken
from conf.plain import Plain
from conf.schema.adapt import Adapt, Elastic
from conf.schema.cluster import Cluster
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.known_blocks import with_known_blocks
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.search.arguments import WORDS
from fasop.search.plan import Failures, Fault, Run, no_fault
from fasop.search.space.candidates import divisors, sizes
from fasop.search.space.choices import Choices, runnable, split, tried
from megatron_ext.contract.keys import shown
from megatron_ext.contract.models.counts import experts_of
from megatron_ext.contract.parallel_config import (
    GATHERED,
    SCATTERED,
    Compress,
    Offload,
    Recompute,
    ReduceDtype,
    Shards,
    of_any_stage,
)
from megatron_ext.contract.rules.layout import WHY_NOT
from megatron_ext.contract.rules.memory import broken_by_offload

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from conf.schema.experiment import Experiment

PLAIN = (
    *("parallel.tensor=1", "parallel.data=1", "parallel.pipeline=1", "parallel.expert=1", "parallel.context=1"),
    *("parallel.partition=null", "parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b", "parallel.chunks=1"),
    *("parallel.node_order=null", "parallel.shares=null", "parallel.replicas=null"),
)
"""In the place of a configured plan, so that nothing of it can contradict the batch."""


PARTS = ("cluster", "model", "parallel", "train", "engine", "executor", "adapt", "elastic")
"""Parts of a configuration: all that a search reads where no user's file defines the model."""
LENGTH = ("train.iterations", "train.samples")
OF_TDPP = {
    **{"zero": None, "shards": Shards.equal, "offload": Offload.none, "hierarchical_reduce": False},
    **{"reduce_dtype": ReduceDtype.fp32, "compress": Compress.none},
}
"""Options of `parallel` that only tdpp's engine has, and their values without it."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    cluster: Cluster
    kinds: Sequence[NodeKind]
    training: Training
    """Without sizes; its options are the first of `choices`."""
    choices: Choices
    run: Run
    """The training, whole."""
    islands: bool = False
    """Whether plans have islands, which step together every `training.sync_every` iterations."""
    may_propose_islands: bool = False
    """Whether plans with islands could be launched instead."""
    executor: Executor = field(default_factory=Executor)
    """What would start it."""
    may_offload: tuple[Offload, ...] = ()
    """What plans may offload where nothing fits without."""
    may_scatter: tuple[int, ...] = ()
    """Stages of ZeRO beyond the first that plans may have."""
    may_share_by_memory: bool = False
    """Whether their replicas may keep parts by memory of what they share out, where nothing fits without."""
    by_default: str | None = None
    """In words, what of it nobody chose."""
    fault: Fault = no_fault
    """Plans with one are not kept."""


def read(overrides: Sequence[str], profile: str | None = None) -> Inputs:
    """From the overrides of a command line; `profile` is that of all GPUs.

    Raises:
        SearchError: Hydra cannot compose them, or a plan cannot be searched with them.
        ConfigError: a value is missing, or a rule of a part is broken.
    """
    given, others = split(overrides)
    words = [*others, *PLAIN]
    try:
        cfg = compose_parts(words, PARTS)
        whole = None if profile is None and not is_user_code(cfg.model) else compose_unchecked(words)
    except ConfigError as error:
        raise SearchError("\n".join([str(error), *_meant(others)])) from error
    if whole is not None:
        from fasop.costs.profiles.files import with_profile

        cfg = whole if profile is None else with_profile(whole, profile, others)[0]
    of_module = is_user_code(cfg.model)
    counted = cfg.model.get("layers") if of_module else None
    if of_module:
        cfg.model.layers = 1  # its profile knows how many
    for key, nothing in (("zero", None), ("offload", "none"), ("recompute", "none")):
        if len(of_any_stage(cfg.parallel.get(key))) > 1 or "*" in str(cfg.parallel.get(key)):
            cfg.parallel[key] = nothing  # for the stages of another plan
    parallel = to_object(cfg, Parallel, "parallel")
    if parallel.schedule_file is not None:
        raise SearchError(
            f"parallel.schedule_file={parallel.schedule_file} cannot be searched: it is for one pipeline size; use "
            "parallel.schedule_file=null"
        )
    cluster, train, engine = (
        to_object(cfg, Cluster, "cluster"),
        to_object(cfg, Train, "train"),
        to_object(cfg, Engine, "engine"),
    )
    model = to_object(cfg, Model, "model")
    if engine.kind is EngineKind.auto:  # tdpp's engine runs the more plans
        core = experts_of(model) is not None or bool(engine.options) or max(given.get("context", (1,))) > 1
        engine = replace(engine, kind=EngineKind.megatron_core if core else EngineKind.tdpp)
    allowed = runnable(engine, train, model)
    _require_engine(engine, model, given.get("context", (1,)))
    choices = _scattering(tried(allowed, given, engine, parallel.sequence_parallel), parallel)
    if experts_of(model) is not None and "sequence_parallel" not in given:  # tensor groups have to, the rest does not
        choices = replace(choices, sequence_parallel=(True, False))
    _require_options_of(engine, parallel)
    why_no_islands = _why_no_islands(parallel, train, engine, choices)
    if train.sync_every is not None and why_no_islands is not None:
        raise SearchError(f"{why_no_islands}, or train.sync_every=null")
    plain = replace(
        parallel,
        recompute=choices.recompute[0],
        sharded_optimizer=choices.sharded_optimizer[0],
        sequence_parallel=any(choices.sequence_parallel),  # its messages are shorter: bounds hold for both ways
    )
    cluster, assumed = _with_ranks(cluster, others)
    kinds = node_kinds(cluster)
    training = Training(
        model=model,
        parallel=Parallelism.of(plain),
        precision=train.precision,
        engine=engine,
        kept_values=train.kept_values,
        sync_every=train.sync_every or 1,
        adapters=train.adapters,
    )
    training = with_known_blocks(training, kinds, _tensor_sizes(kinds, given.get("tensor")))
    for size in given.get("tensor", ()):
        if isinstance(training.model, MeasuredModule) and size in training.model.refused:
            raise SearchError(training.model.refused[size])
    for way in given.get("recompute", ()):
        if (way.layers or 0) > (most := training.blocks.layers):
            raise SearchError(
                f"parallel.recompute={way} computes {way.layers} layers of a stage again, but the model has {most}; "
                "use full for all layers"
            )
    if of_module:
        _require_same_blocks(training, cfg, counted)
    if parallel.streams is not None:  # which go with few plans
        for one in islice(sizes(training, kinds, choices), 1):
            one.parallel.configured()
    inputs = Inputs(
        cluster=cluster,
        kinds=kinds,
        training=training,
        choices=choices,
        may_offload=_may_offload(parallel, train, engine, choices, others),
        may_scatter=()
        if "sharded_optimizer" in given or _changes(cfg)
        else _may_scatter(parallel, train, engine, choices, others),
        may_share_by_memory=_may_share_by_memory(parallel, engine, choices, others),
        executor=to_object(cfg, Executor, "executor"),
        by_default="; ".join(filter(None, (defaults_taken(overrides, cfg, SEARCHED), assumed))) or None,
        run=replace(_whole(train, parallel, others), failures=Failures.of(cluster, train, training.model.parameters())),
        islands=train.sync_every is not None,
        may_propose_islands=train.sync_every is None and why_no_islands is None,
    )
    offload = inputs.training.parallel.any_offload
    if offload is Offload.none:
        return inputs
    for broken in _broken(offload, parallel, train, choices):
        raise SearchError(broken)
    return offloading(inputs, offload)


def _why_no_islands(parallel: Parallel, train: Train, engine: Engine, choices: Choices) -> str | None:
    """Says which rule plans with islands would break, and what to use."""
    if engine.kind is not EngineKind.tdpp:
        return f"engine={engine.kind} cannot be combined with train.sync_every: it has no islands; use engine=tdpp"
    try:
        replace(train, sync_every=train.sync_every or 1)
    except ConfigError as error:
        return str(error)
    for rule, key, value, wanted in (
        ("sharded_optimizer", "sharded_optimizer", False not in choices.sharded_optimizer, "false"),
        ("hierarchical_stages", "hierarchical_reduce", parallel.hierarchical_reduce, "false"),
        ("offload", "offload", parallel.offloads[0].takes_optimizer, "none"),
    ):
        if value:
            why = WHY_NOT.get(rule, "islands step a copy of all weights on the GPU")
            return f"parallel.{key} cannot be combined with train.sync_every: {why}; use parallel.{key}={wanted}"
    return None


def _scattering(choices: Choices, parallel: Parallel | Parallelism) -> Choices:
    """The same, but with replicas that share out gradients, or unlike parts, only plans that share out the optimizer's
    state."""
    plain = parallel.zero is None and parallel.shards is Shards.equal
    return choices if plain else replace(choices, sharded_optimizer=(True,))


def _require_engine(engine: Engine, model: Model, context: Sequence[int]) -> None:
    """Raises SearchError for a model or a context size that the engine does not have (`contract/rules/engine.py`)."""
    if engine.kind is EngineKind.megatron_core and not model.traits.megatron_core:
        raise SearchError(
            f"model.family={model.family} cannot be searched with engine={engine.kind}, which trains GPT-2, Llama, "
            f"Mixtral, BERT and T5 here; use engine=tdpp, and leave export= out"
        )
    if engine.kind is EngineKind.tdpp and (experts := experts_of(model)) is not None:
        raise SearchError(f"model.experts={experts} must be null with engine=tdpp; use engine=megatron_core")
    if (most := max(context)) > 1 and not model.traits.megatron_lm:
        raise SearchError(f"parallel.context={most} must be 1 with model.family={model.family}")
    if engine.kind is EngineKind.tdpp and most > 1:
        raise SearchError(f"parallel.context={most} must be 1 with engine=tdpp; use engine=megatron_core")


def _require_options_of(engine: Engine, parallel: Parallel) -> None:
    """Raises SearchError for options of plans that no launch with the engine accepts (conf/schema/rules)."""
    for key, without in OF_TDPP.items():
        value = getattr(parallel, key)
        if engine.kind is not EngineKind.tdpp and value != without:
            raise SearchError(
                f"parallel.{key}={shown(value)} cannot be searched with engine={engine.kind}: only engine=tdpp has it; "
                f"use parallel.{key}={shown(without)}, or engine=tdpp"
            )


def _may_offload(
    parallel: Parallel, train: Train, engine: Engine, choices: Choices, words: Sequence[str]
) -> tuple[Offload, ...]:
    """What can be offloaded, if nobody says what is to be."""
    given = any(word.lstrip("+").startswith("parallel.offload=") for word in words)
    if engine.kind is not EngineKind.tdpp or given or parallel.offload is not Offload.none:
        return ()
    ways = [way for way in Offload if way.takes_optimizer or way.takes_activations]
    return tuple(way for way in ways if not [*_broken(way, parallel, train, choices)])


def _changes(cfg: DictConfig | Plain) -> bool:
    """Whether batches, shares or nodes change while it trains, which needs whole gradients (conf/schema/rules)."""
    adapt = to_object(cfg, Adapt, "adapt")
    return adapt.on or adapt.rebalance or to_object(cfg, Elastic, "elastic").enabled


def _may_scatter(
    parallel: Parallel, train: Train, engine: Engine, choices: Choices, words: Sequence[str]
) -> tuple[int, ...]:
    """Which stages of ZeRO replicas can have beyond the first, if nobody says which."""
    given = any(word.lstrip("+").startswith("parallel.zero=") for word in words)
    can = engine.kind is EngineKind.tdpp and True in choices.sharded_optimizer and train.sync_every is None
    if given or not can or parallel.zero is not None or parallel.streams is not None:
        return ()
    return (SCATTERED,) if parallel.hierarchical_reduce else (SCATTERED, GATHERED)


def scattering(inputs: Inputs, zero: int) -> Inputs:
    """The same, with plans alone whose replicas share out what this stage of ZeRO says."""
    return replace(
        inputs,
        training=replace(inputs.training, parallel=replace(inputs.training.parallel, zero=zero)),
        choices=replace(inputs.choices, sharded_optimizer=(True,), replicated=(True,)),
        may_scatter=(),
    )


def _may_share_by_memory(parallel: Parallel, engine: Engine, choices: Choices, words: Sequence[str]) -> bool:
    """Whether replicas can keep unlike parts, if nobody says that they do not."""
    given = any(word.lstrip("+").startswith("parallel.shards=") for word in words)
    can = engine.kind is EngineKind.tdpp and True in choices.sharded_optimizer
    return can and not given and not parallel.hierarchical_reduce and parallel.streams is None


def _broken(way: Offload, parallel: Parallel, train: Train, choices: Choices) -> Iterator[str]:
    """Every rule that is broken by plans that offload so, if nothing is computed again that need not be."""
    again = Recompute.none if Recompute.none in choices.recompute else choices.recompute[0]
    plan = replace(parallel, offload=way, recompute=again)
    return broken_by_offload(partial(getattr, plan), partial(getattr, train), "parallel.")


def offloading(inputs: Inputs, way: Offload) -> Inputs:
    """The same, with plans alone that offload so."""
    parallel = replace(inputs.training.parallel, offload=way)
    recompute = (Recompute.none,) if way.takes_activations else inputs.choices.recompute
    return replace(
        inputs,
        training=replace(inputs.training, parallel=parallel),
        choices=replace(inputs.choices, recompute=recompute),
        may_offload=(),
    )


def by_memory(inputs: Inputs) -> Inputs | None:
    """The same, with plans alone whose replicas keep parts by memory of what they share out; None if none can have
    such."""
    training = inputs.training
    unlike = len({kind.gpu.memory_gib for kind in inputs.kinds}) > 1
    if not inputs.may_share_by_memory or not unlike or training.shares_by_memory:
        return None
    return replace(
        inputs,
        training=replace(training, parallel=replace(training.parallel, shards=Shards.memory)),
        choices=replace(inputs.choices, sharded_optimizer=(True,), replicated=(True,)),
    )


def _tensor_sizes(kinds: Sequence[NodeKind], given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Sizes of tensor groups that divide a node, or those that are given."""
    return tuple({size for kind in kinds for size in divisors(kind.gpus)}) if given is None else given


def _with_ranks(cluster: Cluster, words: Sequence[str]) -> tuple[Cluster, str | None]:
    """A node that runs as many ranks as its plan asks for gets those of the configured one; and that in words."""
    open_groups = [name for name, group in cluster.groups.items() if group.gpus_per_node is None]
    if not open_groups:
        return cluster, None
    try:
        ranks = to_object(compose_unchecked(words), Parallel, "parallel").world_size
    except ConfigError:
        return cluster, None
    if ranks < 2:  # no plan could be compared with another one
        return cluster, None
    (name,) = open_groups  # only a cluster of one node may leave it open
    groups = {name: replace(cluster.groups[name], gpus_per_node=ranks)}
    return replace(cluster, groups=groups), f"cluster.groups.{name}.gpus_per_node={ranks}, the ranks of the plan"


def of_experiment(experiment: Experiment) -> Inputs:
    """From a run's configuration: all plans for the GPUs that it uses, on all of their nodes.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: the model is a module that no profile knows.
    """
    from fasop.simulation.predict import planned  # a search predicts by tables

    placed = planned(experiment)
    used = Counter(node.name for node in placed.nodes)
    kinds = [replace(kind, group=replace(kind.group, count=used[kind.name])) for kind in placed.kinds]
    own, train, engine = placed.training.parallel, experiment.train, experiment.engine
    choices = tried(runnable(engine, train, experiment.model), {}, engine, own.sequence_parallel)
    choices = _scattering(choices, own)
    plain = Parallelism(
        global_batch_size=own.global_batch_size,
        zero=None if isinstance(own.zero, tuple) else own.zero,
        shards=own.shards,
        offload=own.any_offload,
        reduce_dtype=own.reduce_dtype,
        compress=own.compress,
        scatter_messages=own.scatter_messages,
        hierarchical_reduce=own.hierarchical_reduce,
        recompute=choices.recompute[0],
        sharded_optimizer=choices.sharded_optimizer[0],
        sequence_parallel=choices.sequence_parallel[0],
    )
    return Inputs(
        cluster=experiment.cluster,
        kinds=sorted(kinds, key=lambda kind: [*experiment.cluster.groups].index(kind.name)),
        training=replace(placed.training, parallel=plain),
        choices=choices,
        run=Run(iterations=1, known=False),
    )


def _whole(train: Train, parallel: Parallel, words: Sequence[str]) -> Run:
    """The training, whole; a search reads no data, which alone say how long epochs are."""
    named = {word.partition("=")[0].lstrip("+") for word in words}
    if train.epochs is not None:
        return Run(iterations=1, known=False)
    if train.samples is not None:
        iterations = max(1, train.samples // parallel.global_batch_size)
    else:
        iterations = train.last_iteration
    return Run(iterations=iterations, known=not named.isdisjoint(LENGTH))


def _require_same_blocks(training: Training, cfg: DictConfig | Plain, counted: int | None) -> None:
    """Raises SearchError if a profile has other blocks of a module than it has now, as far as this machine can tell."""
    model = training.model
    if counted is not None and counted != model.layers:
        raise SearchError(
            f"model.layers={counted}: its profile has {model.layers} blocks of model.code={model.code}; leave "
            f"model.layers out"
        )
    if not (can_look() and str(cfg.container.kind) == "none"):
        return
    asked = Asked(
        code=str(model.code),
        capture=model.capture,
        micro_batch_size=1,
        precision=str(training.precision),
        seed=cfg.train.seed,
        recompute="none",
    )
    now, known = blocks_of(asked), training.blocks.names
    if now != known:
        here, there = next(pair for pair in zip_longest(now, known, fillvalue="nothing more") if pair[0] != pair[1])
        raise SearchError(
            f"model.code={model.code}: its profile has {len(known)} different blocks: the module now has {here} where "
            f"the profile has {there}; measure it again with 'tdpp profile'"
        )


def _meant(words: Sequence[str]) -> Iterator[str]:
    """The search's own words that come near to words which may be misspelt."""
    from difflib import get_close_matches

    for word in words:
        key = word.partition("=")[0].lstrip("+-")
        if near := get_close_matches(key, WORDS, n=1, cutoff=0.75):
            yield f"did you mean {near[0]}=? 'tdpp search --help' lists the search's own words"
