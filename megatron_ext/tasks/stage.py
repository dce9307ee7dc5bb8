"""The blocks that one virtual pipeline stage holds, as a module; a rank's share of them, with a tensor group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import Part, block_of
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.task import Placement, Task, Tensors

MOST_THREADS = 8
"""That draw a stage's weights, where a rank has as many cores."""


class _Step(NamedTuple):
    """A block's turn in a forward pass."""

    module: nn.Module
    takes: Tuple[str, ...]
    gives: Tuple[str, ...]
    dropped: Tuple[str, ...]
    """What nobody takes after it."""


def untrained(root: nn.Module) -> Iterator[Tuple[Tensor, bool]]:
    """Buffers and frozen parameters, and whether the model's number format is theirs, too."""
    for module in root.modules():
        keeps = getattr(module, "keeps_format", False)
        for one in module.buffers(recurse=False):
            yield one, one.is_floating_point() and not keeps
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad:
                yield parameter, parameter.is_floating_point()


class Stage(nn.Module):
    """A stage's blocks, which pass tensors to each other by name.

    Parameters are named and initialised by their place in the whole model, so that every cut gives the same weights.
    """

    def __init__(
        self, task: Task, part: Part, tensor: TensorGroup, owned: Optional[Dict[str, nn.Parameter]] = None
    ) -> None:
        """`owned` are parameters by name that earlier chunks of this rank hold; one tied to them is the same."""
        super().__init__()
        self.part = part
        self.inputs = part.inputs
        self.last = part.last
        self._task = task
        self._tensor = tensor
        owned = {} if owned is None else owned
        self.places: Dict[str, Tuple[str, str]] = {}
        """For each parameter's name in the whole model: its block, and its name there. A tied one has the owner's."""
        self._named: List[Tuple[str, nn.Parameter]] = []
        self.shared: List[nn.Parameter] = []
        """Those that another block of this rank uses, too."""
        self.state: List[Tuple[str, str, Tensor]] = []
        """What a checkpoint has that is not trained: buffers and frozen parameters, by block and name there."""
        self._steps: List[_Step] = []
        self.blocks = nn.ModuleList()
        last_use = {name: number for number, block in enumerate(part.blocks) for name in block.takes}
        for number, block in enumerate(part.blocks):
            module = block.make(tensor)
            self._keep_state(block.name, module)
            for inner, parameter in list(module.named_parameters()):
                if not parameter.requires_grad:
                    continue
                name = f"{block.name}.{inner}"
                owner = task.tied.get(name, name)
                if owner in owned:
                    _replace(module, parameter, owned[owner])
                    self.shared.append(owned[owner])
                    continue
                owned[owner] = parameter
                self._named.append((name, parameter))
                holder = block.name if owner == name else block_of(task.blocks, owner).name
                self.places[name] = holder, owner[len(holder) + 1 :]
            self.blocks.append(module)
            dropped = {name for name in block.takes if last_use[name] == number} - set(part.leaves)
            self._steps.append(_Step(module, block.takes, block.gives, tuple(dropped)))
        self._drawing: List[Any] = [module for module in self.blocks if hasattr(module, "first")]
        self.counted = [
            module for block, module in zip(part.blocks, self.blocks) if block.placement is Placement.COUNTED
        ]

    def forward(self, entered: Tensors) -> Tensors:
        """From the wires and inputs that the stage takes, by name, to those that leave it."""
        values = dict(entered)
        for module, takes, gives, dropped in self._steps:
            given = module(*[values[name] for name in takes])
            for name in dropped:
                del values[name]
            if len(gives) == 1:
                values[gives[0]] = given
            else:
                values.update(zip(gives, given))
        return {name: values[name] for name in self.part.leaves}

    def parameters_by_name(self) -> List[Tuple[str, nn.Parameter]]:
        """Every parameter once, first to last block, under its name in the whole model.

        Not those of earlier chunks. A copy of a tied parameter has a name of its own where the owner is on another
        rank.
        """
        return list(self._named)

    def defer_weight_grads(
        self,
        later: WeightGradients,
        shared: Sequence[nn.Parameter] = (),
        where: Callable[[nn.Parameter], bool] = lambda _: True,
    ) -> None:
        """Lets a backward pass leave weight gradients to `later`, in modules that can and have a parameter `where` so.

        Not where a parameter is among the `shared` of this rank: it gets the gradients of both blocks as one.
        """
        apart = {id(parameter) for parameter in (*self.shared, *shared)}
        for module in self.blocks:
            parameters = list(module.parameters())
            if not hasattr(module, "later") or any(id(parameter) in apart for parameter in parameters):
                continue
            if any(map(where, parameters)):
                setattr(module, "later", later)  # noqa: B010  (a type checker knows no attribute of all modules)

    def begin(self, first: int) -> None:
        """Tells blocks that draw random numbers the number of the first sample of the micro-batch that comes next."""
        for module in self._drawing:
            module.first = first

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Puts what is not trained where the parameters are, in the model's number format; not buffers of a module that
        keeps theirs."""
        for tensor, changes in untrained(self):
            tensor.data = tensor.data.to(device, dtype if changes else tensor.dtype)
        for module in self.modules():
            place_constants = getattr(module, "place_constants", None)
            if place_constants is not None:
                place_constants(device, dtype)

    def _keep_state(self, block: str, module: nn.Module) -> None:
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        tied = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name not in trained and id(tensor) not in tied and isinstance(tensor, Tensor):
                self.state.append((block, name, tensor))

    def compile_blocks(self) -> None:
        """Has torch compile the blocks that the partition counts, at their first call."""
        for module in self.counted:
            module.forward = torch.compile(module.forward)

    def initialise(self, threads: int) -> None:
        """Fills all parameters; each is drawn by itself, in so many threads."""

        def fill(named: Tuple[str, nn.Parameter]) -> None:
            self._task.initialise(named[0], named[1].detach(), self._tensor)

        if threads > 1:  # each parameter has a generator of its own, and torch draws in one thread
            with ThreadPoolExecutor(min(threads, MOST_THREADS)) as pool:
                list(pool.map(fill, self._named))
        else:
            for named in self._named:
                fill(named)


def threads_for(plan: Plan) -> int:
    """Cores that a rank may use while it draws its weights."""
    return usable_cores() // max(len(node.ranks) for node in plan.nodes)


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Has modules be as in an evaluation while the block lasts; then each has the mode that it had."""
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def backward(left: Tensors, gradients: Mapping[str, Optional[Tensor]]) -> None:
    """The backward pass from what left a stage, as far as anything behind it is trained; a loss needs no gradient."""
    roots = [name for name, tensor in left.items() if tensor.requires_grad]
    if roots:
        torch.autograd.backward([left[name] for name in roots], [gradients.get(name) for name in roots])


def _replace(module: nn.Module, before: nn.Parameter, parameter: nn.Parameter) -> None:
    """Wherever the module has it: it may have one under several names."""
    for part in module.modules():
        for name, held in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if held is before:
                setattr(part, name, parameter)
