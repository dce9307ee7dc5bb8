"""Whole checkpoints without tensors, such as the stand-in worker saves: a launch checks them as it does a real one."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.checkpoints.header import of_part, packed, part_file
from megatron_ext.checkpoints.meta import Meta, written
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import META, checkpoint_name


def save(plan: Plan, iteration: int) -> None:
    """The run of this plan has a checkpoint of `iteration`, its latest."""
    files = plan.files
    folder = files.checkpoints / checkpoint_name(iteration)
    folder.mkdir(exist_ok=True)  # what a killed worker has left is written again
    meta = Meta(
        iteration=iteration,
        consumed_samples=iteration * plan.global_batch_size,
        updates=iteration,
        scaler=None,
        order=None,
        model=plan.model.identity(),
        optimizer=plan.train.optimizer,
    )
    names = meta.part_names()
    for name in names:
        write_atomic(part_file(folder, name), packed({}, of_part(name, iteration)), durable=False)
    meta = replace(meta, parts=written(folder, names, iteration))
    write_atomic(folder / META, meta.as_json(), durable=False)
    write_atomic(files.latest_checkpoint, f"{folder.name}\n", durable=False)
