"""What is to be searched, from the configurations that `tdpp launch` reads.

Of `parallel` only what a search does not choose counts: the global batch, the schedule, recomputation, the sharded
optimizer and sequence parallelism. So a configuration whose plan does not fit its cluster can be searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from conf.compose import compose_unchecked
from conf.schema import Cluster, Engine, Model, Parallel, Train
from fasop.errors import SearchError
from fasop.hardware import NodeKind, node_kinds
from fasop.training import Training

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    cluster: Cluster
    kinds: Sequence[NodeKind]
    training: Training


def read(overrides: Sequence[str]) -> Inputs:
    """From the overrides of a command line.

    Raises:
        SearchError: Hydra cannot compose them, a value is missing, or a plan cannot be searched with them.
        ConfigError: a rule of a part is broken.
    """
    try:
        cfg = compose_unchecked(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        said = str(error).split("Config search path")[0].strip()
        raise SearchError(
            f"{said}\n'tdpp launch --help' lists the groups, 'tdpp launch --cfg job' every key"
        ) from error
    parallel = _part(cfg, "parallel", Parallel)
    if parallel.schedule_file is not None:
        raise SearchError(
            f"parallel.schedule_file={parallel.schedule_file} cannot be searched: it is of one pipeline size; use "
            "parallel.schedule_file=null"
        )
    cluster, train = _part(cfg, "cluster", Cluster), _part(cfg, "train", Train)
    plain = replace(parallel, tensor=1, data=1, pipeline=1, micro_batch_size=1, partition=None, node_order=None)
    training = Training(
        model=_part(cfg, "model", Model),
        parallel=plain,
        precision=train.precision,
        engine=_part(cfg, "engine", Engine),
    )
    return Inputs(cluster=cluster, kinds=node_kinds(cluster), training=training)


def _part(cfg: DictConfig, name: str, kind: type[T]) -> T:
    try:
        part = OmegaConf.to_object(cfg[name])
    except MissingMandatoryValue as error:
        raise SearchError(f"{error.full_key} has no value: give {error.full_key}=…") from error
    except InterpolationResolutionError as error:
        raise SearchError(f"{error.full_key} cannot be resolved; give {error.full_key}=…") from error
    assert isinstance(part, kind)
    return part
