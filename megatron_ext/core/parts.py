"""The parts of megatron.core's model on one rank, each by itself as its schedules call them: for measuring."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Dict, List, Optional

import torch
from torch import Tensor

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.core import library
from megatron_ext.core.families import family_of
from megatron_ext.core.optimizer import CoreOptimizer
from megatron_ext.core.parameters import parameters
from megatron_ext.core.settings import forward_options, make_groups, model_config, replicas_config
from megatron_ext.families.gpt.options import GptOptions
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import Task

KINDS = ("embedding", "layer", "head")


def versions(plan: Plan) -> Dict[str, str]:
    """Returns what layers are made of, by package. Raises EngineError: megatron.core is not here, or too old."""
    found = library.load(plan)
    names = ["megatron-core", *(["transformer-engine"] if found.transformer_engine else [])]
    return {name: version(name) for name in names}


def tensor_group(plan: Plan, size: int) -> TensorGroup:
    """Makes megatron.core's groups anew, with tensor groups of `size` ranks that follow each other. All ranks call it,
    and `size` divides their number.

    Experts' layers share the sequence in it, as megatron.core wants.
    """
    library.load(plan)
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    make_groups(replace(plan, tensor=size), timedelta(seconds=plan.train.comm_timeout_s))
    if size == 1:
        return TensorGroup()
    own = parallel_state.get_tensor_model_parallel_group()
    shares_sequence = plan.model.own(GptOptions).experts is not None
    return TensorGroup(size, parallel_state.get_tensor_model_parallel_rank(), own, shares_sequence)


class ModelParts:
    """The embedding, some layers, and the head of a model, with their gradients' buffers and optimizer."""

    def __init__(self, plan: Plan, model: ModelConfig, tensor: TensorGroup, task: Task) -> None:
        """`model` has the layers that are wanted, `task` is its task, and `tensor` is of `tensor_group`."""
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.transformer.module import Float16Module

        whole = replace(
            plan,
            model=model,
            tensor=tensor.size,
            data=1,
            context=None,
            pipeline=1,
            chunks=1,
            partition=[model.layers],
            sequence_parallel=tensor.sequence_parallel,
            recompute=Recompute.none,
        )
        found = library.load(plan)
        config = model_config(whole, found)
        cut = replace(whole, pipeline=len(KINDS), partition=[0, model.layers, 0])
        stages = range(len(KINDS))
        self._family = family_of(cut)
        self._chunks: List[Any] = [self._family.make(config, found, stage) for stage in stages]
        named = parameters(cut, task, self._chunks, stages, 0)
        half = config.fp16 or config.bf16
        self._options = forward_options(config)
        self._replicas: List[Any] = [
            DistributedDataParallel(
                config, replicas_config(whole), Float16Module(config, chunk) if half else chunk, disable_bucketing=True
            )
            for chunk in self._chunks
        ]
        self.optimizer = CoreOptimizer(whole, self._replicas, named)
        initial = torch.zeros(self.optimizer.flat.numel)
        for name in named:
            task.initialise(name, self.optimizer.flat.view(name, initial), tensor)
        self.optimizer.load({WEIGHTS: initial}, 0)
        self._weights = {one.tensor.untyped_storage().data_ptr() for one in named.values()}
        self.numel = sum(one.tensor.numel() for one in named.values())
        """Weights of this rank."""
        self._positions = torch.arange(model.sequence_length, device=torch.device(plan.device)).unsqueeze(0)

    def forward(self, stage: int, entered: Optional[Tensor], tokens: Optional[Tensor]) -> Tensor:
        """What leaves a part; of the last one, the logits."""
        if entered is not None:
            self._chunks[stage].set_input_tensor(entered)
        inputs = {} if tokens is None else {"tokens": tokens}
        return self._family.forward(self._replicas[stage], inputs, self._positions, **self._options)

    def are_weights(self, address: int) -> bool:
        """Whether a storage at this address is one of the weights'."""
        return address in self._weights

    def zero_gradients(self) -> None:
        """Sets gradients to zero, as an iteration does before its passes."""
        for replica in self._replicas:
            replica.zero_grad_buffer()
        self.optimizer.inner.zero_grad()

    def fill_gradients(self, value: float) -> None:
        """Has an update find these gradients."""
        for replica in self._replicas:
            for buffer in (*replica.buffers, *replica.expert_parallel_buffers):
                buffer.grad_data.fill_(value)

    def update(self, lr: float) -> None:
        """One update of all weights, after which gradients are zero."""
        self.optimizer.step(lr)
        self.zero_gradients()
