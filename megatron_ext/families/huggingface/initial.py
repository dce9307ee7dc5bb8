"""Initial weights, as transformers draws them, from generators of their own for each module of the whole model."""

from __future__ import annotations

import zlib
from typing import Any, Dict, Optional

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.library import transformers

SMALL = 1 << 16
"""Numbers in a tensor that an __init__ may make, such as the bounds of an activation."""


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
        left = [(key, one) for key, one in numbers if one.isnan().any()]
        usual = _usual(owner, seed) if left else {}
    for key, one in left:
        whole = f"{name}.{key}" if name else key
        value = next((value for other, value in usual.items() if f".{whole}".endswith(f".{other}")), one)
        if value.is_meta or value.isnan().any():
            raise EngineError(
                f"{type(owner).__name__} cannot be trained from new weights: it leaves {whole} as it finds it in memory"
            )
        one.detach().copy_(value)


def _usual(owner: Any, seed: int) -> Dict[str, Tensor]:
    """What a model's own __init__ gives to its parameters and buffers, by their names in it; only small ones are not on
    the device meta."""
    torch.manual_seed(seed)
    with _Small():
        model = type(owner)._from_config(owner.config, dtype=torch.float32)
    return dict([*model.named_parameters(), *model.named_buffers()])


class _Small(TorchFunctionMode):
    """Memory that is not written to is on the device meta, if there is much of it, else it has no numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones, torch.randn):
            found = func(*args, **{**kwargs, "device": "meta"})
            if found.numel() > SMALL:
                return found
            if func is torch.empty and found.is_floating_point():
                return torch.full(found.shape, torch.nan, dtype=found.dtype)
        return func(*args, **kwargs)


def _fill(module: nn.Module, name: str, owner: Any, seed: int, pretrained: Any) -> None:
    owner = module if isinstance(module, pretrained) else owner
    for key, child in module.named_children():
        _fill(child, f"{name}.{key}" if name else key, owner, seed, pretrained)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    whole = [*module.parameters()]
    if any(not one.is_meta for one in own) or (whole and not any(one.is_meta for one in whole)):
        torch.manual_seed(zlib.crc32(name.encode(), seed))
        owner._init_weights(module)
