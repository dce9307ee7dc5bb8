"""python -m megatron_ext.check: whether a model of transformers can be trained as a plan says, before anything starts.

What of the plan matters comes as JSON on the standard input (launch/commands/launching/preflight.py), the answer goes
as a line of JSON to the standard output: what is wrong, or whether all was tried.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.families.huggingface.task import HuggingFaceTask


def main() -> int:
    plan = Plan.of(json.load(sys.stdin), Path())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a library prints
            tried = HuggingFaceTask(plan).keeps_apart()
    except EngineError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"tried": tried}))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
