"""What is known of models of images without torch is what their modules have, and what was published of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.models.images import image_blocks, image_operations, image_parameters
from megatron_ext.contract.models.model import IMAGES, family_named, family_names
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.support import ROOT

PUBLISHED = {
    "vit-b16": 86_567_656,
    "resnet50": 25_557_032,
    "vgg16": 553_430_176 // 4,
    "alexnet": 61_100_840,
}
"""Of torchvision's models of these names, and in bytes of the public graph of VGG-16."""
MULTIPLIED = {"vit-b16": 17.56, "resnet50": 4.09, "vgg16": 15.47, "alexnet": 0.714, "t2t_vit_14": 4.8}
"""10^9 products for an image of 224 pixels: torchvision's, and of T2T-ViT-14 those of Yuan et al. 2021, table 2."""
SHIPPED = [
    path.stem
    for path in sorted((ROOT / "conf" / "model").glob("*.yaml"))
    if any(
        f"family: {family}\n" in path.read_text() for family in family_names() if family_named(family).learns == IMAGES
    )
]


def planned(name: str) -> Plan:
    return make_plan(compose([f"model={name}", "parallel=single", "data.prefix=images"]), "test/run")


@pytest.mark.parametrize("name", SHIPPED)
def test_blocks_have_the_parameters_and_shapes_of_their_modules(name: str) -> None:
    plan = planned(name)
    task = task_of(plan)
    with torch.device("meta"):
        values = torch.empty(2, plan.model.channels, plan.model.image_size, plan.model.image_size)
        kinds: dict[str, object] = {}
        with FlopCounterMode(display=False) as counted:
            for block, described in zip(task.blocks, image_blocks(plan.model), strict=True):
                module = block.make(TensorGroup())
                found = {name: tuple(one.shape) for name, one in module.named_parameters()}
                assert found == described.parameters, block.name
                values = module(values)
                assert tuple(values.shape) == (2, *described.gives), block.name
                alike = (found, described.gives, described.products)
                assert kinds.setdefault(block.kind, alike) == alike
    assert counted.get_total_flops() == 2 * image_operations(plan.model)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_counts_are_the_published_ones(name: str, count: int) -> None:
    assert image_parameters(planned(name).model) == count


def test_a_t2t_vit_14_has_the_size_of_its_paper() -> None:
    assert round(image_parameters(planned("t2t_vit_14").model) / 1e6, 1) == 21.5


@pytest.mark.parametrize(("name", "products"), MULTIPLIED.items())
def test_operations_are_the_published_ones(name: str, products: float) -> None:
    assert image_operations(planned(name).model) / 2e9 == pytest.approx(products, rel=0.005)


def test_a_plan_of_images_is_read_again(tmp_path: Path) -> None:
    plan = planned("resnet50")
    text = plan.as_json()
    assert not {"hidden", "heads", "sequence_length", "vocab_size", "padded_vocab_size"} & text["model"].keys()
    assert Plan.parse(text, plan.folder) == plan
    assert plan.named(0) == "stem to head (18)"
