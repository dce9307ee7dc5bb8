"""Replays the actions of all ranks, as data: whether they come to their end, and which messages are then under way."""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.schedules import Action, Kind
from megatron_ext.contract.schedule.streams import Step

AnyAction = Union[Action, Step]
_SENDER = {Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1), Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1)}
"""What a receive waits for, and where: so many virtual stages on."""


class Replay:
    """All ranks together: a receive waits for its send, and a channel keeps the order of its messages; an update waits
    for those of the stage's other replicas.

    Sends never wait, so each rank is a sequential process that only these can block, and whether all come to their end
    does not depend on how long anything takes (Kahn 1974): one replay proves it for every timing.
    """

    def __init__(self, lists: Sequence[Sequence[Sequence[AnyAction]]], chunks: int) -> None:
        """`lists` is by stage and replica."""
        self._lists = lists
        self._chunks = chunks
        self.sent: Dict[Tuple[Kind, int, int, int], Deque[AnyAction]] = {}
        """What is under way, by kind of send, sending stage, its replica, and the receiving replica."""
        self._ranks = [(stage, replica) for stage, replicas in enumerate(lists) for replica in range(len(replicas))]
        self.done = dict.fromkeys(self._ranks, 0)
        """How many of its actions each rank has taken."""

    def run(self, until: Optional[Mapping[Tuple[int, int], int]] = None) -> List[Tuple[int, int]]:
        """Goes on until every rank has taken as many actions as `until` says, or all of them; the ranks that cannot.

        Raises:
            EngineError: a message is not the one that its receiver waits for.
        """
        ends = {at: len(self._lists[at[0]][at[1]]) for at in self._ranks} if until is None else until
        moved = True
        while moved:
            moved = False
            for at in self._ranks:
                while self.done[at] < ends[at] and self._step(*at, ends):
                    moved = True
        return [at for at in self._ranks if self.done[at] < ends[at]]

    def _step(self, stage: int, replica: int, ends: Mapping[Tuple[int, int], int]) -> bool:
        """Takes the next action of a rank, as far as it need not wait."""
        lists, stages = self._lists, len(self._lists)
        action = lists[stage][replica][self.done[stage, replica]]
        if action.kind in _SENDER:
            send, step = _SENDER[action.kind]
            sender = (stage + step) % stages
            channel = self.sent.get((send, sender, action.micro_batch % len(lists[sender]), replica))
            if not channel:
                return False
            chunk, sender = divmod(action.chunk * stages + stage + step, stages)
            wanted, comes = Action(send, action.micro_batch, chunk), channel.popleft()
            if comes[:3] != wanted:
                raise EngineError(
                    f"stage {stage} waits for {named(wanted)} of stage {sender}, but {named(comes)} comes "
                    "first: receives must have the order of their sends"
                )
        elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            receiver = (stage + (1 if action.kind is Kind.SEND_FORWARD else -1)) % stages
            to = action.micro_batch % len(lists[receiver])
            self.sent.setdefault((action.kind, stage, replica, to), deque()).append(action)
        elif action.kind is Kind.UPDATE:
            together = [(stage, other) for other in range(len(lists[stage]))]
            if any(self.done[at] >= ends[at] or lists[stage][at[1]][self.done[at]] != action for at in together):
                return False
            for at in together:
                self.done[at] += 1
            return True
        self.done[stage, replica] += 1
        return True


def check_runs(lists: Sequence[Sequence[Sequence[AnyAction]]], chunks: int) -> None:
    """Whether all ranks come to their end; raises as `check`."""
    replay = Replay(lists, chunks)
    stuck = [f"{rank_named(s, r, len(lists[s]))} at {named(lists[s][r][replay.done[s, r]])}" for s, r in replay.run()]
    if stuck:
        raise EngineError(f"deadlock: waiting forever: {', '.join(stuck)}")


def rank_named(stage: int, replica: int, replicas: int) -> str:
    """A rank, in words."""
    return f"stage {stage}" if replicas == 1 else f"replica {replica} of stage {stage}"


def named(action: AnyAction) -> str:
    """An action, in words."""
    return f"{action.kind.value} of micro-batch {action.micro_batch}, chunk {action.chunk}"
