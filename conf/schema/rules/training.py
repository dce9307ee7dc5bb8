"""What training and a model's family need of the rest of an experiment.

Every check raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from conf.errors import ConfigError
from conf.schema.adapt import Adapt, Elastic
from conf.schema.data import Augment, Data
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, Rehearse
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.rules.plan_keys import keys_of_plan, keys_that_change
from conf.schema.train import Optimizer, Precision, Train, check_metrics
from conf.schema.values.partition import AUTO
from megatron_ext.contract.keys import shown
from megatron_ext.contract.models.images import ImageFamily
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.rules.memory import broken_by_offload, broken_by_shares


def check(train: Train, model: Model, data: Data, executor: Executor) -> None:
    """Whether a run trains, where keys are for training, and has data to evaluate on, where it evaluates."""
    for key in ("eval_interval", "max_cost"):
        value = getattr(train, key)
        if value is not None and executor.rehearse is not Rehearse.none:
            raise ConfigError(
                f"train.{key}={value} is for training, but executor.rehearse={executor.rehearse} trains "
                f"nothing; use train.{key}=null"
            )
    if train.epochs is not None and executor.rehearse is not Rehearse.none:
        raise ConfigError(
            f"train.epochs={train.epochs} counts the samples of the data, but executor.rehearse="
            f"{executor.rehearse} reads none; use train.iterations or train.samples"
        )
    if train.eval_interval is None:
        return
    check_metrics(train, str(model.family))
    if model.traits.splits_documents and not float(data.split.split(",")[1]):
        raise ConfigError(
            f"train.eval_interval={train.eval_interval} evaluates on the valid split, but data.split="
            f"{data.split} gives that split no documents; give it some, such as data.split=969,30,1"
        )


def overlaps(parallel: Parallel, train: Train, engine: Engine, adapt: Adapt) -> bool:
    """Whether a run does so: where it was asked for or, with `auto`, wherever it changes no result and can gain."""
    if train.overlap_optimizer == AUTO:
        return next(_reasons(parallel, train, engine, adapt), None) is None
    return bool(train.overlap_optimizer)


def check_overlap(parallel: Parallel, train: Train, engine: Engine, adapt: Adapt) -> None:
    """Raises ConfigError where it was asked for and cannot be."""
    if train.overlap_optimizer is not True:
        return
    for given, why, instead in _reasons(parallel, train, engine, adapt):
        raise ConfigError(
            f"train.overlap_optimizer=true cannot be combined with {given}: {why}; use {instead}, or "
            "train.overlap_optimizer=auto"
        )


def _reasons(parallel: Parallel, train: Train, engine: Engine, adapt: Adapt) -> Iterator[tuple[str, str, str]]:
    """Why not: the key and its value, the rule, and the way out."""
    if engine.kind is not EngineKind.tdpp:
        yield f"engine.kind={engine.kind}", "only tdpp's own engine can do it", "engine=tdpp"
    for key, value in (("tensor", parallel.tensor_size), ("pipeline", parallel.pipeline)):
        if value != 1:
            yield f"parallel.{key}={value}", "it works only in data parallel plans", f"parallel.{key}=1"
    if parallel.layout.replicas[0] == 1:
        yield "parallel.data=1", "a single replica has no gradients to sum", "parallel.data=2 or more"
    if parallel.stream is not None:
        yield "parallel.schedule=pipedream", "its stages update independently", "parallel.schedule=one_f_one_b"
    for given, there, instead in (
        (f"parallel.streams={parallel.streams}", max(parallel.streams_of) > 1, "parallel.streams=null"),
        (f"adapt.streams={adapt.streams}", bool(adapt.streams), "adapt.streams=[]"),
    ):
        if there:
            yield given, "the gradients of all streams must be added up first", instead
    if parallel.sharded_optimizer:
        yield (
            "parallel.sharded_optimizer=true",
            "replicas hand each other their new weights when all gradients are clipped and applied",
            "parallel.sharded_optimizer=false",
        )
    if train.clip_grad:
        yield (
            f"train.clip_grad={train.clip_grad:g}",
            "clipping needs the norm of all gradients before any weight is updated",
            "train.clip_grad=0",
        )
    if train.optimizer is Optimizer.lamb:
        yield "train.optimizer=lamb", "its updates need the norms of whole weight matrices", "another optimizer"
    if train.precision is Precision.fp16:
        yield (
            "train.precision=fp16",
            "only all gradients together decide whether an iteration is skipped",
            "train.precision=bf16",
        )


def check_measured(model: Model, parallel: Parallel, engine: Engine, executor: Executor) -> None:
    """Rules for a model of the user's own, and of others whose blocks are not those of a transformer over tokens."""
    if not model.measured:
        return
    for key, value, allowed in (
        *([] if model.traits.shares_layers else [("parallel.tensor", str(parallel.tensor), "1")]),
        ("engine.kind", str(engine.kind), str(EngineKind.tdpp)),
    ):
        if value != allowed:
            raise ConfigError(f"{key}={value} cannot be combined with model.family={model.family}; use {key}={allowed}")


