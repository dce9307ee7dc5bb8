"""Runs a schedule: takes the actions of one rank in their order, whatever they are."""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, ContextManager, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from megatron_ext.contract.events import ACTIVATIONS, GRADIENTS
from megatron_ext.contract.schedule.replay import AnyAction
from megatron_ext.contract.schedule.schedules import Action, Kind
from megatron_ext.engine.executor.gathering import BlockWeights, Pass
from megatron_ext.engine.executor.host_activations import HostActivations
from megatron_ext.engine.executor.messages import Channels, Content, Message, actions_by_channel
from megatron_ext.engine.executor.pace import Pace
from megatron_ext.engine.results import Stopwatch
from megatron_ext.parallel.comm import Inbox, Outbox
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import Micro, Tensors
from megatron_ext.timeline.recorder import NOTHING, Recorder

Key = Tuple[int, int]
"""A micro-batch in a chunk."""
Sizes = Tuple[Tuple[str, int], ...]
"""What is in `Micro.sizes`, sorted."""
Factor = Union[float, Tensor]
LOSS = "loss"
"""What leaves the last stage, by name."""
_TRAFFIC = {Kind.SEND_FORWARD: ACTIVATIONS, Kind.SEND_BACKWARD: GRADIENTS}
_SIZES_KEPT = 8
"""For which messages are kept: few, for they hold tensors like those that are sent."""


class Chunk(NamedTuple):
    """A virtual stage of a rank, and the messages over the cuts before and after it; those at the ends are empty."""

    stage: Stage
    entering: Message
    leaving: Message


ChunksOf = Callable[..., Sequence[Chunk]]
"""Gives a rank's chunks, of micro-batches with the `Sizes` that it is given; of the usual ones without."""


