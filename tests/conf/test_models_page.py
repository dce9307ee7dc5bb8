"""docs/models.md has every model that ships, with its sizes."""

from __future__ import annotations

from conf.compose import compose
from tests.support import ROOT


def test_the_page_has_every_model_with_its_sizes() -> None:
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    found = [line for line in lines if line.startswith("| `") and line.count("|") == 8]
    models = [line.split("`")[1] for line in found]
    shipped = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    assert sorted(models) == sorted(shipped - {"module"})  # whose sizes are in its own code
    assert found == [row(name) for name in models]


def row(name: str) -> str:
    model = compose([f"model={name}", "parallel.partition=null"]).model
    sizes = model.sized(1)
    layers = "+".join(str(count) for count in (sizes.layers, sizes.decoder_count) if count)
    tokens = "+".join(str(count) for count in (sizes.sequence_length, sizes.decoder_tokens) if count)
    return (
        f"| `{name}` | {model.family} | {layers} | {sizes.hidden} | {sizes.heads} | {tokens} | {model.parameters():,} |"
    )
