"""The parts of a checkpoint, a file each: one for every block of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, List, Sequence


def part_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def part_name(block: str) -> str:
    """The part that holds a block: `layer-00007` for `layers.7`, `decoder-00003` for `decoder.3`."""
    stem, _, number = block.rpartition(".")
    if not (stem and number.isdigit()):
        return block
    return f"{'layer' if stem == 'layers' else stem}-{int(number):05d}"


_ISLAND = ".island-"


def island_part(part: str, island: int) -> str:
    """The part that holds what an island has for itself; that of the first one is in the block's own part."""
    return f"{part}{_ISLAND}{island:05d}" if island else part


def parts_of_islands(parts: Sequence[str], islands: int) -> List[str]:
    """The parts of all islands."""
    return [island_part(part, island) for island in range(islands) for part in parts]


def islands_of(parts: Iterable[str]) -> int:
    """How many islands a checkpoint with these parts has; 1 for a run without islands."""
    return 1 + len({part.rpartition(_ISLAND)[2] for part in parts if _ISLAND in part})


def part_names(layers: int) -> List[str]:
    """All parts of a GPT model."""
    return ["embedding", *(part_name(f"layers.{number}") for number in range(layers)), "head"]
