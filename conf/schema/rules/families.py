"""What a model's family does not go with: rules that join the model with data, plan and engine.

Every check raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from dataclasses import asdict

from conf.errors import ConfigError
from conf.schema.data import Augment, Data
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, Rehearse
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from conf.schema.values.schedules import Recompute
from megatron_ext.contract.models.images import ImageFamily


def check_measured(model: Model, parallel: Parallel, engine: Engine, executor: Executor) -> None:
    """Rules for a model of the user's own, and of others whose blocks are not those of a transformer over tokens."""
    if not model.measured:
        return
    for key, value, allowed in (
        ("parallel.tensor", str(parallel.tensor), "1"),
        ("engine.kind", str(engine.kind), str(EngineKind.tdpp)),
        ("executor.rehearse", str(executor.rehearse), str(Rehearse.none)),
    ):
        if value != allowed:
            raise ConfigError(f"{key}={value} cannot be combined with model.family={model.family}; use {key}={allowed}")


def check_recompute(model: Model, parallel: Parallel) -> None:
    """Whether the model has what is to be computed again."""
    if parallel.recompute is Recompute.selective and not model.attends:
        raise ConfigError(
            "parallel.recompute=selective recomputes attention, which tdpp does not find in "
            f"model.family={model.family}; use full or none"
        )


def check_bucketing(model: Model, data: Data) -> None:
    """Whether the samples have lengths to be sorted by."""
    if data.bucketing is not None and not model.traits.translates:
        raise ConfigError(
            f"data.bucketing={data.bucketing} is for translation, where samples have different lengths, not for "
            f"model.family={model.family}; leave it out"
        )


def check_images(model: Model, data: Data, parallel: Parallel) -> None:
    """Rules for images, and for what is theirs alone."""
    family = model.traits
    if not isinstance(family, ImageFamily):
        for key, value in asdict(data.augment).items():
            if value != getattr(Augment(), key):
                raise ConfigError(
                    f"data.augment.{key}={str(value).lower()} is only for models of images, not for "
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
    if train.compile and (parallel.schedule == "zb_h1" or parallel.schedule_file is not None):
        raise ConfigError(
            f"train.compile=true cannot be combined with parallel.schedule={parallel.schedule}"
            + (f" parallel.schedule_file={parallel.schedule_file}" if parallel.schedule_file else "")
            + ": compiled layers cannot delay their weight gradients; use train.compile=false or another schedule"
        )
