"""The rules of PipeDream's pipelines, whose stages update their weights by themselves, without a flush."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.model import Model
from conf.schema.values.partition import Partition
from megatron_ext.contract.models.counts import tied_parameters
from megatron_ext.contract.schedule.streams import PIPEDREAM

SCHEDULE = f"parallel.schedule={PIPEDREAM}"


def check(partition: Partition, model: Model) -> None:
    """Whether such a model can be trained in this way, on stages that hold these layers.

    Raises:
        ConfigError: it cannot.
    """
    layers = partition.layers
    held_by_ends = () if model.measured else (0, len(layers) - 1)
    for stage, count in enumerate(layers):
        if not count and stage not in held_by_ends:
            fewer = Partition(tuple(n for at, n in enumerate(layers) if n or at in held_by_ends))
            raise ConfigError(
                f"parallel.partition={partition} leaves stage {stage} without a layer to update, but {SCHEDULE} needs "
                f"one on each stage: use parallel.pipeline={len(fewer.layers)} parallel.partition={fewer}"
            )
    if len(layers) > 1 and "head.word" in tied_parameters(model.sized(1)):
        raise ConfigError(
            f"model={model.name} shares the word embedding between the first and the last stage, and with {SCHEDULE} "
            f"the two update it at different times; use model.untie_embeddings_and_output_weights=true, or a schedule "
            f"with a flush, such as one_f_one_b"
        )
