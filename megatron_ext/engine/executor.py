"""Runs a schedule: takes the actions of one rank in their order, whatever they are."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.schedules import Action, Kind
from megatron_ext.engine.messages import Message
from megatron_ext.engine.pace import Pace
from megatron_ext.parallel.comm import Inbox, Outbox, Peer, all_reduce, told
from megatron_ext.parallel.grid import Groups
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import Micro, Tensors
from megatron_ext.timeline.recorder import Recorder

Key = Tuple[int, int]
"""A micro-batch in a chunk."""
Factor = Union[float, Tensor]
LOSS = "loss"
"""What leaves the last stage, by name."""


class Chunk(NamedTuple):
    """A virtual stage of a rank, and the messages over the cuts before and after it; those at the ends are empty."""

    stage: Stage
    entering: Message
    leaving: Message


def neighbours(ranks: Sequence[int], stage: int, chunks: int, groups: Groups) -> Dict[Kind, Peer]:
    """With whom a stage exchanges each kind of message; a kind that it never exchanges is missing.

    `ranks` are the pipeline's, by stage. With several chunks the last stage is followed by the first.
    """
    peers: Dict[Kind, Peer] = {}
    last = len(ranks) - 1
    if stage > 0 or chunks > 1:
        previous = ranks[stage - 1]
        peers[Kind.RECV_FORWARD] = Peer(previous, groups.forward if stage > 0 else groups.forward_wrap)
        peers[Kind.SEND_BACKWARD] = Peer(previous, groups.backward if stage > 0 else groups.backward_wrap)
    if stage < last or chunks > 1:
        following = ranks[(stage + 1) % len(ranks)]
        peers[Kind.SEND_FORWARD] = Peer(following, groups.forward if stage < last else groups.forward_wrap)
        peers[Kind.RECV_BACKWARD] = Peer(following, groups.backward if stage < last else groups.backward_wrap)
    return peers


def warm_up(groups: Groups, peers: Dict[Kind, Peer], stage: int, stages: int, device: torch.device) -> None:
    """One message through every group and channel, in an order in which no rank waits for one that waits for it.

    All ranks call it. nccl connects ranks at their first message; they wait there for each other, with calls that may
    also wait for whatever the GPU is doing: with receives posted ahead of time, for ever. First come the groups
    of each kind, which have no rank in common; then the stages 0 and 1, 2 and 3 and so on, then 1 and 2, 3 and 4; the
    way from the last stage to the first comes last.
    """
    message = torch.zeros(1, device=device)
    with told("connecting to all ranks"):
        dist.all_reduce(message)
    for what in ("tensor", "data", "model"):
        all_reduce(message, getattr(groups, what), f"connecting the {what} group")
    for group in groups.tied:
        all_reduce(message, group, "connecting the ranks that share a parameter")
    before = (Kind.RECV_FORWARD, Kind.SEND_BACKWARD)
    order = (*before, Kind.SEND_FORWARD, Kind.RECV_BACKWARD)

    def turn(kind: Kind) -> Tuple[bool, int, int]:
        wraps = stage == (0 if kind in before else stages - 1)
        return wraps, (stage - 1 if kind in before else stage) % 2, order.index(kind)

    for kind in sorted(peers, key=turn):
        exchange = dist.recv if kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD) else dist.send
        with told(f"connecting to rank {peers[kind].rank}"):
            exchange(message, peers[kind].rank, group=peers[kind].group)
    message.cpu()


class Executor:
    """The forward and backward passes of one rank's chunks, and the messages to its neighbours.

    A message has no label: the k-th receive of a kind takes the k-th message that the neighbour sent, which is the
    right one in every schedule that `megatron_ext.contract.schedules` makes or `megatron_ext.contract.schedule_check`
    lets pass. Sends and the next receives go on while the rank computes; only a receive can make it wait.

    On GPUs only activations are received meanwhile. If gradients were, too, stages could wait for each other for ever
    wherever CUDA makes two of them wait for all that their GPUs have begun: while it frees memory, or loads a kernel.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        peers: Dict[Kind, Peer],
        later: WeightGradients,
        recorder: Recorder,
        loss: Callable[[Tensors, Micro], Tensor],
        pace: Pace,
    ) -> None:
        """`peers` is what `neighbours` gives.

        `later` is where the chunks' blocks leave what a backward pass of the inputs alone puts off. `loss` takes what
        leaves the last stage.
        """
        self._chunks = chunks
        self._later = later
        self._recorder = recorder
        self._loss = loss
        self._pace = pace
        self._messages = {
            Kind.RECV_FORWARD: [chunk.entering for chunk in chunks],
            Kind.SEND_FORWARD: [chunk.leaving for chunk in chunks],
            Kind.RECV_BACKWARD: [chunk.leaving.gradients() for chunk in chunks],
            Kind.SEND_BACKWARD: [chunk.entering.gradients() for chunk in chunks],
        }
        """By chunk."""
        self._inboxes = {
            kind: Inbox(peers[kind], what, one_ahead)
            for kind, what, one_ahead in (
                (Kind.RECV_FORWARD, "activations", True),
                (Kind.RECV_BACKWARD, "gradients", False),
            )
            if kind in peers
        }
        self._outboxes = {
            kind: Outbox(peers[kind], what)
            for kind, what in ((Kind.SEND_FORWARD, "activations"), (Kind.SEND_BACKWARD, "gradients"))
            if kind in peers
        }
        self._entered: Dict[Key, Tensors] = {}
        self._left: Dict[Key, Tensors] = {}
        self._gradients_left: Dict[Key, Tensors] = {}
        """Of what left the chunk, as received."""
        self._gradients_entered: Dict[Key, Tensors] = {}
        """Of what entered it, to be sent."""
        self._losses: List[Tensor] = []

    def run(
        self, actions: Sequence[Action], micro_batches: Sequence[Optional[Micro]], loss_factor: Factor
    ) -> Optional[Tensor]:
        """One iteration. Only stages that take inputs, and the last one, look at the micro-batches.

        The loss of each micro-batch is multiplied by `loss_factor` before its backward pass. Returns the sum of those
        products on the last stage, else None.
        """
        for kind, inbox in self._inboxes.items():
            messages = self._messages[kind]
            inbox.expect([like for action in actions if action.kind is kind for like in messages[action.chunk].likes])
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
            elif kind is Kind.RECV_FORWARD:
                self._entered[key] = self._received_forward(key)
            elif kind is Kind.RECV_BACKWARD:
                self._gradients_left[key] = self._receive(kind, key)
            elif kind is Kind.SEND_FORWARD:
                self._send(kind, key, self._left[key])
            else:
                self._send(kind, key, self._gradients_entered.pop(key))
        for outbox in self._outboxes.values():
            outbox.flush()
        if self._inboxes or self._outboxes:
            self._pace.finished()
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum() if losses else None

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
        if stage.last:
            assert micro is not None
            with self._recorder.span("loss-compute", m, chunk=chunk):
                loss = self._loss(left, micro) * loss_factor
            self._losses.append(loss.detach())
            left = {LOSS: loss}
        self._left[key] = left
        self._pace.passed("forward-compute", m)

    def _backward(self, kind: Kind, key: Key) -> None:
        m, chunk = key
        entered, left = self._entered.pop(key), self._left.pop(key)
        received = self._gradients_left.pop(key, {})
        with self._recorder.span(kind.value, m, chunk=chunk):
            backward(left, received)
        self._gradients_entered[key] = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in entered.items()
            if tensor.requires_grad
        }
        self._pace.passed(kind.value, m)

    def _received_forward(self, key: Key) -> Tensors:
        entered = self._receive(Kind.RECV_FORWARD, key)
        for content in self._chunks[key[1]].entering.contents:
            if content.gradient:
                entered[content.name].requires_grad_()
        return entered

    def _receive(self, kind: Kind, key: Key) -> Tensors:
        m, chunk = key
        inbox, message = self._inboxes[kind], self._messages[kind][chunk]
        with self._recorder.span(kind.value, m, inbox.peer.rank, chunk):
            return message.unpack([inbox.take() for _ in message.likes])

    def _send(self, kind: Kind, key: Key, tensors: Tensors) -> None:
        m, chunk = key
        outbox, message = self._outboxes[kind], self._messages[kind][chunk]
        with self._recorder.span(kind.value, m, outbox.peer.rank, chunk):
            for tensor in message.pack(tensors):
                outbox.put(tensor.detach())
