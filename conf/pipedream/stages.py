"""How many of a model's blocks each stage of PipeDream's holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conf.errors import ConfigError
from conf.pipedream.placement import MODULES, Placement
from conf.pipedream.stage_modules import Layer, layers_of
from conf.schema.model import Model
from conf.visible import plural
from megatron_ext.contract.models.images import image_blocks
from megatron_ext.contract.models.model import ALEXNET, GNMT, IMAGES, MEASURED, RESNET, VGG
from megatron_ext.contract.models.parameters import block_numel

RECURRENT = ("LSTM", "EmuBidirLSTM", "RecurrentAttention")
KNOWN = (VGG, ALEXNET, RESNET, GNMT)


def from_modules(package: Path, placement: Placement, family: str) -> list[int]:
    """Blocks by stage, of a package of stage modules. A block is where its one layer is that no other block has.

    Raises:
        ConfigError: the package cannot be read, or has not as many modules as the placement.
    """
    modules = layers_of(package)
    if len(modules) + 1 != len(placement.modules):
        raise ConfigError(
            f"{MODULES} has {len(placement.modules)} entries, but {package} has {len(modules)} modules and the loss"
        )
    counts = [0] * len(placement.ranks)
    for stage, layers in zip(placement.modules, modules, strict=False):
        counts[stage] += sum(_begins(family, layer) for layer in layers)
    return counts


def _begins(family: str, layer: Layer) -> bool:
    """Whether it is the one layer of a block that makes it one: of a bottleneck its 3 x 3 convolution."""
    if family == GNMT:
        return layer.kind in RECURRENT
    if family == RESNET and layer.kind == "Conv2d":
        return layer.kernel > 1
    return layer.kind in ("Conv2d", "Linear")


def by_operations(model: Model, replicas: Sequence[int]) -> list[int]:
    """Blocks by stage, at least one each: the slowest stage's replicas have as little to compute as may be."""
    costs = _costs(model)
    count, stages = len(costs), len(replicas)
    if stages > count:
        raise ConfigError(f"model={model.name} has {count} blocks, too few for {plural(stages, 'stage')}")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [(sums[end] / replicas[0], [end]) for end in range(count + 1)]
    for stage in range(1, stages):
        best = [
            min(
                (max(best[cut][0], (sums[end] - sums[cut]) / replicas[stage]), [*best[cut][1], end])
                for cut in range(stage, end)
            )
            if end > stage
            else (float("inf"), [])
            for end in range(count + 1)
        ]
    ends = best[count][1]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _costs(model: Model) -> list[float]:
    """Multiplications of each counted block, with what the last stage has besides in the last one."""
    sized = model.sized(1)
    if sized.family in IMAGES:
        blocks = image_blocks(sized)
        costs = [float(block.products) for block in blocks if block.counted]
        costs[-1] += sum(block.products for block in blocks[1:] if not block.counted)
        costs[0] += 0 if blocks[0].counted else blocks[0].products
        return costs
    if sized.family in MEASURED:
        return [1.0] * model.counted
    costs = [float(block_numel(sized, stack.kind, 1)) for stack in sized.stacks() for _ in range(stack.layers)]
    costs[-1] += block_numel(sized, "head", 1)
    return costs
