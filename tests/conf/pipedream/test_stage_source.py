"""Stage modules that are written for PipeDream's runtime: in plain torch they give what the model gives."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.compose import compose
from conf.pipedream import export, stages
from conf.pipedream.placement import placed
from launch.control.planning.plan import make_plan
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup

CASES = {
    "vgg": (["model=vgg-tiny"], [2, 1, 3]),
    "vgg-with-larger-maps": (["model=vgg-tiny", "model.image_size=64"], [4, 1, 1]),
    "alexnet": (["model=alexnet-tiny"], [1, 4, 3]),
    "alexnet-with-larger-maps": (["model=alexnet-tiny", "model.image_size=300"], [5, 3]),
    "resnet": (["model=resnet-tiny"], [1, 2, 1, 1]),
    "deep-resnet": (["model=resnet-tiny", "model.depths=2-2-1", "model.image_size=32"], [2, 3, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_stages_in_plain_torch_give_what_the_model_gives(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, partition = CASES[case]
    plan = make_plan(compose([*words, "parallel=single", "parallel.micro_batch_size=4", "data=digits"]), "run")
    package = tmp_path / f"exported_{case.replace('-', '_')}"
    package.mkdir()
    for name, text in export.stage_package(plan.model, partition, "any").items():
        (package / name).write_text(text)
    counts = stages.from_modules(package, placed([*range(len(partition)), 0], [1] * len(partition)), plan.model.family)
    assert counts == partition
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module(package.name)
    criterion = nn.CrossEntropyLoss()
    *entries, last = module.model(criterion)
    assert last == (criterion, [f"out{len(partition) - 1}"], ["loss"])
    ours = stage_of(plan, 0, TensorGroup())
    theirs = nn.Sequential(*(entry[0] for entry in entries))
    parameters = [parameter for _, parameter in ours.parameters_by_name()]
    copied = list(theirs.parameters())
    assert sorted(list(one.shape) for one in copied) == sorted(list(one.shape) for one in parameters)
    by_order(ours, theirs)
    source = torch.Generator().manual_seed(5)
    images = torch.randn(4, plan.model.channels, plan.model.image_size, plan.model.image_size, generator=source)
    for training in (False, *([True] if plan.model.family == "resnet" else [])):
        ours.train(training)
        theirs.train(training)
        expected = ours({"images": images})["logits"]
        wires = {"input0": images}
        for made, taken, given in entries:
            wires[given[0]] = made(wires[taken[0]])
        torch.testing.assert_close(wires[given[0]], expected, rtol=1e-5, atol=1e-5)
    assert isinstance(module.full_model(), nn.Module) and module.arch() == "any"
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


def by_order(ours: nn.Module, theirs: nn.Module) -> None:
    """Copies weights layer by layer; a bottleneck's shortcut comes last in both."""
    found = list(ours.parameters())
    with torch.no_grad():
        for parameter, other in zip(theirs.parameters(), found, strict=True):
            assert parameter.shape == other.shape
            parameter.copy_(other)
