"""Pretended GPUs for a block of code and all that is forked in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch._dynamo  # both modes need it: once here, not in every process that is forked
import torch.distributed as dist

from tests.support.megatron_ext.pretended_cuda import Cuda, resolve
from tests.support.megatron_ext.pretended_nccl import Nccl
from tests.support.megatron_ext.pretended_tensors import Calls, Gpus, Operations, grouping, properties

COUNT = 4


@contextmanager
def pretended_gpus(forks: bool = True) -> Iterator[Gpus]:
    """In the block torch has some GPUs and NCCL.

    With `forks` only processes that are forked in it may use the GPUs.
    """
    gpus = Gpus(COUNT)
    cuda = Cuda(gpus, os.getpid() if forks else None)
    with ExitStack() as stack:
        for name in cuda.doubles:
            stack.enter_context(patch.object(*resolve(name), cuda.checked(name)))
        for name, double in Nccl(gpus).doubles.items():
            stack.enter_context(patch.object(dist, name, double))
        for name, double in properties(gpus).items():
            stack.enter_context(patch.object(torch.Tensor, name, double))
        optimizer = torch.optim.Optimizer
        stack.enter_context(patch.object(optimizer, "_group_tensors_by_device_and_dtype", staticmethod(grouping())))
        stack.enter_context(Operations(gpus))
        stack.enter_context(Calls(gpus))
        yield gpus
