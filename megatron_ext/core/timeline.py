"""What megatron.core does and when, as events of ours: a timers object that its schedules call, and its messages.

Its schedules tell no numbers: micro-batches come in the order of its own table, and so do messages, which are those of
the table less the ends of the pipeline.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any, ContextManager, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch.distributed

from megatron_ext.contract.events import ACTIVATIONS, GRADIENTS
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.timeline.recorder import Recorder

FORWARD, BACKWARD, LOSS = "forward-compute", "backward-compute", "loss-compute"
_SUMS = {
    "all-grads-sync": "grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce": "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce": "embedding-grads-all-reduce",
}
"""megatron.core's names of what ranks sum after the passes, and ours."""
_MESSAGES = {
    **{name: (name,) for name in ("forward-recv", "forward-send", "backward-recv", "backward-send")},
    "forward-send-backward-recv": ("forward-send", "backward-recv"),
    "backward-send-forward-recv": ("backward-send", "forward-recv"),
}
"""For each timer that tells of messages, the events, of which a rank waits for the last."""
_STEPS = ("optimizer", "optimizer-clip-main-grad")
"""What a rank does by itself after the passes. Of `optimizer` only Megatron-LM has a timer."""
_LIBRARY: Tuple[Any, ...] = (getattr(torch.distributed, "DistBackendError", ()),)
"""What NCCL's failures are, since torch 2.1."""


def sums_of(plan: Plan, place: Place) -> List[str]:
    """The events of what a rank sums with others after the passes."""
    tied = not plan.model.untie_embeddings_and_output_weights and plan.pipeline > 1
    each = {
        "grads-all-reduce": plan.data > 1,
        "layernorm-grads-all-reduce": plan.sequence_parallel and plan.tensor > 1,
        "embedding-grads-all-reduce": tied and place.stage in (0, plan.pipeline - 1),
    }
    return [name for name, there in each.items() if there]


class Pass(NamedTuple):
    """A micro-batch in a chunk of a rank."""

    micro_batch: int
    chunk: int


class Turns:
    """Which micro-batch each pass and each message of an iteration is of, in the order in which a rank has them."""

    def __init__(self, plan: Plan, place: Place, keys: Sequence[int], group: Optional[int] = None) -> None:
        """`keys` are the numbers of the micro-batches, of which interleaved stages take so many as a `group`; None: as
        many as there are stages."""
        forward = [Pass(keys[m], chunk) for m, chunk in _table(plan, len(keys), group or plan.pipeline)]
        backward = [Pass(m, plan.chunks - 1 - chunk) for m, chunk in forward]
        first, last = place.stage == 0, place.stage == plan.pipeline - 1
        after_first = [one for one in forward if not (first and one.chunk == 0)]
        before_last = [one for one in forward if not (last and one.chunk == plan.chunks - 1)]
        self.of: Mapping[str, Deque[Pass]] = {
            FORWARD: deque(forward),
            BACKWARD: deque(backward),
            "forward-recv": deque(after_first),
            "forward-send": deque(before_last),
            "backward-recv": deque(one for one in backward if not (last and one.chunk == plan.chunks - 1)),
            "backward-send": deque(one for one in backward if not (first and one.chunk == 0)),
        }

    def next(self, name: str) -> Pass:
        """The one whose turn it is with what has this name."""
        return self.of[name].popleft() if self.of[name] else Pass(-1, 0)  # one that no plan knows of


