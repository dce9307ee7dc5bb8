"""How many of a model's blocks each stage of PipeDream's holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from conf.errors import ConfigError
from conf.pipedream.placement import MODULES, Placement
from conf.schema.model import Model
from conf.visible import plural
from megatron_ext.contract.files import read_regular_text
from megatron_ext.contract.models.counts import block_numel
from megatron_ext.contract.models.images import image_blocks
from megatron_ext.contract.models.model import Family, family_named, family_names

MODEL = "model"
"""The function of a package that lists its modules and, last, the loss."""


class Layer(NamedTuple):
    """One that a module makes, `torch.nn.Conv2d(3, 64, kernel_size=(3, 3))`."""

    kind: str
    """Conv2d."""
    kernel: int
    """A side of a convolution; 1 of others."""


def layers_of(package: Path) -> list[list[Layer]]:
    """List the layers of each module, the loss left out. Raises ConfigError: it is not a package of stages, or what a
    module holds would be known only by running it."""
    tree = _parsed(package / "__init__.py")
    files = {
        name.asname or name.name: package / f"{node.module}.py"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for name in node.names
    }
    listed = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == MODEL), None)
    result = listed.body[-1] if listed else None
    if not (isinstance(result, ast.Return) and isinstance(result.value, ast.List) and result.value.elts):
        raise ConfigError(f"{package / '__init__.py'}: it has no {MODEL}() that returns a list of modules")
    return [_layers(one, files, package) for one in result.value.elts[:-1]]


def _layers(entry: ast.expr, files: dict[str, Path], package: Path) -> list[Layer]:
    """List the layers of `(Stage0(), [...], [...])`."""
    made = entry.elts[0] if isinstance(entry, ast.Tuple) and entry.elts else entry
    name = made.func.id if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) else None
    if name is None or name not in files:
        raise ConfigError(f"{package / '__init__.py'}: line {entry.lineno}: this module is not in its own file")
    tree = _parsed(files[name])
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    methods = found.body if found else []
    init = next((node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    if init is None:
        raise ConfigError(f"{files[name]}: it has no class {name} with an __init__")
    for node in ast.walk(init):
        if isinstance(node, ast.For | ast.While | ast.If | ast.comprehension):
            line = getattr(node, "lineno", init.lineno)
            raise ConfigError(f"{files[name]}: line {line}: only running it would show what this creates")
    return [
        layer
        for statement in init.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)
        for layer in _made(statement.value)
    ]


def _made(value: ast.expr) -> Iterator[Layer]:
    """All layers that an expression makes, also those inside of a torch.nn.Sequential."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            kind = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            yield Layer(kind, _kernel(node) if kind == "Conv2d" else 1)


def _kernel(call: ast.Call) -> int:
    given = [one.value for one in call.keywords if one.arg == "kernel_size"] or call.args[2:3]
    try:
        size = ast.literal_eval(given[0]) if given else 1
    except ValueError:
        return 1
    return max(size) if isinstance(size, tuple) and size else int(size) if type(size) is int else 1


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(read_regular_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not a Python file ({error})") from error


KNOWN = tuple(name for name in family_names() if family_named(name).pipedream_layers)


def from_modules(package: Path, placement: Placement, family: str) -> list[int]:
    """Blocks by stage, of a package of stage modules. A block is where its one layer is that no other block has. Raises
    ConfigError: the package cannot be read, or has not as many modules as the placement."""
    modules = layers_of(package)
    if len(modules) + 1 != len(placement.modules):
        raise ConfigError(
            f"{MODULES} has {len(placement.modules)} entries, but {package} has {len(modules)} modules and the loss"
        )
    counts = [0] * len(placement.ranks)
    for stage, layers in zip(placement.modules, modules, strict=False):
        counts[stage] += sum(_begins(family_named(family), layer) for layer in layers)
    return counts


def _begins(family: Family, layer: Layer) -> bool:
    """Whether it is the one layer of a block that makes it one: of a bottleneck its 3 x 3 convolution."""
    smallest = family.pipedream_kernel if layer.kind == "Conv2d" else 0
    return layer.kind in family.pipedream_layers and layer.kernel >= smallest


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
    if blocks := image_blocks(sized):
        costs = [float(block.products) for block in blocks if block.counted]
        costs[-1] += sum(block.products for block in blocks[1:] if not block.counted)
        costs[0] += 0 if blocks[0].counted else blocks[0].products
        return costs
    if sized.traits.measured:
        return [1.0] * model.counted
    costs = [float(block_numel(sized, stack.kind, 1)) for stack in sized.stacks() for _ in range(stack.layers)]
    costs[-1] += block_numel(sized, "head", 1)
    return costs
