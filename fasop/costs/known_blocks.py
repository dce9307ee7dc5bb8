"""The blocks of a measured model, from the profiles of the GPUs that it is to run on or counted without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from conf.blocks_of_module import digest_of
from conf.schema.model import Model
from conf.torch_answers import ERROR, FAILED, answer, has_transformers
from fasop.costs.hardware import NodeKind
from fasop.costs.measured_module import (
    LOSS,
    BlockCounts,
    MeasuredBlock,
    MeasuredModule,
    MeasuredWire,
    PassCounts,
    in_groups,
)
from fasop.costs.profiles.profile import OTHER_16_BIT, ModelCosts, Module, SequenceBytes
from fasop.costs.training import Training
from fasop.errors import SearchError
from megatron_ext.contract.train_config import Adapters, Precision

COUNTER = "megatron_ext.memory"


def counted(
    model: Model, precision: Precision, adapters: Adapters | None, tensors: Sequence[int], sizes: Sequence[int]
) -> tuple[list[MeasuredModule], dict[int, str]]:
    """The model as a rank of a tensor group of each of these sizes has it, with micro-batches of these `sizes`, where
    `adapters` alone are trained if there are any; and why it cannot have the others.

    Raises:
        SearchError: torch or transformers is not here, or the model cannot be cut so.
    """
    digest = digest_of(model)
    train = {"seed": 1, "precision": str(precision), **(asdict(adapters) if adapters else {})}
    request = {"model": asdict(model.sized(1)), "train": train, "sizes": [*sizes], "tensors": [*tensors]}
    found = answer(COUNTER, request, digest)
    if ERROR in found and has_transformers():
        raise SearchError(f"{model.said}: {found[ERROR]}")
    if why := found.get(ERROR, found.get(FAILED)):
        measure = f"measure its blocks with 'tdpp profile {model.said} profile=NAME', and add profile=NAME"
        if adapters is not None:
            measure = "a prediction of adapters needs torch and transformers: pip install 'tdpp[huggingface]'"
        raise SearchError(f"{model.said}: the memory of its blocks cannot be counted here: {why}; {measure}")
    modules = [_of_rank(model, digest, int(tensor), one) for tensor, one in found["tensors"].items()]
    return modules, {int(tensor): why for tensor, why in found["refused"].items()}


def _of_rank(model: Model, digest: str, tensor: int, found: Mapping[str, Any]) -> MeasuredModule:
    module, by_name, sizes = found["module"], found["bytes"], found["sizes"]
    blocks = [*module["blocks"], {"name": LOSS, "kind": LOSS, "held": "last", "parameters": 0, "fixed_bytes": 0}]

    def of(key: str, number: int) -> tuple[int, ...]:
        return tuple(values[number] for values in by_name[key])

    def passed(number: int, way: str) -> PassCounts:
        operations, traffic, kernels, sums, sum_bytes = zip(*(values[number] for values in by_name[way]), strict=True)
        return PassCounts(
            operations=operations, traffic=traffic, kernels=max(kernels), sums=sums[0], sum_bytes=sum_bytes
        )

    return MeasuredModule(
        model,
        digest=digest,
        sequence=[
            MeasuredBlock(
                name=block["name"],
                kind=block["kind"],
                held=block.get("held"),
                parameters=block["parameters"],
                fixed_bytes=block["fixed_bytes"],
                kept=of("kept", number),
                given=of("given", number),
                counts=BlockCounts(
                    passing=of("passing", number),
                    passing_again=of("passing_again", number),
                    dropped=of("dropped", number),
                    forward=passed(number, "forward"),
                    backward=passed(number, "backward"),
                ),
            )
            for number, block in enumerate(blocks)
        ],
        sizes=sizes,
        crossing=[of("crossing", number) for number in range(len(by_name["crossing"][0]))],
        wires=[
            MeasuredWire(giver=giver, takers=tuple(takers), bytes=of("wires", number))
            for number, (giver, *takers) in enumerate(module["wires"])
        ],
        tied_parameters=module["tied_parameters"],
        tied_blocks=module["tied_blocks"],
        tensor=tensor,
        always=max(one for (one,) in by_name["always"]),
    )


COUNTED = (1, 4)
"""Micro-batch sizes for which bytes are counted: between and beyond them they grow evenly."""


def with_known_blocks(training: Training, kinds: Sequence[NodeKind], tensors: Sequence[int] = ()) -> Training:
    """The same, whose model is a `MeasuredModule` if it is a user's module, or of another family that is measured; with
    what ranks have in tensor groups of these sizes, as far as the model can have such groups.

    What no profile knows of a model of transformers is counted without a GPU. A profile has the times of a training of
    all weights: those of adapters follow from them.

    Raises:
        SearchError: a GPU's profile does not know the module as it is now, or not in this number format; or it cannot
            be counted.
    """
    model, parallel = training.model, training.parallel
    if not model.measured:
        return training
    if model.config is None:
        return replace(training, model=measured(model, training.precision, kinds))
    wanted = sorted({1, *tensors, *parallel.layout.tensors})
    sizes = tuple(sorted({*COUNTED, parallel.micro_batch_size}))
    adapters = training.adapters
    if not _in_any_profile(kinds, model):
        return replace(training, model=in_groups(*counted(model, training.precision, adapters, wanted, sizes)))
    known = measured(model, training.precision, kinds)
    if adapters is None and (wanted == [1] or not has_transformers()):
        return replace(training, model=known)
    found, refused = counted(model, training.precision, adapters, wanted, sizes)
    alone = found[0]
    if adapters is None:
        found[0] = known
    else:
        (alone,), _ = counted(model, training.precision, None, [1], sizes)
    for one in found:
        one.alone = None if one is known else alone
    return replace(training, model=in_groups(found, refused))


def _in_any_profile(kinds: Sequence[NodeKind], model: Model) -> bool:
    profiles = [kind.profile for kind in kinds if kind.profile is not None]
    return any(module.code == model.code_name for one in profiles for module in one.modules.values())


def measured(model: Model, precision: Precision, kinds: Sequence[NodeKind]) -> MeasuredModule:
    """A module whose bytes are, where GPUs differ, the most of any. Raises SearchError: as `with_known_blocks`."""
    found = [(kind, module_in(kind, model)) for kind in kinds]
    first, (_, module) = found[0][0], found[0][1]
    for kind, (_, other) in found[1:]:
        if (other.blocks, other.wires) != (module.blocks, module.wires):
            raise SearchError(
                f"{model.said}: profile {kind.gpu.profile!r} has different blocks than profile {first.gpu.profile!r}; "
                f"measure both again with 'tdpp profile'"
            )
    points = [_points(kind, name, model, precision) for kind, (name, _) in found]
    common = sorted(set.intersection(*({one.micro_batch_size for one in of} for of in points)))
    if not common:
        gpus = ", ".join(kind.gpu.name for kind in kinds)
        raise SearchError(
            f"{model.said}: the profiles of {gpus} have no micro-batch size in common; measure the same "
            "micro_batches=… with 'tdpp profile'"
        )
    by_size = [[_sequence(one) for of in points for one in of if one.micro_batch_size == size] for size in common]

    def most(key: str, number: int) -> tuple[int, ...]:
        return tuple(max(getattr(one, key)[number] for one in of) for of in by_size)

    known = all(one.wires for of in by_size for one in of)
    sequence = [
        MeasuredBlock(
            name=block.name,
            kind=block.kind,
            held=block.held,
            parameters=block.parameters,
            fixed_bytes=block.fixed_bytes,
            kept=most("kept", number),
            given=most("given", number),
        )
        for number, block in enumerate(module.blocks)
    ]
    of_loss = tuple(
        max(one.parts[LOSS].activation_bytes or 0 for of in points for one in of if one.micro_batch_size == size)
        for size in common
    )
    loss = MeasuredBlock(name=LOSS, kind=LOSS, held="last", parameters=0, fixed_bytes=0, kept=of_loss, given=of_loss)
    return MeasuredModule(
        model,
        digest=module.digest,
        sequence=[*sequence, loss],
        sizes=common,
        crossing=[most("crossing", number) for number in range(len(module.counted) + 1)],
        wires=[
            MeasuredWire(giver=giver, takers=tuple(takers), bytes=most("wires", number))
            for number, (giver, *takers) in enumerate(module.wires if known else [])
        ],
        tied_parameters=module.tied_parameters,
        tied_blocks=module.tied_blocks,
    )


def module_in(kind: NodeKind, model: Model) -> tuple[str, Module]:
    """What a GPU's profile knows of a module, and under which name. Raises SearchError: nothing, or of another version
    of its file."""
    profile, gpu = kind.profile, kind.gpu
    words = f"model=module {model.said}{' model.capture=true' * model.capture}" if model.code else model.said
    again = f"'tdpp profile {words} profile=NAME'"
    if profile is None or not (modules := profile.modules):
        what = f"{gpu.name} has no profile" if profile is None else f"profile {gpu.profile!r} has no times of modules"
        raise SearchError(
            f"{model.said}: a prediction needs the cost of each block, but {what}; measure them with {again}, and add "
            f"profile=NAME"
        )
    named = [name for name, module in modules.items() if module.code == model.code_name]
    if not named:
        known = ", ".join(module.code for module in modules.values())
        raise SearchError(
            f"{model.said}: profile {gpu.profile!r} was measured with other code, {known}; measure this one with "
            f"{again}"
        )
    digest = digest_of(model)
    changed = f"{model.code_file} has changed since profile {gpu.profile!r} was measured"
    if model.code is None:
        changed = f"profile {gpu.profile!r} is for a model.family={model.family} of other sizes"
    now = [name for name in named if modules[name].digest == digest]
    if not now:
        raise SearchError(f"{model.said}: {changed}; measure it again with {again}")
    for name in now:
        if modules[name].is_of(model, digest):
            return name, modules[name]
    other = str(not model.capture).lower()
    raise SearchError(
        f"{model.said}: profile {gpu.profile!r} has its blocks only with model.capture={other}; use that, or "
        f"measure it with {again}"
    )


def _points(kind: NodeKind, name: str, model: Model, precision: Precision) -> Sequence[ModelCosts]:
    """The costs of a module in a profile, by micro-batch size; those of the other format of 16 bits have as many
    bytes."""
    assert kind.profile is not None
    every = [costs for costs in kind.profile.costs if costs.model == name]
    for wanted in (precision, OTHER_16_BIT.get(precision)):
        if found := [costs for costs in every if costs.precision is wanted]:
            return found
    formats = " and ".join(dict.fromkeys(str(costs.precision) for costs in every))
    raise SearchError(
        f"{model.said}: profile {kind.gpu.profile!r} has its times in {formats or 'no number format'}, not "
        f"in train.precision={precision}; measure that with 'tdpp profile' and add=true"
    )


def _sequence(costs: ModelCosts) -> SequenceBytes:
    assert costs.sequence is not None, "checked when the profile was read"
    return costs.sequence
