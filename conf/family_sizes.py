"""Sizes of a model that follow from its family: those that it does not have, and blocks that can be counted."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf.schema.values.ranges import MOST_LAYERS
from megatron_ext.contract.models.images import counted_blocks
from megatron_ext.contract.models.keys import DEPTHS
from megatron_ext.contract.models.model import SIZES, Family, ModelConfig, family_named, family_names


def fill_sizes(model: DictConfig) -> None:
    """Sets sizes that the model's family does not have to 0, and `layers` where its blocks follow from other keys.

    Only what has no value yet; what is wrong with the other keys is for the schema to say.
    """
    name = str(model.get("family")).removeprefix("Family.")
    if name not in family_names():
        return
    family = family_named(name)
    for key in family.lacks:
        if OmegaConf.is_missing(model, key):
            model[key] = 0
    if family.counts_all and not family.user_code and OmegaConf.is_missing(model, "layers"):
        model.layers = _count(family, model)


def _count(family: Family, model: DictConfig) -> int:
    """Its blocks; 1 where they cannot be counted, for a key is missing or wrong."""
    keys = (*family.needs, "channels", "width")
    depths = str(model.depths or "1")
    if any(model.get(key) is None for key in keys) or not re.fullmatch(DEPTHS, depths):
        return 1
    if sum(map(int, depths.split("-"))) > MOST_LAYERS:
        return 1
    sizes: dict[str, Any] = dict.fromkeys(("layers", *SIZES), 0)
    return len(counted_blocks(ModelConfig(family=family.name, **sizes, **{key: model[key] for key in keys})))
