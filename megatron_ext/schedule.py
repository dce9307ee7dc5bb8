"""python -m megatron_ext.schedule interleaved --stages 4 --chunks 2 --micro-batches 8: prints a schedule as JSON.

docs/formats.md, "Schedules", says what is in it. This command needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import List

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedules import NAMES, as_json, schedule


def main(argv: List[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_ext.schedule", description="Print a schedule as JSON.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=1, help="model chunks of a stage (default: 1)")
    parser.add_argument("--micro-batches", type=int, required=True)
    asked = parser.parse_args(argv)
    try:
        stages = schedule(asked.name, asked.stages, asked.chunks, asked.micro_batches)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(stages, asked.chunks, asked.micro_batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
