"""Checkpoints that no run has saved, and ones with other tensors than they were saved with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import of_part, part_file, part_names
from megatron_ext.checkpoints.meta import Checkpoint, Meta, written

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 128, "vocab_size": 257}
"""`model=tiny`."""


def save(folder: Path, iteration: int, model: Mapping[str, object] = MODEL, **known: object) -> Checkpoint:
    """A whole checkpoint of a GPT in the new `folder`; its tensors are not those of such a model, and differ by part
    and iteration. `known` are other values of its `Meta`."""
    folder.mkdir(parents=True)
    names = part_names(int(str(model["layers"])))
    for number, part in enumerate(names):
        tensors = {"weights/w": torch.full((4, 4), float(number + 100 * iteration))}
        safetensors.write(part_file(folder, part), tensors, of_part(part, iteration))
    meta = Meta(
        iteration=iteration,
        consumed_samples=16 * iteration,
        updates=iteration,
        scaler=None,
        order=None,
        model=dict(model),
        parts=written(folder, names, iteration),
    )
    meta = replace(meta, **known)  # type: ignore[arg-type]
    (folder / "meta.json").write_text(meta.as_json())
    return Checkpoint(folder, meta)


def save_run(run: Path, *iterations: int) -> list[Checkpoint]:
    """A run's folder with such checkpoints, the last of which is its latest."""
    found = [save(run / "checkpoints" / f"iter_{iteration:07d}", iteration) for iteration in iterations]
    (run / "checkpoints" / "latest").write_text(f"{found[-1].folder.name}\n")
    return found


def resave(checkpoint: Path, change: Callable[[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """The same checkpoint as if it had been saved with what `change` makes of the tensors of each part."""
    meta = Checkpoint.read(checkpoint).meta
    assert meta.parts is not None
    for part in meta.parts:
        path = part_file(checkpoint, part)
        safetensors.write(path, change(part, safetensors.read(path)), of_part(part, meta.iteration))
    meta = replace(meta, parts=written(checkpoint, list(meta.parts), meta.iteration))
    (checkpoint / "meta.json").write_text(meta.as_json())


def without_checksums(checkpoint: Path) -> None:
    """The same checkpoint as version 2 had it."""
    content = json.loads((checkpoint / "meta.json").read_text())
    for part in content["parts"]:
        path = part_file(checkpoint, part)
        safetensors.write(path, safetensors.read(path), {})
    del content["parts"], content["checksum"]
    (checkpoint / "meta.json").write_text(json.dumps({**content, "version": 2}, indent=1))
