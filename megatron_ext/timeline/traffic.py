"""How many bytes a rank sends while it trains, counted where it sends them.

Of what the library sends for a rank, an all-reduce or an all-gather, a ring's part is counted: the least that any way
to do it sends, if all ranks send as much.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from fractions import Fraction
from typing import Counter as CounterOf
from typing import Dict, Iterator, Optional, Tuple, Union

import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.traffic import ALL_REDUCE, KINDS, TENSOR, WEIGHTS


class Traffic:
    """Of one rank, by kind of `megatron_ext.contract.traffic`."""

    def __init__(self) -> None:
        self._counted: CounterOf[Tuple[str, int]] = Counter()
        """By kind and divisor, for a ring's part of a tensor need not be whole bytes."""
        self._on = False

    def begin(self) -> None:
        """Called when training begins: what a model sends before, to warm up, does not count."""
        self._on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is sent meanwhile does not count."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def sent(self, kind: str, tensor: Tensor) -> None:
        """A message to one rank."""
        if self._on:
            self._counted[kind, 1] += bytes_of(tensor)

    def all_reduced(self, tensor: Tensor, group: Optional[dist.ProcessGroup], kind: str = ALL_REDUCE) -> None:
        """Summed over a group: every rank sends a share for each other rank, and then the sum of one for each."""
        self._shared(kind, tensor, group, 2)

    def all_gathered(self, own: Tensor, group: Optional[dist.ProcessGroup], kind: str = WEIGHTS) -> None:
        """Handed to all others of a group."""
        if self._on and group is not None:
            self._counted[kind, 1] += (dist.get_world_size(group) - 1) * bytes_of(own)

    def reduce_scattered(self, tensor: Tensor, group: Optional[dist.ProcessGroup], kind: str = TENSOR) -> None:
        """Summed over a group, of which each rank takes a share."""
        self._shared(kind, tensor, group, 1)

    def _shared(self, kind: str, tensor: Tensor, group: Optional[dist.ProcessGroup], times: int) -> None:
        if self._on and group is not None:
            ranks = dist.get_world_size(group)
            self._counted[kind, ranks] += times * (ranks - 1) * bytes_of(tensor)

    def total(self) -> Dict[str, Union[int, float]]:
        """Bytes of each kind: a whole number where they are."""
        sums = {kind: Fraction(0) for kind in KINDS}
        for (kind, divisor), count in self._counted.items():
            sums[kind] += Fraction(count, divisor)
        return {kind: int(found) if found.denominator == 1 else float(found) for kind, found in sums.items()}


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def report(plan: Plan, place: Place, traffic: Traffic, iteration: int, samples: int) -> None:
    """Rewrites traffic/rank-*.json: what was sent up to the end of an iteration, and for how many samples of a run."""
    path = plan.files.rank_traffic(place.rank)
    path.parent.mkdir(exist_ok=True)
    content = {"rank": place.rank, "stage": place.stage, "iteration": iteration, "samples": samples}
    write_json(path, {**content, "bytes": traffic.total()})
