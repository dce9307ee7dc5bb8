"""Models of images: keys of their own, sizes that they do not have, and one message for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.families.t2t_vit import FAMILY, sides

PLAN = ("parallel=single", "parallel.micro_batch_size=2")
FAULTS = [
    (["model=vgg16", "model.depths=x"], "model.depths=x must be the blocks of one to five stages"),
    (["model=vgg16", "model.depths=9999-9999"], "together at most 10000"),
    (["model=vgg16", "model.hidden=3"], "model.hidden=3 does not apply to model.family=vgg; leave it out"),
    (["model=vgg16", "model.layers=3"], "model.layers=3 must be the number of blocks of model.family=vgg, 16"),
    (["model=vgg16", "model.ffn_hidden=null"], "model.ffn_hidden is not set, but model.family=vgg needs"),
    (["model=resnet50", "model.hidden_dropout=0.1"], "model.hidden_dropout=0.1 is only for"),
    (["model=alexnet", "model.image_size=32"], "model.image_size=32 is too small for model.family=alexnet"),
    (["model=vgg16", "model.image_size=16"], "use at least 32"),
    (["model=t2t-vit-tiny", "model.image_size=1"], "model.image_size=1 is too small for model.family=t2t_vit: its"),
    (["model=t2t-vit-tiny", "model.image_size=2"], "splits would leave nothing of the image; use at least 3"),
    (["model=vit-tiny", "model.patch_size=3"], "model.image_size=8 is not divisible by model.patch_size=3"),
    (["model=vit-tiny", "model.patch_size=null"], "model.patch_size is not set"),
    (["model=vit-tiny", "model.classes=null"], "model.classes is not set"),
    (["model=vit-tiny", "model.classes=1"], "model.classes=1 must be at least 2"),
    (["model=vit-tiny", "model.drop_path=1"], "model.drop_path=1.0 must be at least 0 and less than 1"),
    (["model=vit-tiny", "model.heads=5"], "model.hidden=64 is not divisible by model.heads=5"),
    (["model=vit-tiny", "model.sequence_length=4"], "model.sequence_length=4 does not apply to model.family=vit"),
    (["model=vit-tiny", "model.swiglu=true"], "model.swiglu=true is only for"),
    (["model=tiny", "model.patch_size=2"], "model.patch_size=2 is only for model.family=vit"),
    (["model=tiny", "data.augment.mixup=0.2"], "data.augment.mixup=0.2 is only for models of images"),
    (["model=vit-tiny", "data.augment.rand_augment_magnitude=11"], "must be between 0 and 10"),
    (["model=vit-tiny", "data.augment.erasing=2"], "data.augment.erasing=2.0 must be between 0 and 1"),
    (["model=vit-tiny", "data.blend=[{prefix: a}]"], "data.blend has 1 corpora"),
    (["model=vit-tiny", "parallel.recompute=selective"], "which tdpp does not find in model.family=vit"),
    (
        ["model=vit-tiny", "parallel.tensor=2"],
        "parallel.tensor=2 cannot be combined with model.family=vit; use parallel.tensor=1",
    ),
    (
        ["model=vit-tiny", "engine=megatron_lm", "engine.checkout=there"],
        "engine.kind=megatron_lm cannot be combined with model.family=vit",
    ),
    (["model=resnet-tiny", "parallel.micro_batch_size=1"], "a single value per channel with model.image_size=8"),
]


@pytest.mark.parametrize(("words", "message"), FAULTS, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_what_cannot_be_is_one_message(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*PLAN, *words])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_smallest_image_of_t2t_vit_leaves_a_token() -> None:
    model = compose([*PLAN, "model=t2t-vit-tiny", "model.image_size=3"]).model.sized(1)
    assert FAMILY.patches(model) == 1
    assert all(side > 0 for side in sides(model))


def test_a_file_need_not_name_what_its_family_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nfamily: resnet\ndepths: 2-2\nwidth: 8\nimage_size: 32\nclasses: 4\n")
    model = compose([*PLAN, f"model={path}"]).model
    assert (model.layers, model.hidden, model.sequence_length, model.vocab_size) == (6, 0, 0, 0)
    assert model.block_names() == ["stem", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "head"]


def test_a_partition_that_does_not_fit_names_the_blocks() -> None:
    with pytest.raises(ConfigError, match="model=vgg16 has 16 blocks; nearest that fits: "):
        compose(
            ["model=vgg16", "cluster.groups.local.gpus_per_node=2", "parallel.pipeline=2", "parallel.partition=8-7"]
        )


def test_a_model_of_tokens_still_needs_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nlayers: 2\nhidden: 8\nheads: 1\nvocab_size: 9\n")
    with pytest.raises(ConfigError, match=r"model\.sequence_length is not set"):
        compose([*PLAN, f"model={path}"])
