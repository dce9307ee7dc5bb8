"""Files as users write them, which define one of `user_models` with its data."""

from __future__ import annotations

from pathlib import Path

MODELS = {
    "convnet": ("image", False),
    "Residual": ("image", True),
    "UNet": ("picture", True),
    "Translator": ("pair", True),
    "SharedEmbedding": ("tokens", True),
    "Recurrent": ("tokens", True),
    "Seq2Seq": ("pair", True),
    "TwoHeads": ("named", True),
}
"""By name: what a sample is, and whether the module is captured."""


def imported(name: str) -> str:
    """A file's content that imports a model as a user's file would define it."""
    kind, _ = MODELS.get(name, ("image", False))
    return (
        f"from tests.support.megatron_ext.user_models import {name}, Made, loss\n\n\n"
        f"def data(split, seed):\n    return Made({kind!r}, seed)\n"
    )


def users_file(folder: Path, name: str, code: str = "") -> Path:
    """A file in `folder` with such a content, or another one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"my_{name.lower()}.py"
    file.write_text(code or imported(name))
    return file
