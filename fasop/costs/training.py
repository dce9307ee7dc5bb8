"""What is trained and how it is cut; and on which nodes it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from conf.schema.engine import Engine, EngineKind
from conf.schema.model import Model
from conf.schema.values.partition import Partition
from fasop.costs.blocks import Blocks, blocks_of
from fasop.costs.hardware import NodeKind
from fasop.costs.measured_module import MeasuredModule, between
from fasop.costs.network.links import Link
from fasop.costs.parallelism import Parallelism
from fasop.costs.sizes import BYTES
from megatron_ext.contract.models.pieces import Wire
from megatron_ext.contract.parallel_config import GATHERED, Compress, ReduceDtype, Shards, compressed_bytes
from megatron_ext.contract.train_config import Adapters, Precision

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Training:
    """Without a place."""

    model: Model
    parallel: Parallelism
    precision: Precision
    engine: Engine
    kept_values: int = 2
    """`Train.kept_values`."""
    overlaps_optimizer: bool = False
    """`Experiment.overlaps_optimizer`; a search compares plans without it."""
    sync_every: int = 1
    """Iterations after which islands meet."""
    meeting: Link[float] | None = None
    """Latency, and seconds for each byte of a rank's weights, until the islands have summed them, where this is one
    island by itself."""
    adapters: Adapters | None = None
    """`Train.adapters`."""
    in_streams: bool = False
    """Whether any replica has several streams."""

    def __post_init__(self) -> None:
        """A model whose blocks are measured is that of a rank in the plan's tensor group."""
        if isinstance(self.model, MeasuredModule) and self.model.tensor != self.parallel.tensor_size:
            object.__setattr__(self, "model", self.model.of_rank(self.parallel.tensor_size))

    @classmethod
    def of(cls, experiment: Experiment) -> Training:
        every = experiment.train.sync_every
        parallel = Parallelism.of(experiment.parallel)
        if every is not None:
            parallel = replace(parallel, islands=experiment.parallel.islands_of)
        return cls(
            model=experiment.model,
            parallel=parallel,
            precision=experiment.train.precision,
            engine=experiment.engine,
            kept_values=experiment.train.kept_values,
            overlaps_optimizer=experiment.overlaps_optimizer,
            sync_every=every or 1,
            adapters=experiment.train.adapters,
            in_streams=max(experiment.parallel.streams_of) > 1,
        )

    @property
    def islands(self) -> tuple[int, ...]:
        """Replicas of each island; empty where all replicas sum their gradients together."""
        return self.parallel.islands or ()

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES[self.precision]

    @property
    def scatters_messages(self) -> bool:
        """Whether ranks of a tensor group may each send a part of a message; only tdpp's engine does."""
        return self.engine.kind is EngineKind.tdpp and self.parallel.may_scatter

    @property
    def megatron_lm(self) -> bool:
        return self.engine.kind is EngineKind.megatron_lm

    @property
    def equal_only(self) -> bool:
        """Whether the engine has neither stages that differ nor replicas with different shares."""
        return self.engine.kind is not EngineKind.tdpp

    @property
    def offloads(self) -> bool:
        """Whether what the optimizer keeps lies in the memory of the nodes."""
        return self.parallel.any_offload.takes_optimizer

    @property
    def offloads_activations(self) -> bool:
        """Whether what layers keep for their backward passes does."""
        return self.parallel.any_offload.takes_activations

    @property
    def scatters(self) -> bool:
        """Whether replicas sum gradients after each micro-batch, and keep the sums of their share alone."""
        return self.parallel.zero is not None and self.parallel.data > 1

    @property
    def gathers(self) -> bool:
        """Whether replicas keep a share of the weights alone, and gather those of a block for each of its passes."""
        return self.scatters and self.parallel.zero == GATHERED

    @property
    def shares_by_memory(self) -> bool:
        """Whether replicas on unlike GPUs keep unlike parts of what they share out."""
        return self.parallel.shards is Shards.memory and self.parallel.sharded_optimizer and self.parallel.data > 1

    @property
    def offloaded_values(self) -> int:
        """Count the numbers in fp32 that the optimizer keeps of a parameter beside the model's weights; an update
        brings them to the GPU and takes them back if it offloads."""
        steps_weights = self.precision is Precision.fp32 and (not self.parallel.sharded_optimizer or self.gathers)
        return self.kept_values + (not steps_weights)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are summed while the backward pass of earlier layers goes on; those of several streams are
        added up first."""
        if self.in_streams:
            return False
        return not self.megatron_lm or "--overlap-grad-reduce" in self.engine.arguments

    @property
    def blocking(self) -> bool:
        """Whether stages wait until what they send has arrived, as Megatron's do."""
        return self.equal_only

    @property
    def reduces_by_node(self) -> bool:
        """Whether gradients are summed within nodes first, wherever that is faster."""
        parallel = self.parallel
        return parallel.hierarchical_reduce and parallel.alike and parallel.stream is None and not self.megatron_lm

    @property
    def reduced_bytes(self) -> int:
        """Return the bytes of a parameter's gradient, as the replicas send it to each other to sum."""
        half = not self.megatron_lm and self.parallel.reduce_dtype is ReduceDtype.bf16
        return 2 if half else self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of a parameter's gradient, as a rank has it, and as stages that share a parameter sum it.

        tdpp's engine sums in fp32. Megatron-LM does too, but for fp16, whose gradients stay 16 bit unless it is told
        --accumulate-allreduce-grads-in-fp32.
        """
        half = self.megatron_lm and self.precision is Precision.fp16
        return 2 if half and "--accumulate-allreduce-grads-in-fp32" not in self.engine.arguments else 4

    @cached_property
    def blocks(self) -> Blocks:
        """Return the model's blocks."""
        return blocks_of(self.model)

    @cached_property
    def known_memory(self) -> dict[float | None, Any]:
        """What `fasop.simulation.capacity` has worked out of its stages' memory, by the part that a rank keeps of what
        replicas share out: a search asks for it on many sets of nodes."""
        return {}

    @property
    def crossing(self) -> list[int]:
        """Bytes of what crosses a cut for a micro-batch, as a rank has it, behind so many layers from none to all."""
        if isinstance(self.model, MeasuredModule):
            return self.model.messages(self.parallel.micro_batch_size)
        numbers = self.blocks.crossing
        sizes = {one: self._bytes_crossing(one) for one in set(numbers)}
        return [sizes[one] for one in numbers]

    @cached_property
    def messages(self) -> list[int]:
        """Bytes that a rank sends to the next stage for it, and as many come back."""
        sizes = self.crossing
        sent = {size: self._sent(size) for size in set(sizes)}
        return [sent[size] for size in sizes]

    @property
    def wires(self) -> list[Wire]:
        """What leads from a layer to others, of which `numbers` are the bytes sent for a micro-batch; none: a profile
        does not know them."""
        if isinstance(self.model, MeasuredModule):
            sizes, batch = self.model.sizes, self.parallel.micro_batch_size
            return [
                Wire(wire.giver, wire.takers, self._sent(round(between(sizes, wire.bytes, batch))))
                for wire in self.model.wires
            ]
        wires = self.model.traits.wires(self.model.sized(1))
        return [wire._replace(numbers=self._sent(self._bytes_crossing(wire.numbers))) for wire in wires]

    def _sent(self, size: int) -> int:
        """Return the bytes in which so many bytes of activations are sent."""
        return size if self.parallel.compress is Compress.none else compressed_bytes(size // self.width)

    def _bytes_crossing(self, numbers: int) -> int:
        """Return the bytes of so many numbers of a sample, which a rank has of a micro-batch."""
        whole = int(self.parallel.own_samples * numbers * self.width)
        return whole // self.parallel.tensor_size if self.parallel.sequence_parallel else whole


@dataclass(frozen=True, kw_only=True)
class PlacedTraining:
    """A training on its nodes."""

    training: Training
    partition: Partition
    nodes: Sequence[NodeKind]
    """In their order."""

    def sized(self, micro_batch_size: int) -> PlacedTraining:
        """With as many micro-batches, each of so many samples."""
        parallel = self.training.parallel
        batch = parallel.global_batch_size // parallel.micro_batch_size * micro_batch_size
        sized = replace(parallel, micro_batch_size=micro_batch_size, global_batch_size=batch)
        return replace(self, training=replace(self.training, parallel=sized))

    @property
    def kinds(self) -> list[NodeKind]:
        """List the kinds of the nodes, each once."""
        return [*{node.name: node for node in self.nodes}.values()]
