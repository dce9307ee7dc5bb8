"""Where the parameters of ours are among the tensors of a model that Hugging Face saved. Only reading them
needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, List, Mapping, NamedTuple, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.pieces import Parameter

if TYPE_CHECKING:
    from torch import Tensor


class Twin(NamedTuple):
    """Says where a parameter of ours is there: in one tensor, or in several that lie one after another here."""

    names: Tuple[str, ...]
    transposed: bool = False
    """Whether it lies there as [inputs, outputs]."""
    less: float = 0.0
    """How much smaller its numbers are there."""

    def within(self, prefix: str) -> Twin:
        return self._replace(names=tuple(prefix + name for name in self.names))

    def theirs(self, tensor: Tensor, parameter: Parameter) -> Iterator[Tuple[str, Tensor]]:
        """Their tensors from ours."""
        lengths = self._lengths(len(tensor), parameter)
        for name, part in zip(self.names, tensor.split(lengths)):  # type: ignore[no-untyped-call]
            part = part - self.less if self.less else part
            yield name, part.t() if self.transposed else part

    def require(self, path: Path, found: Mapping[str, Any], parameter: Parameter) -> None:
        """Whether theirs, which have a `shape`, can be ours; `path` is for messages. Raises EngineError: one is
        missing, or has another shape."""
        for name, length in zip(self.names, self._lengths(parameter.shape[0], parameter)):
            wanted = [length, *parameter.shape[1:]]
            there = wanted[::-1] if self.transposed else wanted
            if list(taken(path, found, name).shape) != there:
                raise EngineError(f"{path}: expected {name} of shape {there}, found {list(found[name].shape)}")

    def ours(self, path: Path, found: Mapping[str, Tensor], parameter: Parameter) -> Tensor:
        """Ours, in fp32, from theirs in `path`; raises as `require`."""
        import torch

        self.require(path, found, parameter)
        theirs = [found[name] for name in self.names]
        parts = [(tensor.t() if self.transposed else tensor).float() for tensor in theirs]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole + self.less if self.less else whole

    def _lengths(self, rows: int, parameter: Parameter) -> List[int]:
        """Rows of each of theirs, of so many together."""
        pieces = parameter.pieces
        return [rows] if len(self.names) == 1 else [rows * piece // sum(pieces) for piece in pieces]


def taken(path: Path, tensors: Mapping[str, Any], name: str) -> Any:
    """The tensor of this name; raises EngineError if there is none."""
    if name not in tensors:
        raise EngineError(f"{path}: expected a tensor {name}, found {len(tensors)} others")
    return tensors[name]
