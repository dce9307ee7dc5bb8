"""Running statistics, such as a batch norm's, that are the same however micro-batches are laid out."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn


class Running(nn.Module):
    """A module whose forward passes gather a vector each; their mean over an iteration's micro-batches updates it.

    A pass itself uses what it finds in its own micro-batch, and what was gathered only counts at the iteration's end.
    """

    keeps_format = True
    """Its buffers stay in fp32, whatever the model's number format is."""
    gathered: Tensor
    """The sum over the micro-batches of this rank: a buffer that no checkpoint has."""

    @abstractmethod
    def update(self, mean: Tensor) -> None:
        """Takes the mean over all micro-batches of an iteration, of `gathered`'s shape."""