def check_recompute(model: Model, parallel: Parallel, layers: Sequence[int]) -> None:
    """Whether the model, and the stages with so many `layers` each, have what is to be computed again."""
    if parallel.recompute is Recompute.selective and not model.attends:
        raise ConfigError(
            "parallel.recompute=selective recomputes attention, which tdpp does not find in "
            f"model.family={model.family}; use full or none"
        )
    ways = parallel.recompute.stages
    for way, most in zip(ways, layers if len(ways) > 1 else [max(layers)], strict=True):
        if (way.layers or 0) > most:
            has = f"that stage has {most}" if len(ways) > 1 else f"no stage has more than {most}"
            raise ConfigError(
                f"parallel.recompute={parallel.recompute} computes {way.layers} layers of a stage again, but {has}; "
                "use full for all layers"
            )


def check_offload(parallel: Parallel, train: Train) -> None:
    """Whether the host's memory can hold what it is to."""
    for broken in broken_by_offload(partial(getattr, parallel), partial(getattr, train), "parallel."):
        raise ConfigError(broken)


def check_zero(parallel: Parallel, adapt: Adapt, elastic: Elastic) -> None:
    """Whether replicas can keep a share, and stages what each of them keeps or computes again."""
    given = {**keys_of_plan(parallel), **keys_that_change(adapt, elastic)}
    by_stage = {"zeros": parallel.zeros, "offload": parallel.offloads, "recompute": parallel.recompute.stages}
    keys = [key for key, values in by_stage.items() if len({*values}) > 1]
    for broken in broken_by_shares(lambda key, _: given[key].planned, "parallel.", lambda key: str(given[key]), keys):
        raise ConfigError(broken)


def check_bucketing(model: Model, data: Data) -> None:
    """Whether the samples have lengths to be sorted by."""
    if data.bucketing is not None and not model.traits.translates:
        raise ConfigError(
            f"data.bucketing={data.bucketing} is for translation, where samples have different lengths, not for "
            f"model.family={model.family}; leave it out"
        )


def check_packing(model: Model, data: Data, engine: Engine) -> None:
    """Whether documents that share a sample can be kept apart."""
    if not data.packing:
        return
    if not model.traits.packs:
        raise ConfigError(
            f"data.packing=true keeps documents that share a sample apart, which model.family={model.family} cannot "
            "do; leave it out"
        )
    if engine.kind is not EngineKind.tdpp:
        raise ConfigError(f"data.packing=true cannot be combined with engine.kind={engine.kind}; use engine=tdpp")


def check_adapters(model: Model, train: Train) -> None:
    """Whether the model can have adapters."""
    if train.lora_rank is None:
        return
    if not model.traits.adapters:
        raise ConfigError(
            f"train.lora_rank={train.lora_rank} trains adapters, which model.family={model.family} cannot have; use "
            "model.family=huggingface (docs/fine-tuning.md), or leave it out"
        )


def check_images(model: Model, data: Data, parallel: Parallel) -> None:
    """Rules for images, and for what is theirs alone."""
    family = model.traits
    if not isinstance(family, ImageFamily):
        for key, value in asdict(data.augment).items():
            if value != getattr(Augment(), key):
                raise ConfigError(
                    f"data.augment.{key}={shown(value)} is only for models of images, not for "
                    f"model.family={model.family}; leave it out"
                )
        return
    if data.blend:
        raise ConfigError(
            f"data.blend has {len(data.blend)} corpora, but model.family={model.family} reads only the images of "
            f"data.prefix; join them into one data set, and leave data.blend out"
        )
    values = parallel.micro_batch_size * family.values_of_norm(model.sized(1))
    if values == 1:
        raise ConfigError(
            f"parallel.micro_batch_size=1 leaves the last batch norms of model.family={model.family} a single value "
            f"per channel with model.image_size={model.image_size}, which has no variance; use 2 or more"
        )


def check_compile(train: Train, parallel: Parallel) -> None:
    """Whether the schedule goes with compiled layers."""
    if train.compile and (parallel.schedule.definition.splits_backward or parallel.schedule_file is not None):
        raise ConfigError(
            f"train.compile=true cannot be combined with parallel.schedule={parallel.schedule}"
            + (f" parallel.schedule_file={parallel.schedule_file}" if parallel.schedule_file else "")
            + ": compiled layers cannot delay their weight gradients; use train.compile=false or another schedule"
        )
