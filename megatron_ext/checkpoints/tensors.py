"""The tensors of a checkpoint: one file per part of the model, so that any layout can read them (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.checkpoints.foreign.weights import weights_at
from megatron_ext.checkpoints.header import island_part, islands_of, part_name
from megatron_ext.checkpoints.meta import SCALER as STATE_OF_ANY
from megatron_ext.checkpoints.meta import Checkpoint, Meta, start_of
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.checkpoints.published import tensors_of
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.kept import Kept, newest
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.run_files import EMA, ISLAND, OUTER, WEIGHTS
from megatron_ext.contract.worker import start_of_run
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.engine.optimizer.precision import STATE as STATE_OF_SCALER
from megatron_ext.engine.optimizer.update_rules import recounted
from megatron_ext.parallel.comm import all_gather, annotate_errors
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import Task

STATE = "state"
"""What a part holds of what is not trained, such as running statistics: the tensor `state/<name>`."""
UPDATES = "optimizer/updates"
"""How often the weights of a part were updated, where stages count that by themselves: one number."""
SCALER = "optimizer/scaler"
"""The loss scale of the stage that held a part, where each has its own: the numbers of `LossScaler.state`."""


def parts(engine: AnyEngine, state: Dict[str, Tensor]) -> Iterator[Tuple[str, Dict[str, Tensor]]]:
    """The parts of the model that this rank's stage holds, one at a time, with the tensors of each on the CPU.

    A part holds of each parameter the tensors `<kind>/<parameter>`, whole and in fp32 (`Optimizer.kinds`).
    All ranks of a tensor group go through it together; only the first gets the parts. `state` is the optimizer's.
    A copy of a tied parameter is left out: the stage of the owner has it. So is what only pads a parameter. Parts of an
    island other than the first hold what it has for itself.
    """
    island, _ = engine.island
    state = {kind: tensor for kind, tensor in state.items() if not (island and kind in (WEIGHTS, OUTER))}
    members: Dict[str, List[str]] = {block: [] for block in engine.blocks}
    for name, (block, inner) in engine.places.items():
        if name == f"{block}.{inner}":
            members[block].append(name)
    for block, names in members.items():
        content = {
            f"{kind}/{engine.places[name][1]}": _whole(
                name, engine.flat.view(name, tensor).to(engine.device), engine.tensor, engine.task
            )
            for name in names
            for kind, tensor in state.items()
        }
        for holder, inner, tensor in engine.state:
            if holder == block and not island:
                whole = _whole(f"{block}.{inner}", tensor, engine.tensor, engine.task)
                content[f"{STATE}/{inner}"] = whole.to(_kept_in(tensor))
        if engine.stage_updates is not None:
            content[UPDATES] = torch.tensor([engine.stage_updates])
            scaler = engine.optimizer.scaler.state()
            if scaler is not None:
                content[SCALER] = torch.tensor(list(scaler.values()), dtype=torch.float64)
        if engine.tensor.rank == 0:
            yield island_part(part_name(block), island), content


def find(plan: Plan, place: Place, store: Store) -> Optional[Checkpoint]:
    """What this run goes on from: its own newest checkpoint, on disk or in the memory of its nodes, else `train.load`,
    else nothing. All ranks call it.

    Rank 0 looks and says so at the store, so that all of them go on from the same.

    Raises:
        EngineError: on rank 0, it cannot be used.
    """
    if place.rank == 0:
        found = start_of(plan)
        kept = None if plan.train.save_memory is None else newest(plan.files, plan.node_names, start_of_run())
        if kept is not None and (found is None or found.meta.iteration < kept.at.iteration):
            store.set("checkpoint", json.dumps({"kept": kept.as_json()}))
            return Checkpoint.in_memory(kept)
        content = None if found is None else [str(found.folder), asdict(found.meta), found.published]
        store.set("checkpoint", json.dumps(content))
        return found
    with annotate_errors("waiting for rank 0 to find the checkpoint"):
        said = json.loads(store.get("checkpoint"))
    if isinstance(said, dict):
        return Checkpoint.in_memory(Kept.of(said["kept"], plan.files))
    return None if said is None else Checkpoint(Path(said[0]), Meta.of(said[1]), said[2])


def find_best(plan: Plan, place: Place, store: Store) -> Optional[Dict[str, float]]:
    """The evaluation of the run's own best checkpoint. All ranks call it; rank 0 looks, as in `find`."""
    if place.rank == 0:
        best = plan.files.best_checkpoint
        found = Checkpoint.at(best).meta.evaluation if plan.train.best is not None and best.is_file() else None
        store.set("best checkpoint", json.dumps(found))
        return found
    with annotate_errors("waiting for rank 0 to find the best checkpoint"):
        said: Optional[Dict[str, float]] = json.loads(store.get("best checkpoint"))
    return said