def _table(plan: Plan, micro_batches: int, group: int) -> List[Any]:
    """Micro-batches and chunks in the order of the forward passes."""
    if plan.chunks == 1:
        return [(m, 0) for m in range(micro_batches)]
    return [
        (m, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(plan.chunks)
        for m in range(first, min(first + group, micro_batches))
    ]


class _Timer:
    """Has megatron.core's `start` and `stop` be the ends of a span."""

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self._name = name

    def start(self, barrier: bool = False) -> None:
        self._timers.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._timers.stop(self._name)


class Timers:
    """What megatron.core's configuration takes for timers."""

    def __init__(self, recorder: Recorder, sums: Sequence[str]) -> None:
        """`sums` are the events of what this rank sums with others: megatron.core calls for all that there may be."""
        self._recorder = recorder
        self._sums = {theirs: ours for theirs, ours in _SUMS.items() if ours in sums}
        self._timers: Dict[str, _Timer] = {}
        self._open: Dict[str, ExitStack] = {}
        self.turns: Optional[Turns] = None
        """Those of the iteration under way; None: nothing is recorded."""
        self.peers: Dict[str, int] = {}
        """For each message the rank at its other end, where timers have to tell of messages."""
        self.under_way: List[Any] = []
        """Messages that were begun, and not waited for."""

    def finish(self) -> None:
        """Waits for the messages for which the schedule did not."""
        for message in list(self.under_way):
            message.wait()

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        if name not in self._timers:
            self._timers[name] = _Timer(self, name)
        return self._timers[name]

    def start(self, name: str) -> None:
        if self.turns is None:
            return
        if name in (FORWARD, BACKWARD):
            turn = self.turns.next(name)
            self._recorder.micro_batch, self._recorder.chunk = turn
            self._enter(name, self._recorder.span(name, turn.micro_batch, chunk=turn.chunk))
        elif name in self._sums:
            self._enter(name, annotate_errors(self._sums[name]), self._recorder.span(self._sums[name]))
        elif name in _STEPS:
            self._enter(name, self._recorder.span(name))
        elif name in _MESSAGES and self.peers:
            *begun, waited = [
                (event, self._recorder.span(event, turn.micro_batch, self.peers[event], turn.chunk))
                for event in _MESSAGES[name]
                for turn in (self.turns.next(event),)
            ]
            for _, span in begun:
                with span:
                    pass
            self._enter(name, annotate_errors(f"{waited[0]} with rank {self.peers[waited[0]]}"), waited[1])

    def stop(self, name: str) -> None:
        opened = self._open.pop(name, None)
        if opened is not None:
            opened.close()

    def loss(self) -> ContextManager[None]:
        """The loss of the forward pass under way, which ends where it begins."""
        if self.turns is None:
            return self._recorder.span(LOSS)
        self.stop(FORWARD)
        return self._recorder.span(LOSS, self._recorder.micro_batch, chunk=self._recorder.chunk)

    def failed(self, error: RuntimeError) -> None:
        """Raises PeerLost where `error` came from what ranks do together, of which the library tells no type."""
        opened, self._open = list(self._open.values()), {}
        trace = error.__traceback__
        for stack in reversed(opened):
            stack.__exit__(type(error), error, trace)  # where ranks sum, it raises
        if isinstance(error, _LIBRARY) or "gloo" in str(error) or "Connection closed by peer" in str(error):
            with annotate_errors("a message within a pass"):
                raise error

    def _enter(self, name: str, *spans: ContextManager[Any]) -> None:
        stack = self._open[name] = ExitStack()
        for span in spans:
            stack.enter_context(span)


def communicator(recorder: Recorder, timers: Timers, config: Any) -> Dict[str, Any]:
    """What schedules take: megatron.core's own way to send between stages, with each message recorded as what it is."""
    from megatron.core import parallel_state

    kind = recorded(recorder, timers)
    if kind is None:
        timers.peers = peers()
        return {}
    from megatron.core import process_groups_config

    key, name = "pg_collection", "ProcessGroupCollection"
    if not hasattr(process_groups_config, name):  # in 0.14
        key, name = "grad_finalize_pgs", "GradFinalizeProcessGroups"
    return {
        "p2p_communicator": kind(parallel_state.get_pipeline_model_parallel_group(), config),
        key: _groups(getattr(process_groups_config, name)(), parallel_state),
    }


def peers() -> Dict[str, int]:
    """What `Timers.peers` is for this rank, where timers alone tell of messages."""
    from megatron.core import parallel_state

    before, after = (
        parallel_state.get_pipeline_model_parallel_prev_rank(),
        parallel_state.get_pipeline_model_parallel_next_rank(),
    )
    names = ("forward-recv", "backward-send", "backward-recv", "forward-send")
    return dict(zip(names, (before, before, after, after)))


def recorded(recorder: Recorder, timers: Timers) -> Optional[Any]:
    """megatron.core's class that sends between stages, with each message recorded as what it is; None before 0.14,
    which has none: its timers alone tell of messages.

    In each of its steps it starts up to two messages out and two in, and waits for them: for those that come in first.
    """
    try:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    except ImportError:
        return None

    class Recorded(P2PCommunicator):  # type: ignore[misc]
        def _communicate(self, *, wait_on_reqs: bool = True, **message: Any) -> Any:
            batched, self.config.batch_p2p_comm = self.config.batch_p2p_comm, False
            try:  # each message by itself, so that those that go together end each at its own time
                received_prev, received_next, requests = super()._communicate(wait_on_reqs=False, **message)
            finally:
                self.config.batch_p2p_comm = batched
            waits = {name: _Wait(self, name, one) for name, one in (requests or {}).items()}
            for name in waits:
                if name.startswith("send"):
                    tensor = message["tensor_send_next" if name == "send_next" else "tensor_send_prev"]
                    if timers.turns is not None:
                        recorder.traffic.sent(ACTIVATIONS if name == "send_next" else GRADIENTS, tensor)
            if not wait_on_reqs:
                return received_prev, received_next, waits
            for name in sorted(waits):  # recv_next, recv_prev, send_next, send_prev
                waits[name].wait()
            return received_prev, received_next, None

    class _Wait:
        """A message under way."""

        def __init__(self, own: Any, name: str, work: Any) -> None:
            self._event, what, self._peer = {
                "recv_prev": ("forward-recv", "activations from", own.prev_rank),
                "recv_next": ("backward-recv", "gradients from", own.next_rank),
                "send_next": ("forward-send", "activations to", own.next_rank),
                "send_prev": ("backward-send", "gradients to", own.prev_rank),
            }[name]
            self._what = f"{what} rank {self._peer}"
            self._work = work
            self._turn = None if timers.turns is None else timers.turns.next(self._event)
            timers.under_way.append(self)

        def wait(self) -> None:
            if self in timers.under_way:
                timers.under_way.remove(self)
            with ExitStack() as stack:
                if self._turn is not None:
                    stack.enter_context(
                        recorder.span(self._event, self._turn.micro_batch, self._peer, self._turn.chunk)
                    )
                stack.enter_context(annotate_errors(self._what))
                self._work.wait()

    return Recorded


def _groups(groups: Any, state: Any) -> Any:
    """megatron.core's groups, which it wants by name where it is given a communicator."""
    groups.tp, groups.cp = state.get_tensor_model_parallel_group(), state.get_context_parallel_group()
    groups.pp = state.get_pipeline_model_parallel_group()
    groups.embd = state.get_embedding_group(check_initialized=False)
    groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    return groups
