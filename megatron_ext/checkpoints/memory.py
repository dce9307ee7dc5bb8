"""Puts checkpoints into the memory of nodes (`train.save_memory`), beside those on disk: each part on two of them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import Tensor

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints import tensors as checkpoint
from megatron_ext.checkpoints.header import digest_of, of_part
from megatron_ext.checkpoints.meta import Meta
from megatron_ext.checkpoints.pace import SavePace
from megatron_ext.contract.kept import At, Keeper, KeeperLost
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.run_files import META
from megatron_ext.contract.worker import start_of_run
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.parallel.comm import Barrier

Parts = List[Tuple[str, Dict[str, Tensor]]]


@dataclass(eq=False)
class MemorySaver:
    """All ranks call its methods together. A thread sends copies while training goes on, and takes part in no
    communication of the ranks. What cannot be kept is reported, and training goes on."""

    _plan: Plan
    _place: Place
    _engine: AnyEngine
    _meta: Callable[[int], Meta]
    _parts: List[str]
    """Those of the whole model."""
    _barrier: Barrier
    _kept: Optional[At]
    """The newest complete one; at first what the run went on from, if that is in memory."""
    _pace: Optional[SavePace] = None
    """On one rank, it is told what was saved."""

    def __post_init__(self) -> None:
        self._pending: Optional[_Sender] = None
        self._told = False

    def after(self, iteration: int, on_disk: bool, wanted: bool) -> None:
        """Saves if this is due after `iteration` or `wanted`, unless the same is on disk already. Raises PeerLost:
        another rank is gone."""
        every = self._plan.train.save_memory
        if on_disk or not (wanted or (every and iteration % every == 0)):
            return
        began = time.monotonic()
        self._finish()
        state = self._engine.optimizer.state()
        own: Parts = list(checkpoint.parts(self._engine, state)) if self._engine.saves else []
        meta = None
        if self._place.rank == 0:
            meta = {**asdict(self._meta(iteration)), "parts": self._parts}
        self._pending = _Sender(self._plan, self._place, At(start_of_run(), iteration), self._kept, own, meta)
        self._pending.start()
        if self._pace is not None:
            self._pace.tried(iteration, time.monotonic() - began, saved=True)

    def _finish(self) -> None:
        """Waits until all ranks have sent what is pending: no keeper holds more than that and one complete one."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.join()
        for told in pending.missed:
            print(f"not kept in memory, and the run goes on: {told}", file=sys.stderr, flush=True)
        gate = f"memory/{pending.at.iteration}"
        if self._barrier.all_succeeded(gate, "keeping a checkpoint in memory", pending.failed):
            self._kept = pending.at
            if pending.bytes and not self._told:
                print(
                    f"train.save_memory: iteration {pending.at.iteration} is in the memory of two nodes; "
                    f"{pending.bytes / 1e6:,.1f} MB of checkpoints are in that of this one",
                    flush=True,
                )
                self._told = True
        if self._pace is not None and self._plan.train.keeps_by_itself:
            print(self._pace.describe(), flush=True)


class _Sender(Thread):
    """Gives this rank's parts to the keepers of its node and of the next one that trains."""

    def __init__(
        self, plan: Plan, place: Place, at: At, keep: Optional[At], parts: Parts, meta: Optional[Dict[str, Any]]
    ) -> None:
        super().__init__(daemon=True)
        self._run = plan.files
        used = plan.used
        after = used[(used.index(place.node) + 1) % len(used)]
        self._nodes = list(dict.fromkeys(plan.nodes[node].name for node in (place.node, after)))
        self.at, self._keep = at, keep
        self._own, self._meta = parts, meta
        self.missed: List[str] = []
        """What could not be done, in words."""
        self.failed = False
        """Whether a part is in no node's memory."""
        self.bytes = 0
        """All that the keeper of this node holds."""

    def run(self) -> None:
        if not self._own and self._meta is None:
            return
        try:
            pieces = {part: safetensors.encoded(own, of_part(part, self.at.iteration)) for part, own in self._own}
            files = {part: (digest_of(bytes(content[0])), content) for part, content in pieces.items()}
            if self._meta is not None:
                files[META] = ("", [json.dumps(self._meta).encode()])
            sent = [self._sent(node, files) for node in self._nodes]
            self.failed = not any(sent)
        except BaseException as error:  # noqa: BLE001  (a failed save ends no run)
            self.failed = True
            self.missed.append(repr(error))
        self._own = []

    def _sent(self, node: str, files: Dict[str, Tuple[str, List[Any]]]) -> bool:
        """Whether a node has all parts now."""
        try:
            with Keeper(self._run, node, self.at.start) as keeper:
                for part, (digest, content) in files.items():
                    held = keeper.put(self.at, part, digest, content, self._keep)
        except KeeperLost as error:
            self.missed.append(f"iteration {self.at.iteration}: {error}")
            return False
        if node == self._nodes[0]:
            self.bytes = held
        return True
