"""What PipeDream's runtime needs of a division: stages and ranks, configurations of its driver and, of some models, the
stage modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from conf.pipedream.driver import ModelType
from conf.pipedream.placement import placed
from conf.pipedream.stages import KNOWN
from conf.pipedream.words import MODELS
from megatron_ext.contract.models.images import ImageFamily, StackedFamily, image_blocks
from megatron_ext.contract.models.model import ModelConfig, family_named
from megatron_ext.contract.models.pieces import ImageBlock

CONTAINER = "nvcr.io/nvidia/pytorch:23.04-py3"
PACKAGES, DRIVERS = "models", "driver_configs"
"""In the folder of a model's type, such as runtime/image_classification."""


def name_in_python(name: str) -> str:
    """A model's name as a part of a module's name; some have PipeDream's."""
    known = {ours: theirs for theirs, ours in MODELS.items()}
    return known.get(name, re.sub(r"\W", "_", name, flags=re.ASCII))


def package_folder(name: str, ranks: int) -> Path:
    return Path(PACKAGES) / name_in_python(name) / f"gpus={ranks}"


def files_of(
    name: str,
    replicas: Sequence[int],
    graph: str,
    machines: Sequence[str],
    kind: ModelType | None,
    batch: int | None = None,
    model: ModelConfig | None = None,
    partition: Sequence[int] | None = None,
) -> dict[Path, str]:
    """The files to write, by path in the folder of a model's type.

    Args:
        graph: the annotated graph, `gpus=N.txt`.
        machines: `host:gpu` by rank.
        kind: of the model; None: PipeDream's driver knows none such, so that there are no configurations for it.
        batch: samples of a worker; None: that of PipeDream's programs.
        model, partition: of a model of tdpp.
    """
    ranks, stages = sum(replicas), len(replicas)
    package = package_folder(name, ranks)
    modules = [*range(stages), stages - 1]
    found = {
        package / f"gpus={ranks}.txt": graph,
        package / "dp_conf.json": placed([0] * (stages + 1), [ranks]).text(),
        package / "mp_conf.json": placed(modules, [1] * stages, partition=partition).text(),
        package / "hybrid_conf.json": placed(modules, replicas, partition=partition).text(),
    }
    if model is not None and partition is not None and model.family in WRITTEN:
        source = stage_package(model, partition, name_in_python(name))
        found |= {package / file: text for file, text in source.items()}
        found[package.parent / "__init__.py"] = ""
    if kind is None:
        return found
    for suffix, file in (("pipedream", "hybrid_conf.json"), ("dp", "dp_conf.json")):
        driver = Path(DRIVERS) / f"{name_in_python(name)}_{ranks}{suffix}.yml"
        found[driver] = _driver(package, package / file, machines[:ranks], kind, batch)
    return found


def _driver(package: Path, placement: Path, machines: Sequence[str], kind: ModelType, batch: int | None) -> str:
    """Learning rates are those of PipeDream's own files."""
    images = kind is ModelType.images
    values = {
        "log_directory": "runs",
        "module": ".".join(package.parts),
        "data_dir": "data",
        "config_file": str(placement),
        "container": CONTAINER,
        "machines": list(machines),
        **({} if batch is None else {"batch_size": batch}),
        "learning_rate": 0.01 if images else 0.0003,
        "weight_decay": 0.0005 if images else 0.0,
        "epochs": 60 if images else 10,
        "print_frequency": 100,
        "verbose_frequency": 0,
        "learning_rate_policy": "polynomial",
        "model_type": str(kind),
        "distributed_backend": "nccl" if placement.name.startswith("dp") else "gloo",
    }
    return "".join(f"{key!r}: {value!r}\n" for key, value in values.items())


WRITTEN = tuple(name for name in KNOWN if isinstance(family_named(name), ImageFamily))
_INITIAL = """
    def _initialize_weights(self):
        for module in self.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, 0.0, 0.01)
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)) and module.bias is not None:
                torch.nn.init.zeros_(module.bias)
"""


