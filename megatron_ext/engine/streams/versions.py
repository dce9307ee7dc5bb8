"""The versions of a rank's weights, each in a flat buffer of its own that nothing changes while a pass needs it."""

from __future__ import annotations

from typing import Callable, Collection, Dict, List

import torch
from torch import Tensor

from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import Optimizer


class Versions:
    """Version v is what the rank has after its v-th update since the pipeline was empty.

    The model's parameters are views of one version at a time. Autograd keeps parameters themselves, and looks at them
    in the backward pass: so that pass, too, begins by showing its version, which then is what the forward pass had.
    """

    def __init__(self, flat: FlatWeights, optimizer: Optimizer) -> None:
        self._flat = flat
        self._optimizer = optimizer
        self._held: Dict[int, Tensor] = {0: flat.weight}
        self._free: List[Tensor] = []
        self._shown = 0
        self.newest = 0
        self.most = 1
        """Held at once so far."""

    def show(self, version: int) -> None:
        """Has the model's parameters be of this version."""
        if version != self._shown:
            weight = self._held[version]
            for name, parameter in self._flat.parameters.items():
                parameter.data = self._flat.view(name, weight)
            self._shown = version

    def update(self, needed: Collection[int], step: Callable[[], float]) -> float:
        """Makes the next version: `step` changes the newest one, in a buffer of its own if passes still need that.

        All other versions that are not `needed` are let go. Returns what `step` does.
        """
        for version in [one for one in self._held if one not in needed and one != self.newest]:
            self._free.append(self._held.pop(version))
        before = self._held[self.newest]
        if self.newest in needed:
            self._optimizer.move(self._free.pop() if self._free else torch.empty_like(before))
        else:
            del self._held[self.newest]
        found = step()
        self.newest += 1
        self._held[self.newest] = self._flat.weight
        self.most = max(self.most, len(self._held))
        if self._shown not in self._held:
            self._shown = -1  # whose buffer is another one's now
        return found

    def restart(self) -> None:
        """With the pipeline empty: the newest version is all there is, and counts as version 0."""
        self.show(self.newest)
        for version in [one for one in self._held if one != self.newest]:
            self._free.append(self._held.pop(version))
        self._held = {0: self._held[self.newest]}
        self._shown = self.newest = 0
