"""python -m megatron_ext.memory: what the blocks of a model keep and send, for a prediction without a GPU.

A request comes as JSON on the standard input (fasop/costs/known_blocks.py), the answer goes as a line of JSON to the
standard output. The model takes no memory here: it lies on torch's device meta.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Dict

import torch

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.measuring.counting import counted


def main() -> int:
    request: Dict[str, Any] = json.load(sys.stdin)
    sizes, tensors = request.pop("sizes"), request.pop("tensors")
    found: Dict[int, Any] = {}
    refused: Dict[int, str] = {}
    for tensor in tensors:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what a library prints
                found[tensor] = counted(Plan.of({**request, "pipeline": 1, "tensors": [tensor]}, Path()), sizes, tensor)
        except EngineError as error:
            refused[tensor] = str(error)
    if not found:
        print(json.dumps({"error": next(iter(refused.values()))}))
        return 1
    print(json.dumps({"tensors": found, "refused": refused}))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