def load(checkpoint: Checkpoint, plan: Plan, engine: AnyEngine) -> None:
    """Gives this rank its share of the weights and the optimizer's state. All replicas call it together. Raises
    EngineError: a part is missing, damaged, or not of this model; the message has the file."""
    flat = engine.flat
    kinds = engine.optimizer.kinds
    state = {kind: torch.zeros(flat.numel) for kind in kinds}
    names: Dict[str, List[str]] = {}
    steps: Dict[str, int] = {}
    """How often the weights of each block were updated, where the stages that saved them counted that by themselves."""
    scalers: List[Dict[str, float]] = []
    """The state of the loss scalers of the stages that saved the blocks."""
    for name, (block, _) in engine.places.items():
        names.setdefault(block, []).append(name)
    for block, _, _ in engine.state:
        names.setdefault(block, [])
    part_of = _reader(checkpoint, plan, engine.task)
    for block, members in names.items():
        path = checkpoint.folder if checkpoint.published else checkpoint.part(part_name(block))
        content = _of_island(checkpoint, block, part_of(block), engine)
        if UPDATES in content:
            steps[block] = int(_tensor(path, content, UPDATES, [1], torch.int64)[0])
        if SCALER in content and engine.stage_updates is not None:
            shape = [len(STATE_OF_SCALER) if content[SCALER].numel() > len(STATE_OF_ANY) else len(STATE_OF_ANY)]
            numbers = _tensor(path, content, SCALER, shape, torch.float64)
            scalers.append(dict(zip(STATE_OF_SCALER, numbers.tolist())))
        for holder, inner, kept in engine.state:
            if holder == block:
                _read(path, content, f"{STATE}/{inner}", f"{block}.{inner}", kept.data, engine, _kept_in(kept))
        there = {name.partition("/")[0] for name in content}
        for kind in kinds if checkpoint.meta.updates else {WEIGHTS, EMA, ISLAND}.intersection(kinds):
            if kind == OUTER and kind not in there:
                continue
            # An average, or an island, begins with the weights that are there.
            held = WEIGHTS if kind in (EMA, ISLAND) and kind not in there else kind
            for name in members:
                _read(path, content, f"{held}/{engine.places[name][1]}", name, flat.view(name, state[kind]), engine)
    own = checkpoint.meta.updates if engine.stage_updates is None else max(steps.values(), default=0)
    if checkpoint.meta.updates:
        for block, count in steps.items():
            for kind, scale in recounted(plan.train, count, own).items():
                for name in names[block]:
                    flat.view(name, state[kind]).mul_(scale)
    engine.optimizer.load(state, own or checkpoint.meta.updates)
    engine.optimizer.scaler.load(min(scalers, key=lambda one: one["scale"], default=checkpoint.meta.scaler))


def _of_island(checkpoint: Checkpoint, block: str, content: Dict[str, Tensor], engine: AnyEngine) -> Dict[str, Tensor]:
    """What a part holds for this rank's island: where the run had other islands, what all have in common, with the
    moments of the first one."""
    island, islands = engine.island
    if islands_of(checkpoint.meta.parts or ()) != islands:
        return {name: one for name, one in content.items() if not name.startswith(f"{ISLAND}/")}
    return {**content, **(read_part(checkpoint, island_part(part_name(block), island)) if island else {})}


def _reader(checkpoint: Checkpoint, plan: Plan, task: Task) -> Callable[[str], Dict[str, Tensor]]:
    """Gives what a part holds of a block, or would hold if the weights were not another program's."""
    if not checkpoint.published:
        return lambda block: read_part(checkpoint, part_name(block))
    if plan.model.traits.published:
        files = tensors_of(checkpoint.folder)
        return lambda block: _of_kinds((WEIGHTS, STATE), task.published(files, block))
    weights = weights_at(checkpoint.folder, plan.model)
    return lambda block: _of_kinds((WEIGHTS,), weights.part(part_name(block)))


def _of_kinds(kinds: Sequence[str], found: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    return {f"{kind}/{name}": one for kind in kinds for name, one in found.items()}


def _whole(name: str, share: Tensor, group: TensorGroup, task: Task) -> Tensor:
    """A copy of a parameter on the CPU, put together from the shares of a tensor group."""
    shard = task.shard(name)
    if shard is not None and group.size > 1:
        shares = share.new_empty(group.size, *share.shape)
        all_gather(share.contiguous(), shares, group.group, "gathering the checkpoint")
        share = shard.whole(list(shares))
    rows = task.rows(name)
    return (share if rows is None else share[:rows]).detach().to("cpu", copy=True)


def _whole_shape(name: str, share: Tensor, group: TensorGroup, task: Task) -> List[int]:
    """The shape of a parameter of which this rank has a share."""
    shard, shape = task.shard(name), list(share.shape)
    if shard is not None:
        shape[shard.dim] *= group.size
    return shape


def _share(name: str, whole: Tensor, padded: List[int], group: TensorGroup, task: Task) -> Tensor:
    """The inverse of `_whole`: what only pads a parameter becomes zero."""
    if task.rows(name) is not None:
        whole = torch.cat([whole, whole.new_zeros(padded[0] - len(whole), *padded[1:])])
    shard = task.shard(name)
    return whole if shard is None else shard.part(whole, group.size, group.rank)


def _read(
    path: Path,
    content: Dict[str, Tensor],
    key: str,
    name: str,
    share: Tensor,
    engine: AnyEngine,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fills this rank's share of what has this name in the model from what a part holds as `key`."""
    padded, rows = _whole_shape(name, share, engine.tensor, engine.task), engine.task.rows(name)
    whole = _tensor(path, content, key, padded if rows is None else [rows, *padded[1:]], dtype)
    share.copy_(_share(name, whole, padded, engine.tensor, engine.task))


def _kept_in(tensor: Tensor) -> torch.dtype:
    """The format in which checkpoints have what is not trained: of floating-point numbers fp32."""
    return torch.float32 if tensor.is_floating_point() else tensor.dtype


def _tensor(
    path: Path, content: Dict[str, Any], name: str, shape: List[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    found = content.get(name)
    if found is None or list(found.shape) != shape or found.dtype != dtype:
        described = "none" if found is None else f"{list(found.shape)} of {found.dtype}"
        wanted = "fp32" if dtype == torch.float32 else str(dtype)
        raise EngineError(f"{path}: expected a tensor {name} of shape {shape} in {wanted}, found {described}")
    return torch.as_tensor(found)
