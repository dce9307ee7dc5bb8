"""How a search cuts a model and a batch: numbers and tuples instead of a configuration's texts, which nothing checks.

A search looks at thousands of plans that keep the rules because of how they are made. Only those that are shown become
configurations (`configured`), whose rules are checked then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from conf.schema.parallel import Parallel
from conf.schema.values.islands import BY_ISLAND
from conf.schema.values.partition import AUTO, NodeOrder, Partition, Shares, depth_in, numbers_in, run_length_text
from megatron_ext.contract.layout import Layout, PlacedPlan
from megatron_ext.contract.parallel_config import (
    SCATTERED,
    SCATTERS,
    Compress,
    Offload,
    Recompute,
    ReduceDtype,
    Schedule,
    Shards,
)
from megatron_ext.contract.schedule.streams import Semantics, Stream

Numbers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Parallelism(PlacedPlan):
    """A plan without its model; every field but `data` means what the key of `conf.schema.parallel.Parallel` means."""

    tensor: int | Numbers = 1
    """One size for all stages, or by stage."""
    data: int = 1
    """Ranks of a stage that have the same weights: replicas times `context`."""
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    partition: Numbers | None = None
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.none
    sharded_optimizer: bool = False
    zero: int | Numbers | None = None
    """One for all stages, or by stage."""
    shards: Shards = Shards.equal
    offload: Offload | tuple[Offload, ...] = Offload.none
    """One for all stages, or by stage."""
    reduce_dtype: ReduceDtype = ReduceDtype.fp32
    compress: Compress = Compress.none
    scatter_messages: str = SCATTERS[0]
    hierarchical_reduce: bool = False
    micro_batch_size: int = 1
    global_batch_size: int
    schedule: Schedule = Schedule.one_f_one_b
    chunks: int = 1
    replicas: Numbers | None = None
    """Replicas of each stage; None: `data` in every stage."""
    shares: Numbers | None = None
    """Micro-batches of each replica; None: equal."""
    streams: Numbers | None = None
    """Streams of each replica; None: one each."""
    islands: Numbers | None = None
    """Replicas of each island, where there are islands."""
    own_plans: tuple[Parallelism, ...] = ()
    """The plan of each island by itself, with its layers by stage, where islands have plans of their own."""
    semantics: Semantics = Semantics.stashing
    update_every: int = 1
    depth: Numbers | None = None
    """Forward passes of each stage before its first backward pass."""
    node_order: tuple[str, ...] | None = None

    @classmethod
    def of(cls, parallel: Parallel) -> Parallelism:
        """The plan of a configuration; values that are still to be chosen (`auto`) count as not given."""
        own = tuple(map(cls.of, parallel.own_plans))
        if own:
            parallel = replace(parallel, tensor=parallel.tensor_size, partition=None)
        return cls(
            own_plans=own,
            tensor=parallel.tensor if isinstance(parallel.tensor, int) else numbers_in(parallel.tensor),
            data=parallel.data * parallel.context,
            pipeline=parallel.pipeline,
            expert=parallel.expert,
            context=parallel.context,
            partition=None if parallel.partition is None else Partition.parse(parallel.partition).layers,
            sequence_parallel=parallel.sequence_parallel,
            recompute=parallel.recompute,
            sharded_optimizer=parallel.sharded_optimizer,
            zero=parallel.zeros if isinstance(parallel.zero, str) else parallel.zero,
            shards=parallel.shards,
            offload=parallel.offload if isinstance(parallel.offload, Offload) else parallel.offloads,
            reduce_dtype=parallel.reduce_dtype,
            compress=parallel.compress,
            scatter_messages=parallel.scatter_messages,
            hierarchical_reduce=parallel.hierarchical_reduce,
            micro_batch_size=parallel.micro_batch_size,
            global_batch_size=parallel.global_batch_size,
            schedule=parallel.schedule,
            chunks=parallel.chunks,
            replicas=None if parallel.replicas is None else numbers_in(parallel.replicas),
            shares=None if parallel.shares in (None, AUTO) else Shares.parse(parallel.shares).numbers,
            streams=None if parallel.streams in (None, AUTO) else parallel.streams_of,
            semantics=parallel.semantics,
            update_every=parallel.update_every,
            depth=None if parallel.depth is None else depth_in(parallel.depth),
            node_order=None if parallel.node_order is None else NodeOrder.parse(parallel.node_order).groups,
        )

    def configured(self) -> Parallel:
        """The same plan as a configuration has it. Raises ConfigError: it breaks a rule."""
        own = [one.configured() for one in self.own_plans]
        tensor = self.tensor if isinstance(self.tensor, int) else run_length_text(self.tensor, "-")
        partition = None if self.partition is None else str(Partition(self.partition))
        return Parallel(
            tensor=_by_island([one.tensor for one in own]) if own else tensor,
            data=self.data // self.context,
            pipeline=self.pipeline,
            expert=self.expert,
            context=self.context,
            partition=str(_by_island([str(one.partition) for one in own])) if own else partition,
            sequence_parallel=self.sequence_parallel,
            recompute=self._launched_recompute(),
            sharded_optimizer=self.sharded_optimizer,
            zero=run_length_text(self.zero, "-") if isinstance(self.zero, tuple) else self.zero,
            shards=self.shards,
            offload=run_length_text(self.offload, "-") if isinstance(self.offload, tuple) else self.offload,
            reduce_dtype=self.reduce_dtype,
            compress=self.compress,
            scatter_messages=self.scatter_messages if self.may_scatter else SCATTERS[0],
            hierarchical_reduce=self.hierarchical_reduce,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            schedule=self.schedule,
            chunks=self.chunks,
            replicas=None if self.replicas is None else run_length_text(self.replicas, "-"),
            shares=None if self.shares is None else str(Shares(self.shares)),
            streams=None if self.streams is None else streams_text(self.streams),
            islands=None if self.islands is None else run_length_text(self.islands, "-"),
            semantics=self.semantics,
            update_every=self.update_every,
            depth=None if self.depth is None else "-".join(map(str, self.depth)),
            node_order=None if self.node_order is None else str(NodeOrder(self.node_order)),
        )

    def _launched_recompute(self) -> Recompute:
        """Return what a launch takes, which refuses more layers than any stage has."""
        of_stages = [
            sum(one.partition[stage :: one.pipeline])
            for one in self.own_plans or (self,)
            if one.partition is not None
            for stage in range(one.pipeline)
        ]
        most = max(of_stages, default=0)
        alone = len(self.recompute.stages) == 1 and (self.recompute.layers or 0) > most > 0
        return Recompute.full if alone else self.recompute

    @cached_property
    def layout(self) -> Layout:
        """Where ranks stand."""
        if self.own_plans:
            return Layout.joined([own.layout for own in self.own_plans])
        tensors = (self.tensor,) * self.pipeline if isinstance(self.tensor, int) else self.tensor
        return Layout(tensors, self.replicas or (self.data,) * self.pipeline)

    @cached_property
    def alike(self) -> bool:
        """Whether all stages have tensor groups of one size, as many replicas, and keep the same of what is theirs."""
        layout, keep = self.layout, (self.zero, self.offload)
        even = layout.even and len({*layout.tensors}) == 1 and len(self.recompute.stages) == 1
        return even and not any(isinstance(one, tuple) for one in keep)

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """What the ranks of each stage keep in their host's memory."""
        return self.offload if isinstance(self.offload, tuple) else (self.offload,) * self.pipeline

    @cached_property
    def any_offload(self) -> Offload:
        """What the ranks of any stage keep there."""
        return Offload.together(self.offload) if isinstance(self.offload, tuple) else self.offload

    def of_stage(self, stage: int) -> Parallelism:
        """Return the same plan, whose stages all keep what this one keeps."""
        if not any(isinstance(one, tuple) for one in (self.zero, self.offload)) and len(self.recompute.stages) == 1:
            return self
        zero = self.zero[stage] if isinstance(self.zero, tuple) else self.zero or int(self.sharded_optimizer)
        return replace(
            self,
            sharded_optimizer=zero > 0,
            zero=zero if zero >= SCATTERED else None,
            offload=self.offloads[stage],
            recompute=self.recompute.of_stage(stage),
        )

    @property
    def may_scatter(self) -> bool:
        """Whether ranks of tensor groups of one size may each send a part of a message that all of them have."""
        tensors = self.layout.tensors
        alike = len({*tensors}) == 1 and tensors[0] > 1 and self.pipeline > 1
        return self.scatter_messages != SCATTERS[0] and alike and not self.sequence_parallel

    @property
    def first_replicas(self) -> int:
        """Replicas of the first stage."""
        return self.replicas[0] if self.replicas else self.data

    @property
    def own_samples(self) -> float:
        """What a rank has of a micro-batch: its samples, or as many tokens of those that ranks share."""
        return self.micro_batch_size if self.context == 1 else self.micro_batch_size / self.context

    @property
    def stream(self) -> Stream | None:
        """How micro-batches stream through the stages; None with a schedule that flushes."""
        if self.schedule.definition.flushes:
            return None
        return Stream(self.layout.replicas, self.semantics, self.update_every, self.depth)

    @property
    def streams_of(self) -> Numbers:
        """Copies of the model on a GPU, by replica."""
        return self.streams or (1,) * self.first_replicas

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches that a replica runs in an iteration; where replicas differ, the most."""
        count = self.global_batch_size // self.micro_batch_size
        if self.shares:
            return max(self.micro_batches_of)
        if len({*(self.replicas or ())}) > 1 or not self.schedule.definition.flushes:
            return -(-count // min(self.replicas or (self.data,)))
        return count // (self.first_replicas // self.context)

    @cached_property
    def micro_batches_of(self) -> Numbers:
        """Count the micro-batches of each of the ranks with the same weights, where all stages have as many."""
        shares = Shares(self.shares or (1,) * (self.first_replicas // self.context))
        counts = shares.of(self.global_batch_size // self.micro_batch_size)
        return counts if self.context == 1 else tuple(count for count in counts for _ in range(self.context))


def streams_text(streams: Numbers) -> str:
    """Copies of the model by replica, as `parallel.streams` takes them."""
    return str(streams[0]) if len({*streams}) == 1 else run_length_text(streams, "-")


def _by_island(values: list[int | str]) -> int | str:
    """One value where all islands have the same."""
    return values[0] if len({*values}) == 1 else BY_ISLAND.join(map(str, values))
