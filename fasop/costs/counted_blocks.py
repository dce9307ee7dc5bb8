"""The blocks of a model of transformers that no profile knows: counted by a process of its own, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from conf.blocks_of_module import digest_of
from conf.schema.experiment import Model, Precision
from conf.torch_answers import ERROR, FAILED, answer, has_transformers
from fasop.costs.measured_module import LOSS, BlockCounts, MeasuredBlock, MeasuredModule, MeasuredWire, Sums
from fasop.errors import SearchError

COUNTER = "megatron_ext.memory"


def counted(
    model: Model, precision: Precision, tensors: Sequence[int], sizes: Sequence[int]
) -> tuple[list[MeasuredModule], dict[int, str]]:
    """The model as a rank of a tensor group of each of these sizes has it, with micro-batches of these `sizes`; and why
    it cannot have the others.

    Raises:
        SearchError: torch or transformers is not here, or the model cannot be cut so.
    """
    digest = digest_of(model)
    train = {"seed": 1, "precision": str(precision)}
    request = {"model": asdict(model.sized(1)), "train": train, "sizes": [*sizes], "tensors": [*tensors]}
    found = answer(COUNTER, request, digest)
    if ERROR in found and has_transformers():
        raise SearchError(f"{model.said}: {found[ERROR]}")
    if why := found.get(ERROR, found.get(FAILED)):
        measure = f"measure its blocks with 'tdpp profile {model.said} profile=NAME', and add profile=NAME"
        raise SearchError(f"{model.said}: the memory of its blocks cannot be counted here: {why}; {measure}")
    modules = [_of_rank(model, digest, int(tensor), one) for tensor, one in found["tensors"].items()]
    return modules, {int(tensor): why for tensor, why in found["refused"].items()}


def _of_rank(model: Model, digest: str, tensor: int, found: Mapping[str, Any]) -> MeasuredModule:
    module, by_name, sizes = found["module"], found["bytes"], found["sizes"]
    blocks = [*module["blocks"], {"name": LOSS, "kind": LOSS, "held": "last", "parameters": 0, "fixed_bytes": 0}]

    def of(key: str, number: int) -> tuple[int, ...]:
        return tuple(values[number] for values in by_name[key])

    def work(number: int, which: int) -> tuple[int, ...]:
        return tuple(values[number][which] for values in by_name["work"])

    def sums(number: int, which: int) -> Sums:
        of_sizes = [values[number][which : which + 2] for values in by_name["sums"]]
        return Sums(count=of_sizes[0][0], bytes=tuple(size for _, size in of_sizes))

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
                    operations=work(number, 0),
                    traffic=work(number, 1),
                    kernels=max(work(number, 2)),
                    forward=sums(number, 0),
                    backward=sums(number, 2),
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
