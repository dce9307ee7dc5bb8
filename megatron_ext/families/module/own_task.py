"""A `Task` of the user's own, looked at before anything is started: two micro-batches pass its blocks, as on stages.

It is done on shapes alone (torch's device `meta`) where the user's code allows it, else on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, List, Set

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples
from megatron_ext.families.module.code import CPU, META, Fault, UserCode
from megatron_ext.families.module.walk import Walk
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import check
from megatron_ext.tasks.repeatable import repeatable
from megatron_ext.tasks.task import DTYPES, Block, Micro, Task, Tensors


def checked(task: Task, code: UserCode, plan: Plan) -> Task:
    """The task, whose blocks draw the same random numbers in every layout, and are computed again if the plan says so.
    Raises EngineError: it cannot be trained."""
    _require_attributes(task, code)
    try:
        check(task)
    except EngineError as error:
        raise code.error(f"{error}") from error
    micros = _micros(task, code, plan.micro_batch_size)
    dtype = DTYPES[plan.train.precision]
    with code.running(f"sizes({plan.micro_batch_size})"):
        sizes = dict(task.sizes(plan.micro_batch_size))
    try:
        drawing = Walk(task, code, micros[0], sizes, dtype, META).drawing()
    except Fault:
        raise
    except Exception:  # noqa: BLE001  (the user's code, which asks for numbers, or is wrong: the CPU will tell)
        drawing = set()
        for micro in micros:
            drawing |= Walk(task, code, micro, sizes, dtype, CPU).drawing()
    _require_initial_weights(task, code)
    task.blocks = [_repeatable(block, plan, block.name in drawing) for block in task.blocks]
    return task


def _require_attributes(task: Task, code: UserCode) -> None:
    rows = (tuple, list)
    for attribute, kinds, of in (
        ("blocks", rows, Block),
        ("wires", (dict,), str),
        ("inputs", rows, str),
        ("outputs", rows, str),
        ("tied", (dict,), str),
    ):
        found = getattr(task, attribute, None)
        if not isinstance(found, kinds) or not all(isinstance(one, of) for one in found):
            raise code.error(
                f"{attribute} of {type(task).__name__} must be a "
                f"{'dict by name' if kinds == (dict,) else f'tuple or list of {of.__name__}'}, but is {found!r:.80}"
            )
    for block in task.blocks:
        for attribute in ("takes", "gives"):
            found = getattr(block, attribute)
            if not isinstance(found, rows):
                raise code.error(f"{attribute} of block {block.name} must be a tuple of names, but is {found!r}")


def _repeatable(block: Block, plan: Plan, draws: bool) -> Block:
    if not draws and plan.recompute != "full":
        return block
    return block._replace(make=partial(_made, block, plan.train.seed if draws else None, plan.recompute == "full"))


def _made(block: Block, seed: Any, recompute: bool, tensor: TensorGroup) -> nn.Module:
    return repeatable(block.make(tensor), block.name, seed, recompute)


def _micros(task: Task, code: UserCode, micro_batch_size: int) -> List[Micro]:
    """The first two micro-batches."""
    what, count = f"samples('train', {2 * micro_batch_size})", 2 * micro_batch_size
    with code.running(what):
        samples = task.samples("train", count)
    if not isinstance(samples, Samples) or not isinstance(getattr(samples, "order", None), dict):
        raise code.error(
            f"{what} returns a {type(samples).__name__}, but must return a "
            "megatron_ext.data.samples.Samples, with `order`: a dict of numbers that the samples' order follows from"
        )
    if len(samples) < count:
        raise code.error(f"{what} returns only {len(samples)} samples; repeat them from the first one on")
    micros = []
    for numbers in np.arange(count).reshape(2, micro_batch_size):
        with code.running(f"batch() of {what}"):
            batch = samples.batch(numbers)
        with code.running("micro(sample)"):
            micro = task.micro({name: torch.from_numpy(array) for name, array in batch.items()})
        if not isinstance(micro, Micro):
            raise code.error(
                f"micro(sample) returns a {type(micro).__name__}, but must return a megatron_ext.tasks.task.Micro"
            )
        missing = [name for name in task.inputs if name not in micro.inputs]
        if missing:
            raise code.error(
                f"micro(sample) gives no input {', '.join(missing)}, which `inputs` names; it "
                f"gives {', '.join(micro.inputs) or 'none'}"
            )
        weight = micro.weight
        if weight is not None and not (isinstance(weight, Tensor) and weight.numel() == 1):
            raise code.error("micro(sample) must give its weight as a tensor of one number")
        micros.append(micro)
    return micros


def _require_initial_weights(task: Task, code: UserCode) -> None:
    """That they follow from a parameter's name alone, and are the same where parameters are tied."""
    tied = {*task.tied, *task.tied.values()}
    kinds: Set[str] = set()
    found: Tensors = {}
    for block in task.blocks:
        if block.kind in kinds and not any(name.startswith(f"{block.name}.") for name in tied):
            continue
        kinds.add(block.kind)
        weights, others = (_initial_weights(task, code, block, seed) for seed in (0, 1))
        for name, weight in weights.items():
            if not torch.equal(weight, others[name]):
                raise code.error(
                    f"the initial {name} depends on what was drawn before, so it would differ "
                    "with the layout; initialise() must fill it with numbers that follow from its name and the seed"
                )
        found.update(weights)
    for copy, owner in task.tied.items():
        if copy in found and owner in found and not torch.equal(found[copy], found[owner]):
            raise code.error(
                f"initialise() fills {copy} with other numbers than {owner}, to which it is "
                "tied; both must follow from the owner's name: self.tied.get(name, name)"
            )


def _initial_weights(task: Task, code: UserCode, block: Block, drawn_before: int) -> Tensors:
    weights = {}
    with torch.random.fork_rng([]):
        torch.manual_seed(drawn_before)
        for inner, parameter in block.make(TensorGroup()).named_parameters():
            name, weight = f"{block.name}.{inner}", parameter.detach().clone()
            if parameter.requires_grad:
                with code.running(f"initialise({name!r}, parameter, tensor)"):
                    task.initialise(name, weight, TensorGroup())
            weights[name] = weight
    return weights
