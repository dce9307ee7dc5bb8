"""The tensors of a part of a checkpoint."""

from __future__ import annotations

from typing import Dict

from torch import Tensor

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.checkpoints.safetensors import read


def read_part(checkpoint: Checkpoint, part: str) -> Dict[str, Tensor]:
    """The tensors of a part of a checkpoint; raises as `read`, and if the file does not belong to the checkpoint."""
    return read(checkpoint.part(part), lambda header: checkpoint.require(part, header))
