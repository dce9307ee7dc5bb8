"""Checkpoints: one file per part of the model, so that any partition can read them (docs/formats.md)."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.comm import barrier, told
from megatron_ext.engine import Engine
from megatron_ext.errors import EngineError
from megatron_ext.plan import Place, Plan
from megatron_ext.tensor_parallel import TensorGroup, shard_of

Part = Dict[str, Dict[str, Tensor]]
"""{"weights" | "adam_m" | "adam_v": {parameter of the part: the whole tensor}}."""


def parts(engine: Engine, state: Dict[str, Tensor]) -> Iterator[Tuple[str, Part]]:
    """The parts of the model that this rank's stage holds, one at a time; all ranks of a tensor group call it together.

    `state` is the optimizer's. The head's copy of the tied embedding is left out: the first stage has it.
    """
    flat = engine.flat
    names: Dict[str, List[str]] = {}
    for name in flat.slices:
        if name != "head.word":
            names.setdefault(_place(name)[0], []).append(name)
    for part, members in names.items():
        yield (
            part,
            {
                kind: {_place(name)[1]: _whole(name, flat.view(name, tensor), engine.tensor) for name in members}
                for kind, tensor in state.items()
            },
        )


def _whole(name: str, share: Tensor, group: TensorGroup) -> Tensor:
    """A parameter put together from the shares of a tensor group, on the CPU."""
    shard = shard_of(name)
    if shard is None or group.size == 1:
        return share.detach().cpu().clone()
    shares = [torch.empty_like(share) for _ in range(group.size)]
    with told("gathering the checkpoint"):
        dist.all_gather(shares, share.contiguous(), group=group.group)
    return shard.whole(shares).cpu()


def save(folder: Path, iteration: int, plan: Plan, place: Place, engine: Engine) -> Path:
    """Writes `iter_<iteration>` below `folder`; all ranks call it together. It appears only when complete.

    Raises:
        EngineError: this rank could not write its part.
    """
    final = folder / f"iter_{iteration:07d}"
    partial = folder / f".{final.name}.partial"
    try:
        if place.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier("starting the checkpoint")
        state = engine.optimizer.state()
        if place.dp == 0:
            for part, content in parts(engine, state):
                if place.tp == 0:
                    _write(partial / f"{part}.pt", content)
        barrier("writing the checkpoint")
        if place.rank == 0:
            meta = {
                "version": 1,
                "iteration": iteration,
                "consumed_samples": iteration * plan.global_batch_size,
                "model": asdict(plan.model),
            }
            (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
            partial.rename(final)
            pointer = folder / ".latest.partial"
            pointer.write_text(final.name + "\n", encoding="utf-8")
            pointer.replace(folder / "latest")
    except OSError as error:
        raise EngineError(f"checkpoint {final}: cannot be written: {error}") from error
    barrier("ending the checkpoint")
    return final


def _place(name: str) -> Tuple[str, str]:
    """The file and the name within it of a parameter."""
    if name.startswith("layers."):
        _, number, parameter = name.split(".", 2)
        return f"layer-{int(number):05d}", parameter
    part, parameter = name.split(".", 1)
    return part, parameter


def _write(path: Path, content: Dict[str, Dict[str, Tensor]]) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