class _Source:
    """A module's layers, and the lines of its forward pass, whose result is `out`."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.lines: list[str] = []

    def layer(self, made: str, taken: str = "out", given: str = "out") -> None:
        name = f"self.layer{len(self.layers)}"
        self.layers.append(f"{name} = torch.nn.{made}")
        self.lines.append(f"{given} = {name}({taken})")

    def line(self, text: str) -> None:
        self.lines.append(text)

    def text(self, number: int) -> str:
        made = "".join(f"        {one}\n" for one in self.layers)
        passed = "".join(f"        {one}\n" for one in self.lines)
        return (
            f"import torch\n\n\nclass Stage{number}(torch.nn.Module):\n    def __init__(self):\n"
            f"        super(Stage{number}, self).__init__()\n{made}        self._initialize_weights()\n\n"
            f"    def forward(self, input0):\n        out = input0.clone()\n{passed}        return out\n{_INITIAL}"
        )


def stage_package(model: ModelConfig, partition: Sequence[int], name: str) -> dict[str, str]:
    """Return the files of the package of a model of one of the `WRITTEN` families, whose stages hold so many blocks, by
    name."""
    blocks = image_blocks(model)
    files = {}
    stages = len(partition)
    for number, count in enumerate(partition):
        first = sum(partition[:number])
        source = _Source()
        for place in range(first, first + count):
            _add(source, model, blocks, place)
        files[f"stage{number}.py"] = source.text(number)
    imports = "".join(f"from .stage{number} import Stage{number}\n" for number in range(stages))
    entries = "".join(f'        (Stage{n}(), ["{_wire(n)}"], ["{_wire(n + 1)}"]),\n' for n in range(stages))
    made = ", ".join(f"Stage{number}()" for number in range(stages))
    files["__init__.py"] = (
        f'import torch\n\n{imports}\n\ndef arch():\n    return "{name}"\n\n\n'
        f"def model(criterion):\n    return [\n{entries}"
        f'        (criterion, ["{_wire(stages)}"], ["loss"]),\n    ]\n\n\ndef full_model():\n'
        f"    return torch.nn.Sequential({made})\n"
    )
    return files


def _wire(number: int) -> str:
    return f"out{number - 1}" if number else "input0"


def _add(source: _Source, model: ModelConfig, blocks: Sequence[ImageBlock], place: int) -> None:
    block = blocks[place]
    family = model.traits
    if not isinstance(family, StackedFamily):
        _add_of_resnet(source, model, block)
    elif "conv.weight" in block.parameters:
        outputs, inputs, kernel, _ = block.parameters["conv.weight"]
        stride, padding, pool = family.window(model, place)
        _convolution(source, inputs, outputs, kernel, stride, padding, bias=True)
        source.layer("ReLU(inplace=True)")
        if pool:
            source.layer(f"MaxPool2d(kernel_size={pool}, stride=2)")
    else:
        _add_linear(source, family, model, blocks, place)


def _add_linear(
    source: _Source, family: StackedFamily, model: ModelConfig, blocks: Sequence[ImageBlock], place: int
) -> None:
    outputs, inputs = blocks[place].parameters["linear.weight"]
    linear = f"Linear(in_features={inputs}, out_features={outputs}, bias=True)"
    if blocks[place].name == "linear.0":
        most = family.most_places
        if place and blocks[place - 1].gives[1] > most:
            source.layer(f"AdaptiveAvgPool2d(({most}, {most}))")
        source.line("out = torch.flatten(out, 1)")
    last = place == len(blocks) - 1
    dropout = f"Dropout(p={model.hidden_dropout})"
    if family.drops_first and not last:
        source.layer(dropout)
    source.layer(linear)
    if not last:
        source.layer("ReLU(inplace=True)")
    if not family.drops_first and not last:
        source.layer(dropout)


def _add_of_resnet(source: _Source, model: ModelConfig, block: ImageBlock) -> None:
    epsilon = model.norm_epsilon
    if block.name == "stem":
        outputs, inputs, kernel, _ = block.parameters["conv.weight"]
        _convolution(source, inputs, outputs, kernel, 2, 3)
        source.layer(f"BatchNorm2d({outputs}, eps={epsilon})")
        source.layer("ReLU(inplace=True)")
        source.layer("MaxPool2d(kernel_size=3, stride=2, padding=1)")
        return
    if block.name == "head":
        outputs, inputs = block.parameters["linear.weight"]
        source.line("out = out.mean((2, 3))")
        source.layer(f"Linear(in_features={inputs}, out_features={outputs}, bias=True)")
        return
    strides = {"1": 2 if block.kind.endswith("-halved") else 1}
    source.line("shortcut = out")
    for part in ("0", "1", "2"):
        outputs, inputs, kernel, _ = block.parameters[f"conv_{part}.weight"]
        _convolution(source, inputs, outputs, kernel, strides.get(part, 1), kernel // 2)
        source.layer(f"BatchNorm2d({outputs}, eps={epsilon})")
        if part != "2":
            source.layer("ReLU(inplace=True)")
    if (shape := block.parameters.get("conv_shortcut.weight")) is not None:
        _convolution(source, shape[1], shape[0], 1, strides["1"], 0, of="shortcut")
        source.layer(f"BatchNorm2d({shape[0]}, eps={epsilon})", "shortcut", "shortcut")
    source.line("out = out + shortcut")
    source.layer("ReLU(inplace=True)")


def _convolution(
    source: _Source,
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    bias: bool = False,
    of: str = "out",
) -> None:
    made = f"Conv2d({inputs}, {outputs}, kernel_size=({kernel}, {kernel}), stride=({stride}, {stride})"
    source.layer(f"{made}, padding=({padding}, {padding}), bias={bias})", of, of)
