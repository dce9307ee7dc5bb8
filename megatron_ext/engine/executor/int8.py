"""Numbers in 8 bits, by block: what goes from stage to stage with `parallel.compress=int8`.

A block's scale is its largest absolute number divided by 127; each number is rounded to a multiple of it, half to even.
Where a block has a number that is not finite, nothing of what is restored is, so that fp16's loss scaler notices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_ext.contract.parallel_config import BLOCK, SCALE_BYTES, compressed_bytes

LARGEST = 127


def quantised(numbers: Tensor) -> Tensor:
    """Returns int8 [`compressed_bytes(n)`] from n numbers of any shape: the scales' bytes, then the rounded numbers."""
    flat = numbers.detach().flatten().float()
    count, blocks = flat.numel(), -(-flat.numel() // BLOCK)
    rows = pad(flat, (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    scales = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True) / LARGEST
    rounded = (rows / scales).round_().clamp_(-LARGEST, LARGEST)  # of zeros 0 / 0, which a scale of 0 restores as 0
    found = torch.empty(compressed_bytes(count), dtype=torch.int8, device=flat.device)
    found[: SCALE_BYTES * blocks].view(torch.float32).copy_(scales.view(-1))
    found[SCALE_BYTES * blocks :].copy_(rounded.view(-1)[:count])
    return found


def restored(message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Returns the `count` numbers [`count`] of what `quantised` gives, in another number format."""
    blocks = -(-count // BLOCK)
    scales = message[: SCALE_BYTES * blocks].view(torch.float32)
    rows = pad(message[SCALE_BYTES * blocks :], (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    return (rows * scales.view(blocks, 1)).view(-1)[:count].to(dtype)
