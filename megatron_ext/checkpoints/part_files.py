"""The parts of a checkpoint, a file each: one for every block of the model."""

from __future__ import annotations

from pathlib import Path
from typing import List


def part_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def part_name(block: str) -> str:
    """The part that holds a block: `layer-00007` for `layers.7`, `decoder-00003` for `decoder.3`."""
    stem, _, number = block.rpartition(".")
    if not (stem and number.isdigit()):
        return block
    return f"{'layer' if stem == 'layers' else stem}-{int(number):05d}"


def part_names(layers: int) -> List[str]:
    """All parts of a GPT model."""
    return ["embedding", *(part_name(f"layers.{number}") for number in range(layers)), "head"]
