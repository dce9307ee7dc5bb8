"""The samples of a user's data set, in an order that follows from the seed alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.data.samples import Samples
from megatron_ext.families.module import tree
from megatron_ext.families.module.code import UserCode

if TYPE_CHECKING:
    from numpy.typing import NDArray

DATA = "data"
"""The function of the user's file."""
INPUTS, TARGETS = "inputs", "targets"


class Item(NamedTuple):
    """The form of a sample."""

    inputs: Any
    """The shape (`tree.apart`) of what the model takes: a tensor, a tuple in the order of its arguments, or a dict."""
    targets: Any

    @property
    def names(self) -> List[str]:
        return [*tree.names(INPUTS, self.inputs), *tree.names(TARGETS, self.targets)]


class UserSamples(Samples):
    """What `data(split, seed)` of the user's file gives: a data set, or anything that gives a sample for its number.

    With a length, it is gone through again and again, each time in another order: that of torch's
    `DistributedSampler` with the run's seed. Without one, sample after sample is asked for, in order.

    Raises:
        EngineError: there is no such function, or it or a sample cannot be used.
    """

    def __init__(self, code: UserCode, split: str, count: int, seed: int) -> None:
        super().__init__(count, split)
        self._code = code
        self._seed = seed
        self._call = call = f"{DATA}({split!r}, {seed})"
        function = code.function(DATA)
        if function is None:
            raise code.error(
                f"{code.path} has no function {DATA}(split, seed); write one that returns the "
                "samples: a data set of (inputs, targets)"
            )
        with code.running(call):
            self._data: Any = function(split, seed)
        self.length = _length(self._data)
        """The length of the data set; None: it has none."""
        if self.length == 0:
            raise code.error(f"{call} has no samples")
        if not hasattr(self._data, "__getitem__"):
            raise code.error(
                f"{call} returns a {type(self._data).__name__}, but must "
                "return something that gives a sample for its number: with __getitem__, and __len__ if samples repeat"
            )
        self._epoch = -1
        self._permutation: Optional[NDArray[np.int64]] = None
        self.order: Dict[str, float] = {"seed": seed, "samples": -1 if self.length is None else self.length}
        self._form: Optional[Item] = None
        """That of the last sample, and the names of its tensors."""
        self._names: List[str] = []
        self._first = self._tensors(0)
        assert self._form is not None
        self.item: Item = self._form

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """`inputs…` and `targets…`, as `Item.names` calls them."""
        found = self._tensors(number)
        for name, array in found.items():
            first = self._first.get(name)
            if first is None or first.shape != array.shape or first.dtype != array.dtype:
                before = "it has none" if first is None else f"of sample 0 it is {list(first.shape)} of {first.dtype}"
                raise self._code.error(
                    f"{self._call}: {name} of sample {number} "
                    f"is {list(array.shape)} of {array.dtype}, but {before}; all samples must have the same shapes: "
                    "pad or cut them"
                )
        return found

    def _tensors(self, number: int) -> Dict[str, NDArray[Any]]:
        place = self._place(number)
        with self._code.running(f"sample {place} of {self._call}"):
            item = self._data[place]
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise EngineError(f"{self._said(place)} is a {_kind(item)}, but must be a pair: (inputs, targets)")
        try:
            (inputs, of_inputs), (targets, of_targets) = (tree.apart(_as_tensors(part)) for part in item)
        except TypeError as error:
            raise EngineError(f"{self._said(place)} holds {error}; give tensors, arrays or numbers") from error
        form = Item(inputs, targets)
        if form != self._form:
            self._form, self._names = form, form.names
        return dict(zip(self._names, map(_array, (*of_inputs, *of_targets))))

    def _said(self, place: int) -> str:
        """A sample, for a message."""
        return f"model.code={self._code.spec}: sample {place} of {self._call}"

    def _place(self, number: int) -> int:
        """Find the place of a sample in the data set."""
        if self.length is None:
            return number
        epoch, place = divmod(number, self.length)
        if epoch != self._epoch:
            source = torch.Generator().manual_seed(self._seed + epoch)
            self._permutation, self._epoch = torch.randperm(self.length, generator=source).numpy(), epoch
        assert self._permutation is not None
        return int(self._permutation[place])


def _length(data: Any) -> Optional[int]:
    """None for what has no length; torch's `Dataset` has none by itself."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_tensors(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_as_tensors(part) for part in value]
    if isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        return torch.as_tensor(value)
    return value


def _array(tensor: Tensor) -> NDArray[Any]:
    if tensor.requires_grad or not tensor.is_cpu:  # else both would take as long as all the rest
        tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy knows no such numbers
        tensor = tensor.float()
    if tensor.dtype == torch.float64 and tensor.dim() == 0:  # a Python number
        tensor = tensor.float()
    return tensor.numpy()


def _kind(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"{type(item).__name__} of {len(item)}"
    return type(item).__name__
