"""Initial weights, as transformers draws them, from generators of their own for each module of the whole model."""

from __future__ import annotations

import zlib
from typing import Any, Optional

import torch
from torch import nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.library import transformers


def fill(root: nn.Module, name: str, owner: Optional[Any], seed: int) -> None:
    """Fills parameters and buffers below `root`, which is called `name` in the whole model, where they are not on the
    device meta. `owner` is the model of transformers that it is a part of; None: itself.

    The same, whatever else of the model is there: each module's numbers follow from its name and the seed.

    Raises:
        EngineError: the model leaves numbers that are not drawn.
    """
    pretrained = transformers().PreTrainedModel
    every = [*root.named_parameters(), *root.named_buffers()]
    numbers = [(key, one) for key, one in every if not one.is_meta and one.is_floating_point()]
    for _, one in numbers:
        one.detach().fill_(torch.nan)
    if owner is None:
        owner = next(one for one in root.modules() if isinstance(one, pretrained))
    with torch.random.fork_rng([]):
        _fill(root, name, owner, seed, pretrained)
    for key, one in numbers:
        if one.isnan().any():
            raise EngineError(
                f"{type(owner).__name__} cannot be trained from new weights: its _init_weights leaves "
                f"{f'{name}.{key}' if name else key} as it finds it in memory"
            )


def _fill(module: nn.Module, name: str, owner: Any, seed: int, pretrained: Any) -> None:
    owner = module if isinstance(module, pretrained) else owner
    for key, child in module.named_children():
        _fill(child, f"{name}.{key}" if name else key, owner, seed, pretrained)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    whole = [*module.parameters()]
    if any(not one.is_meta for one in own) or (whole and not any(one.is_meta for one in whole)):
        torch.manual_seed(zlib.crc32(name.encode(), seed))
        owner._init_weights(module)
