"""The tensors of a part of a checkpoint."""

from __future__ import annotations

from typing import Dict

from torch import Tensor

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.checkpoints.safetensors import decoded, read


def read_part(checkpoint: Checkpoint, part: str) -> Dict[str, Tensor]:
    """The tensors of a part of a checkpoint; raises as `read`, if the file does not belong to the checkpoint, and as
    `Kept.read` if it is in the memory of nodes."""
    path = checkpoint.part(part)
    if checkpoint.kept is None:
        return read(path, lambda header: checkpoint.require(part, header))
    return decoded(path, checkpoint.kept.read(part), lambda header: checkpoint.require(part, header))
