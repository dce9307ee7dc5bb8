"""The blocks of a model of transformers that no profile knows: counted by a process of its own, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from conf.blocks_of_module import digest_of
from conf.schema.model import Model
from conf.torch_answers import ERROR, FAILED, answer, has_transformers
from fasop.costs.measured_module import LOSS, BlockCounts, MeasuredBlock, MeasuredModule, MeasuredWire, PassCounts
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
