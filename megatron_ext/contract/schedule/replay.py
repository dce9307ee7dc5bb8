"""Replays the actions of all ranks in an order that their messages allow.

This one order serves the proof that a schedule ends (here), its simulation (`fasop.simulation.ranks.replay`), and the
simulation of many partitions at once (`fasop.simulation.ranks.columns`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple, Union

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedule.schedules import Action, Kind
from megatron_ext.contract.schedule.streams import StreamAction

AnyAction = Union[Action, StreamAction]
RECEIVES: Dict[str, Tuple[Kind, int]] = {
    Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
}
"""The send that each receive takes its message from, and by how many stages away it is."""
SENDS: Dict[str, int] = {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}
"""How many stages away the receiver is."""


class Replay:
    """All ranks, each of which goes as far as it need not wait, until all have done all.

    A receive waits for its send, and a channel keeps the order of its messages; an update waits for the stage's other
    replicas. A message to several ranks is one for each of them. Sends never wait, so each rank is a sequential process
    that only these can block, and whether all come to their end does not depend on how long anything takes (Kahn 1974):
    one replay proves it for every timing.

    Subclasses say what a message is, and what actions do.
    """

    def __init__(self, layout: Layout, actions: Sequence[Sequence[Any]]) -> None:
        """`actions`, each a kind, a micro-batch and a chunk, are by rank."""
        self.layout, self.actions = layout, actions
        self.places = [layout.stage_dp_tp(rank) for rank in range(layout.world_size)]
        self.taken = [0] * len(actions)
        """How many actions each rank has done."""
        self.ends = [len(own) for own in actions]
        """How many it is to do."""
        self.ready = deque(range(len(actions)))
        self.messages: Dict[Tuple[str, int, int], Deque[Any]] = {}
        """What is under way, by kind of send, sender and receiver."""
        self._even = layout.even
        self._known: Dict[Tuple[int, int, int, bool], List[int]] = {}
        """Peers, by rank, stages on, micro-batch where it matters, and whether to send."""

    def go_on(self) -> List[int]:
        """Takes all actions that can be taken; the ranks that have some left."""
        while self.ready:
            rank = self.ready.popleft()
            while self.taken[rank] < self.ends[rank] and self.step(rank):
                pass
        return [rank for rank, (done, end) in enumerate(zip(self.taken, self.ends)) if done < end]

    def step(self, rank: int) -> bool:
        """Does the next action of a rank; false if it has to wait."""
        action = self.actions[rank][self.taken[rank]]
        kind, m = action[0], action[1]
        if kind in RECEIVES:
            send, step = RECEIVES[kind]
            (peer,) = self._peers(rank, step, m, sending=False)
            arrived = self.messages.get((send, peer, rank))
            if not arrived:
                return False
            self.receive(rank, action, arrived.popleft())
        elif kind in SENDS:
            for peer in self._peers(rank, SENDS[kind], m, sending=True):
                self.messages.setdefault((kind, rank, peer), deque()).append(self.send(rank, action))
                self.ready.append(peer)
            self.sent(rank, action)
        elif kind == Kind.UPDATE:
            return self._update(rank, action)
        else:
            self.compute(rank, action)
        self.taken[rank] += 1
        return True

    def receive(self, rank: int, action: Any, message: Any) -> None:
        """Takes a message."""

    def send(self, rank: int, action: Any) -> Any:
        """The message to one of the receivers."""
        return action

    def sent(self, rank: int, action: Any) -> None:
        """Ends an action that sends."""

    def compute(self, rank: int, action: Any) -> None:
        """Does an action that waits for nobody."""

    def update(self, group: Sequence[int]) -> None:
        """Updates the weights of ranks that have the same ones."""

    def _update(self, rank: int, action: Any) -> bool:
        stage, _, place = self.places[rank]
        group = [self.layout.rank(stage, replica, place) for replica in range(self.layout.replicas[stage])]
        if any(
            self.taken[at] >= self.ends[at] or tuple(self.actions[at][self.taken[at]]) != tuple(action) for at in group
        ):
            return False
        self.update(group)
        for at in group:
            self.taken[at] += 1
        self.ready.extend(at for at in group if at != rank)
        return True

    def _peers(self, rank: int, step: int, m: int, sending: bool) -> List[int]:
        """Whom a message of a micro-batch comes from, or goes to, so many stages on from a rank."""
        key = rank, step, 0 if self._even else m, sending
        if key not in self._known:
            layout, (stage, replica, of_tensor) = self.layout, self.places[rank]
            other = (stage + step) % layout.stages
            peer = replica if self._even else m % layout.replicas[other]
            own, theirs = layout.tensors[stage], layout.tensors[other]
            numbers = range(of_tensor, theirs, own) if sending else (of_tensor % theirs,)
            self._known[key] = [layout.rank(other, peer, one) for one in numbers]
        return self._known[key]


class CheckedReplay(Replay):
    """Ranks that receive what they wait for; a message is its send."""

    def __init__(self, lists: Sequence[Sequence[Sequence[AnyAction]]], ends: Optional[Sequence[int]] = None) -> None:
        """`lists` is by stage and replica, and `ends`, how many actions to take instead of all, by rank."""
        layout = Layout((1,) * len(lists), tuple(len(replicas) for replicas in lists))
        super().__init__(layout, [actions for replicas in lists for actions in replicas])
        self.ends = self.ends if ends is None else list(ends)

    def receive(self, rank: int, action: Any, message: Any) -> None:
        """Compares a message with the one that its receiver waits for. Raises EngineError: they differ."""
        send, step = RECEIVES[action.kind]
        stage, stages = self.places[rank][0], self.layout.stages
        chunk, sender = divmod(action.chunk * stages + stage + step, stages)
        wanted = Action(send, action.micro_batch, chunk)
        if message[:3] != wanted:
            raise EngineError(
                f"stage {stage} waits for {named(wanted)} of stage {sender}, but {named(message)} comes "
                "first: receives must have the order of their sends"
            )


def check_runs(lists: Sequence[Sequence[Sequence[AnyAction]]]) -> None:
    """Whether all ranks come to their end; raises as `check`."""
    replay = CheckedReplay(lists)
    stuck = []
    for rank in replay.go_on():
        stage, replica, _ = replay.places[rank]
        action = replay.actions[rank][replay.taken[rank]]
        stuck.append(f"{rank_named(stage, replica, len(lists[stage]))} at {named(action)}")
    if stuck:
        raise EngineError(f"deadlock: waiting forever: {', '.join(stuck)}")


def rank_named(stage: int, replica: int, replicas: int) -> str:
    """A rank, in words."""
    return f"stage {stage}" if replicas == 1 else f"replica {replica} of stage {stage}"


def named(action: AnyAction) -> str:
    """An action, in words."""
    return f"{action.kind.value} of micro-batch {action.micro_batch}, chunk {action.chunk}"
