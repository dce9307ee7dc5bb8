"""docs/models.md has every model that ships, with its sizes."""

from __future__ import annotations

from conf.reference import families_table
from megatron_ext.contract.models.model import IMAGES, family_named, family_names
from tests.support import ROOT
from tests.support.composing import experiment

MODELS = ROOT / "conf" / "model"


def test_the_page_has_every_model_with_its_sizes() -> None:
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    found = [line for line in lines if line.startswith("| `") and line.count("|") == 8]
    models = [line.split("`")[1] for line in found]
    shipped = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    of_images = {name for name in shipped if is_of_images(name)}
    assert sorted(models) == sorted(shipped - of_images - {"module", "huggingface"})  # whose code sets its own code
    assert found == [row(name) for name in models]


def test_the_page_has_every_family_as_it_describes_itself() -> None:
    """After a change: python -m conf.reference families, into docs/models.md."""
    assert families_table() in (ROOT / "docs" / "models.md").read_text()


def test_the_page_of_images_has_every_model_with_its_sizes() -> None:
    lines = (ROOT / "docs" / "images.md").read_text().splitlines()
    found = [line for line in lines if line.startswith("| `") and line.count("|") == 7]
    models = [line.split("`")[1] for line in found]
    assert sorted(models) == sorted(path.stem for path in MODELS.glob("*.yaml") if is_of_images(path.stem))
    assert found == [row_of_images(name) for name in models]


def is_of_images(name: str) -> bool:
    return any(
        f"family: {family}\n" in (MODELS / f"{name}.yaml").read_text()
        for family in family_names()
        if family_named(family).learns == IMAGES
    )


def row_of_images(name: str) -> str:
    model = experiment(f"model={name}", "parallel.partition=null").model
    image = f"{model.image_size} x {model.image_size} x {model.channels}"
    return f"| `{name}` | {model.family} | {model.layers} | {image} | {model.classes} | {model.parameters():,} |"


def row(name: str) -> str:
    engine = ["engine=megatron_core"] if "\nexperts:" in (MODELS / f"{name}.yaml").read_text() else []
    model = experiment(f"model={name}", "parallel.partition=null", *engine).model
    sizes = model.sized(1)
    layers = "+".join(str(count) for count in (sizes.layers, sizes.decoder_count) if count)
    tokens = "+".join(str(count) for count in (sizes.sequence_length, sizes.decoder_tokens) if count)
    return (
        f"| `{name}` | {model.family} | {layers} | {sizes.hidden} | {sizes.heads} | {tokens} | {model.parameters():,} |"
    )
