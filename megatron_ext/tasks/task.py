"""What is trained: a model made of blocks, its micro-batches and its loss. Every model family is a `Task`.

A stage of the pipeline holds blocks; what crosses a cut between stages follows from the wires that the blocks take and
give (`megatron_ext.tasks.cut`). Nothing else in the engine knows what a model is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.data.samples import Samples
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type for each precision of a run."""
Tensors = Dict[str, Tensor]
"""Tensors by the name of a wire, an input or a target."""
LOGGED = (
    *("iteration", "unix", "consumed_samples", "elapsed_ms", "learning_rate", "loss", "loss_scale", "grad_norm"),
    *("samples_per_s", "tokens_per_s", "tflops_per_rank", "skipped", "nan"),
    *("consumed samples", "learning rate", "global batch size", "lm loss", "loss scale", "grad norm"),
)
"""Names in metrics.jsonl and in a log line, which no metric of a task can have."""
SEQUENCE, DECODER_SEQUENCE = "sequence", "decoder sequence"
"""The dimensions that sequence parallelism cuts."""


class Wire(NamedTuple):
    """A tensor that a block gives, and that crosses a cut if a block of a later stage takes it."""

    name: str
    dims: Tuple[Union[int, str], ...]
    """Sizes, or their names in `Task.sizes`."""
    dtype: Optional[torch.dtype] = None
    """None: the number format of the model."""
    gradient: bool = True
    """Whether a gradient comes back."""
    exact: bool = False
    """Whether it is sent as it is, though `parallel.compress` has activations sent in 8 bits."""


class Placement(Enum):
    """Which stage has a block."""

    COUNTED = "the stage that the partition says, which counts it"
    FIRST = "the first stage"
    LAST = "the last stage"
    NEXT = "the stage of the block that follows"


class Block(NamedTuple):
    """The smallest thing that a stage holds."""

    name: str
    """In the whole model: `layers.7`. A parameter's name begins with it."""
    kind: str
    """Blocks of one kind have the same shapes, and cost the same."""
    takes: Tuple[str, ...]
    """Wires, and inputs of the micro-batch, in the order of the module's arguments."""
    gives: Tuple[str, ...]
    make: Callable[[TensorGroup], nn.Module]
    """Makes the module, or a rank's share of it: from what it takes to what it gives (a tuple, if several)."""
    placement: Placement = Placement.COUNTED


class Micro(NamedTuple):
    """A micro-batch on a rank."""

    inputs: Tensors
    """What blocks of any stage may take."""
    targets: Tensors
    """What the loss takes beside the model's outputs."""
    first: int = 0
    """The number of its first sample, over the run."""
    weight: Optional[Tensor] = None
    """One number: what its loss, which is a sum, is the sum of: samples, or target tokens. None: its loss is a mean.

    The sums of a global batch are divided by its weight; of means, the mean is taken.
    """
    sizes: Mapping[str, int] = {}
    """The named sizes of its wires that are not the task's own (`Samples.sizes`)."""

    def to(self, device: torch.device) -> Micro:
        inputs, targets = ({name: one.to(device) for name, one in part.items()} for part in self[:2])
        return self._replace(inputs=inputs, targets=targets)


