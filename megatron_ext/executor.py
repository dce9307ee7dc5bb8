"""Runs a schedule: takes the actions of one stage in their order, whatever they are."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from megatron_ext.comm import Inbox, Outbox
from megatron_ext.model import Stage
from megatron_ext.schedule import Action, Kind
from megatron_ext.timeline import Recorder


class Executor:
    """One stage's forward and backward passes, and the messages to its neighbours."""

    def __init__(
        self,
        stage: Stage,
        previous: Optional[int],
        following: Optional[int],
        activations: Tensor,
        recorder: Recorder,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """`previous` and `following` are the ranks of the neighbouring stages, None at the ends.

        `activations` is like what stages send to each other, [micro-batch, sequence, hidden]. `loss` takes the
        last stage's output and the labels [micro-batch, sequence].
        """
        self._stage = stage
        self._recorder = recorder
        self._loss = loss
        self._previous = previous
        self._following = following
        self._inbox = {
            Kind.RECV_FORWARD: Inbox(previous, activations, "activations") if previous is not None else None,
            Kind.RECV_BACKWARD: Inbox(following, activations, "gradients") if following is not None else None,
        }
        self._outbox = {
            Kind.SEND_FORWARD: Outbox(following, "activations") if following is not None else None,
            Kind.SEND_BACKWARD: Outbox(previous, "gradients") if previous is not None else None,
        }
        self._held: Dict[int, Tuple[Tensor, Tensor]] = {}
        self._input: Dict[int, Tensor] = {}
        self._gradient: Dict[int, Tensor] = {}
        self._losses: List[Tensor] = []

    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[Optional[Tensor]],
        loss_factor: float,
    ) -> Optional[Tensor]:
        """One iteration. `micro_batches[m]` is [micro-batch, sequence + 1] tokens: inputs and, shifted, labels.

        Only the first and the last stage look at them. The loss of each micro-batch is multiplied by `loss_factor`
        before its backward pass. Returns the sum of those products on the last stage, else None.
        """
        for kind, inbox in self._inbox.items():
            if inbox is not None:
                inbox.expect(sum(action.kind is kind for action in actions))
        for kind, m in actions:
            if kind is Kind.FORWARD:
                self._forward(m, micro_batches[m], loss_factor)
            elif kind is Kind.BACKWARD:
                self._backward(m)
            elif kind is Kind.RECV_FORWARD:
                self._input[m] = self._receive(kind, m, self._previous)
            elif kind is Kind.RECV_BACKWARD:
                self._gradient[m] = self._receive(kind, m, self._following)
            elif kind is Kind.SEND_FORWARD:
                self._send(kind, m, self._following, self._held[m][1].detach())
            else:
                self._send(kind, m, self._previous, self._gradient.pop(m))
        for outbox in self._outbox.values():
            if outbox is not None:
                outbox.flush()
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum() if losses else None

    def _forward(self, m: int, tokens: Optional[Tensor], loss_factor: float) -> None:
        if self._stage.first:
            assert tokens is not None
            entered = tokens[:, :-1]
        else:
            entered = self._input.pop(m).requires_grad_()
        with self._recorder.span("forward-compute", m):
            left = self._stage(entered)
        if self._stage.last:
            assert tokens is not None
            with self._recorder.span("loss-compute", m):
                left = self._loss(left, tokens[:, 1:]) * loss_factor
            self._losses.append(left.detach())
        self._held[m] = (entered, left)

    def _backward(self, m: int) -> None:
        entered, left = self._held.pop(m)
        with self._recorder.span("backward-compute", m):
            torch.autograd.backward([left], [None if self._stage.last else self._gradient.pop(m)])
        if not self._stage.first:
            assert entered.grad is not None
            self._gradient[m] = entered.grad

    def _receive(self, kind: Kind, m: int, peer: Optional[int]) -> Tensor:
        inbox = self._inbox[kind]
        assert inbox is not None and peer is not None
        with self._recorder.span(kind.value, m, peer):
            return inbox.take()

    def _send(self, kind: Kind, m: int, peer: Optional[int], tensor: Tensor) -> None:
        outbox = self._outbox[kind]
        assert outbox is not None and peer is not None
        with self._recorder.span(kind.value, m, peer):
            outbox.put(tensor)
