"""python -m megatron_ext.blocks FILE.py:NAME: the blocks of a module of your own, as a partition counts them.

One micro-batch passes through them first, forward and backward. What is wrong with the module is one message, and the
exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import torch

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import SPLITS
from megatron_ext.families.module import FAMILY
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import check
from megatron_ext.tasks.task import DTYPES, Placement, Task


def main(argv: List[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.blocks",
        description="the blocks of a module of your own, as a partition counts them",
    )
    parser.add_argument("code", metavar="FILE.py:NAME")
    parser.add_argument("--capture", action="store_true", help="as model.capture=true")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--split", choices=SPLITS, help="say how many samples it has instead; needs --json")
    parser.add_argument("--json", action="store_true", help="one line for programs")
    arguments = vars(parser.parse_args(argv))
    as_json, split = arguments.pop("json"), arguments.pop("split")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
            task = task_of(plan_of(**arguments))
            check(task)
            samples = None if split is None else task.epoch(split)
    except EngineError as error:
        if as_json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    if as_json and split is not None:
        print(json.dumps({"samples": samples}))
    elif as_json:
        print(json.dumps({"blocks": [block.name for block in task.blocks if block.placement is Placement.COUNTED]}))
    else:
        print(table(task, arguments["micro_batch_size"]))
    return 0


def plan_of(
    code: str,
    capture: bool = False,
    micro_batch_size: int = 1,
    precision: str = "fp32",
    seed: int = 1234,
    recompute: str = "none",
) -> Plan:
    """What a task needs of a plan."""
    file, _, name = code.rpartition(":")
    model = {"family": FAMILY.name, "code": f"{Path(file).absolute()}:{name}", "capture": capture}
    content: Dict[str, Any] = {"model": model, "train": {"seed": seed, "precision": precision}}
    return Plan.of({**content, "recompute": recompute, "micro_batch_size": micro_batch_size}, Path())


def table(task: Task, micro_batch_size: int) -> str:
    """A line for each block: what it is called, its kind, its parameters, and what it gives."""
    rows = [("block", "kind", "parameters", "gives")]
    sizes = task.sizes(micro_batch_size)
    for block in task.blocks:
        count = sum(one.numel() for one in block.make(TensorGroup()).parameters())
        gives = ", ".join(str([sizes.get(str(dim), dim) for dim in task.wires[name].dims]) for name in block.gives)
        rows.append((block.name, block.kind, f"{count:,}", gives))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {kind:{widths[1]}}  {count:>{widths[2]}}  {gives}" for name, kind, count, gives in rows
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