class Executor:
    """The forward and backward passes of one rank's chunks, and the messages to its neighbours.

    A message has no label: the k-th receive of a kind takes the k-th message that the neighbour sent, which is the
    right one in every schedule that `megatron_ext.contract.schedule.schedules` makes or
    `megatron_ext.contract.schedule.check` lets pass. Sends and the next receives go on while the rank computes; only a
    receive can make it wait.

    On GPUs only activations are received meanwhile. If gradients were, too, stages could wait for each other for ever
    wherever CUDA makes two of them wait for all that their GPUs have begun: while it frees memory, or loads a kernel.
    """

    _sent_with_gradients: Sequence[Content] = ()
    """What is sent back with them."""
    stopwatch: Optional[Stopwatch] = None
    """What is to know when it waits for other stages."""
    host: Optional[HostActivations] = None
    """What has activations where the plan keeps them in the host's memory."""
    weights: Optional[BlockWeights] = None
    """What has the weights of blocks where replicas keep a share of them."""

    def __init__(
        self,
        chunks_of: ChunksOf,
        peers: Channels,
        later: WeightGradients,
        recorder: Recorder,
        loss: Callable[[Tensors, Micro], Tensor],
        pace: Pace,
    ) -> None:
        """`chunks_of` gives the chunks; for micro-batches that have sizes of their own, from these. `peers` is what
        `channels` gives.

        `later` is where the chunks' blocks leave what a backward pass of the inputs alone puts off. `loss` takes what
        leaves the last stage.
        """
        self._later = later
        self._recorder = recorder
        self._loss = loss
        self._pace = pace
        self.resize(chunks_of)
        self._sizes: Dict[int, Sizes] = {}
        """The sizes of micro-batches that have their own, by number."""
        self._inboxes = {
            kind: [[Inbox(peer, what, ahead and len(ways) == 1) for peer in way] for way in ways]
            for kind, what, ahead in (
                (Kind.RECV_FORWARD, "activations", True),
                (Kind.RECV_BACKWARD, "gradients", False),
            )
            if (ways := peers.get(kind)) is not None
        }
        """Inboxes for each kind and, as in `peers`, each micro-batch."""
        self._outboxes = {
            kind: [[Outbox(peer, what) for peer in way] for way in peers[kind]]
            for kind, what in ((Kind.SEND_FORWARD, "activations"), (Kind.SEND_BACKWARD, "gradients"))
            if kind in peers
        }
        self._entered: Dict[Key, Tensors] = {}
        self._left: Dict[Key, Tensors] = {}
        self._gradients_left: Dict[Key, Tensors] = {}
        """The gradients of what left the chunk, as received."""
        self._gradients_entered: Dict[Key, Tensors] = {}
        """The gradients of what entered it, to be sent."""
        self._losses: List[Tensor] = []

    def resize(self, chunks_of: ChunksOf) -> None:
        """Has micro-batches have another number of samples from the next iteration on, with the same stages."""
        self._chunks = chunks_of()
        self._messages = self._by_kind(self._chunks)
        self._messages_of = lru_cache(maxsize=_SIZES_KEPT)(lambda sizes: self._by_kind(chunks_of(sizes)))

    def run(
        self, actions: Sequence[Action], micro_batches: Mapping[int, Optional[Micro]], loss_factor: Factor
    ) -> Optional[Tensor]:
        """One iteration. Only stages that take inputs, and the last one, look at the micro-batches, which have the
        actions' numbers.

        The loss of each micro-batch is multiplied by `loss_factor` before its backward pass. Returns the sum of those
        products on the last stage, else None.
        """
        self._expect(actions, micro_batches)
        self._expect_passes(actions)
        for kind, m, chunk in actions:
            key = m, chunk
            self._recorder.micro_batch, self._recorder.chunk = key
            if kind is Kind.FORWARD:
                self._forward(key, micro_batches[m], loss_factor)
            elif kind is Kind.BACKWARD:
                self._backward(kind, key)
            elif kind is Kind.BACKWARD_INPUT:
                with self._later.defer(key):
                    self._backward(kind, key)
            elif kind is Kind.BACKWARD_WEIGHT:
                with self._recorder.span(kind.value, m, chunk=chunk):
                    self._later.run(key)
                self._pace.passed(kind.value, m)
            else:
                self._exchange(kind, key)
        self._flush()
        if self.host is not None:
            self.host.end()
        if self.weights is not None:
            self.weights.end()
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum() if losses else None

    def _exchange(self, kind: Kind, key: Key) -> None:
        """A message of a micro-batch, to or from another stage."""
        if kind is Kind.RECV_FORWARD:
            entered = self._receive(Kind.RECV_FORWARD, key)
            for content in self._chunks[key[1]].entering.contents:
                if content.gradient:
                    entered[content.name].requires_grad_()
            self._entered[key] = entered
        elif kind is Kind.RECV_BACKWARD:
            if self.host is not None:
                self.host.ahead(key)
            self._gradients_left[key] = self._receive(kind, key)
        elif kind is Kind.SEND_FORWARD:
            self._send(kind, key, self._left[key])
        else:
            self._send(kind, key, self._gradients_entered.pop(key))

    def run_forward(
        self,
        actions: Sequence[Action],
        micro_batches: Mapping[int, Optional[Micro]],
        take: Callable[[Tensors, Micro], None],
    ) -> None:
        """Forward passes and their messages alone: `actions` are those of a schedule, without all others.

        On the last stage `take` is given what leaves it. Passes of micro-batches that are not there are those of other
        replicas.
        """
        self._expect(actions, micro_batches)
        self._expect_passes(actions)
        entered: Dict[Key, Tensors] = {}
        left: Dict[Key, Tensors] = {}
        for kind, m, chunk in actions:
            key = m, chunk
            if kind is Kind.RECV_FORWARD:
                entered[key] = self._receive(kind, key)
            elif kind is Kind.SEND_FORWARD:
                self._send(kind, key, left.pop(key))
            elif m not in micro_batches:
                assert self.weights is not None
                self.weights.pass_aside(chunk)
            else:
                stage, micro = self._chunks[chunk].stage, micro_batches[m]
                assert micro is not None
                stage.begin(micro.first)
                values = {**entered.pop(key, {}), **{name: micro.inputs[name] for name in stage.inputs}}
                given = stage(values)
                if stage.last:
                    take(given, micro)
                else:
                    left[key] = given
                self._passed(kind.value, m)
        self._flush()
        if self.weights is not None:
            self.weights.end()

    def _expect_passes(self, actions: Sequence[AnyAction]) -> None:
        """Announces the passes that need weights."""
        if self.weights is not None:
            backward = {Kind.FORWARD: False, Kind.BACKWARD: True, Kind.BACKWARD_INPUT: True}
            self.weights.expect(Pass(a.chunk, backward[a.kind]) for a in actions if a.kind in backward)

    def _passed(self, name: str, m: int) -> None:
        self._pace.passed(name, m)
        if self.weights is not None:
            self.weights.passed()

    def _expect(self, actions: Sequence[AnyAction], micro_batches: Mapping[int, Optional[Micro]]) -> None:
        """Announces the messages that they receive."""
        sized = ((m, micro.sizes) for m, micro in micro_batches.items() if micro is not None and micro.sizes)
        begun = {m: self._sizes[m] for m, _ in self._left if m in self._sizes}
        self._sizes = {**begun, **{m: tuple(sorted(sizes.items())) for m, sizes in sized}}
        for kind, ways in self._inboxes.items():
            for way, own in zip(ways, actions_by_channel(actions, kind, len(ways))):
                likes = [like for a in own for like in self._message(kind, (a.micro_batch, a.chunk)).likes]
                for inbox in way:
                    inbox.expect(likes)

    def _message(self, kind: Kind, key: Key) -> Message:
        m, chunk = key
        of_kind = self._messages_of(self._sizes[m]) if m in self._sizes else self._messages
        return of_kind[kind][chunk]

    def _flush(self) -> None:
        """Waits until all was sent."""
        with self._waiting():
            for outbox in (outbox for ways in self._outboxes.values() for way in ways for outbox in way):
                outbox.flush()
        if self._inboxes or self._outboxes:
            self._pace.finished()

    def _forward(self, key: Key, micro: Optional[Micro], loss_factor: Factor) -> None:
        m, chunk = key
        stage = self._chunks[chunk].stage
        values = self._entered.setdefault(key, {})
        if micro is not None:
            stage.begin(micro.first)
        if stage.inputs:
            assert micro is not None
            values = {**values, **{name: micro.inputs[name] for name in stage.inputs}}
        with self._recorder.span("forward-compute", m, chunk=chunk):
            left = stage(values)
        if self.host is not None:
            self.host.passed(key)
        if stage.last:
            assert micro is not None
            with self._recorder.span("loss-compute", m, chunk=chunk):
                loss = self._loss(left, micro) * loss_factor
            self._losses.append(loss.detach())
            left = {LOSS: loss}
        self._left[key] = left
        self._passed("forward-compute", m)

    def _backward(self, kind: Kind, key: Key) -> None:
        m, chunk = key
        entered, left = self._entered.pop(key), self._left.pop(key)
        received = self._gradients_left.pop(key, {})
        if self.host is not None:
            self.host.ahead(key)
        with self._recorder.span(kind.value, m, chunk=chunk):
            backward(left, received)
        if Kind.SEND_BACKWARD in self._outboxes:
            self._gradients_entered[key] = {
                name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for name, tensor in entered.items()
                if tensor.requires_grad
            }
        self._passed(kind.value, m)

    def _receive(self, kind: Kind, key: Key) -> Tensors:
        m, chunk = key
        ways, message = self._inboxes[kind], self._message(kind, key)
        (inbox,) = ways[m % len(ways)]
        with self._recorder.span(kind.value, m, inbox.peer.rank, chunk):
            with self._waiting():
                received = [inbox.take() for _ in message.likes]
            return message.unpack(received)

    def _waiting(self) -> ContextManager[object]:
        return NOTHING if self.stopwatch is None else self.stopwatch.waiting()

    def _send(self, kind: Kind, key: Key, tensors: Tensors) -> None:
        m, chunk = key
        ways, message = self._outboxes[kind], self._message(kind, key)
        outboxes = ways[m % len(ways)]
        packed: List[Tensor] = []
        if not outboxes:  # the next tensor group is smaller: others of this one send, but all gather
            message.pack(tensors)
        for outbox in outboxes:
            with self._recorder.span(kind.value, m, outbox.peer.rank, chunk):
                packed = packed or message.pack(tensors)
                for tensor in packed:
                    outbox.put(tensor.detach())
                    self._recorder.traffic.sent(_TRAFFIC[kind], tensor)

    def _by_kind(self, chunks: Sequence[Chunk]) -> Dict[Kind, List[Message]]:
        """The messages of each chunk."""
        return {
            Kind.RECV_FORWARD: [chunk.entering for chunk in chunks],
            Kind.SEND_FORWARD: [chunk.leaving for chunk in chunks],
            Kind.RECV_BACKWARD: [chunk.leaving.gradients(self._sent_with_gradients) for chunk in chunks],
            Kind.SEND_BACKWARD: [chunk.entering.gradients(self._sent_with_gradients) for chunk in chunks],
        }