class Task(ABC):
    """A model with its loss, whatever stages, replicas and tensor groups it is laid out over."""

    blocks: Sequence[Block]
    """In an order in which every wire is given before it is taken."""
    wires: Mapping[str, Wire]
    inputs: Tuple[str, ...]
    """The names in `Micro.inputs`."""
    outputs: Tuple[str, ...]
    """The wires that the loss takes."""
    tied: Mapping[str, str] = {}
    """Parameters that are equal to others: by the copy's name, that of the owner, whose block comes first."""

    @abstractmethod
    def samples(self, split: str, count: int) -> Samples:
        """At least so many samples of `train`, `valid` or `test`; what `micro` takes is under its names there.

        Rank 0 calls it before the others, so that work whose result lies in files is done once.

        Raises:
            DataError: the data cannot be used.
        """

    def sizes(self, micro_batch_size: int) -> Mapping[str, int]:
        """The named sizes of the wires, of a micro-batch."""
        return {}

    def wires_at(self, micro_batch_size: int) -> Mapping[str, Wire]:
        """The wires of micro-batches of another size, as the last ones of an evaluation may be. The same, where a size
        has a name, or the batch is a dimension of its own. Raises EngineError: the model takes none of that size."""
        return self.wires

    @abstractmethod
    def micro(self, sample: Tensors) -> Micro:
        """A micro-batch from what the samples hold, [micro-batch size, …] each."""

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        """A micro-batch of the right shapes, with content drawn from `source`; by default the first samples."""
        return self.micro_of(self.samples("train", micro_batch_size), np.arange(micro_batch_size))

    def micro_of(self, samples: Samples, numbers: NDArray[np.int64]) -> Micro:
        """The micro-batch of the samples with these numbers."""
        sample = {name: torch.from_numpy(array) for name, array in samples.batch(numbers).items()}
        return self.micro(sample)._replace(first=int(numbers[0]))

    @abstractmethod
    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The loss of a micro-batch, one number: a mean, or a sum if the micro-batch has a weight."""

    def metrics(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensors:
        """What is logged beside the loss: by name one number each, a mean or a sum as the loss is."""
        return {}

    def expert_loads(self, left: Tensors, micro: Micro) -> Optional[Tensor]:
        """[layers, experts]: how many times as many tokens as the mean each expert got, a mean or a sum as the loss is;
        None: the model has no experts."""
        return None

    def epoch(self, split: str) -> Optional[int]:
        """How many samples a split has; None: it has no end, or only the samples of several corpora have one."""
        return None

    def evaluated(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """What an evaluation is to show, from the means over its samples of the `loss` and the task's metrics."""
        return means

    @abstractmethod
    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Fills a rank's share of a parameter: the same in the whole model, however it is laid out."""

    def shard(self, name: str) -> Optional[Shard]:
        """How the parameter of this name is cut over a tensor group; None: every rank has it whole."""
        return None

    def adopt(self, name: str, shape: Sequence[int]) -> None:
        """Takes in a parameter of a block that only another engine's layers have, whole on every rank."""
        raise NotImplementedError

    def rows(self, name: str) -> Optional[int]:
        """How many rows of a parameter count, if the others only pad it; None: all do."""
        return None

    def published(self, files: Mapping[str, Path], block: str) -> Tensors:
        """A block's parameters, and what it has that is not trained, in fp32 by their names there, from weights that
        others published; for families that read them. `files` has the file of each of their tensors.

        Raises:
            EngineError: they lack some, or cannot be read.
        """
        raise NotImplementedError

    def publish(self, content: Callable[[str], Tensors], folder: Path, adapters: bool = False) -> None:
        """Writes config.json and the weights as their publishers do into `folder`, or the adapters alone; for the same
        families. `content` gives what a checkpoint has of a block.

        Raises:
            EngineError: the model cannot be published, or `folder` not be written.
        """
        raise NotImplementedError


def ties(parameters: Sequence[Tuple[str, object]]) -> Dict[str, str]:
    """The names of parameters that are others', which come before them: by the copy's name, that of the owner."""
    owner: Dict[int, str] = {}
    found = [(name, owner.setdefault(id(one), name)) for name, one in parameters]
    return {name: first for name, first in found if first != name}


def kinds_of(keys: Sequence[Tuple[object, ...]]) -> Sequence[str]:
    """A name for each block, the same where its key is, which begins with a word: `layer`, `layer-2` and so on."""
    found: Dict[Tuple[object, ...], str] = {}
    for key in keys:
        same = sum(one[0] == key[0] for one in found)
        found.setdefault(key, f"{key[0]}-{same + 1}" if same else str(key[0]))
    return [found[key] for key in keys]


class Running(nn.Module):
    """A module with running statistics, such as a batch norm's, that are the same however micro-batches are laid out.

    Its forward passes gather a vector each; their mean over an iteration's micro-batches updates it. A pass itself
    uses what it finds in its own micro-batch, and what was gathered only counts at the iteration's end.
    """

    keeps_format = True
    """Its buffers stay in fp32, whatever the model's number format is."""
    gathered: Tensor
    """The sum over the micro-batches of this rank: a buffer that no checkpoint has."""

    @abstractmethod
    def update(self, mean: Tensor) -> None:
        """Takes the mean over all micro-batches of an iteration, of `gathered`'s shape."""
