"""python -m megatron_ext.schedule interleaved --stages 4 --chunks 2 --micro-batches 8: prints a schedule as JSON.

docs/formats.md, "Schedules" and "Streams", says what is in it. This command needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import List

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.iteration import as_json, schedule
from megatron_ext.contract.schedule.schedules import NAMES
from megatron_ext.contract.schedule.stream_check import prove
from megatron_ext.contract.schedule.streams import PIPEDREAM, SEMANTICS, STASHING, Semantics, Stream, stream_as_json


def main(argv: List[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_ext.schedule", description="Print a schedule as JSON.")
    parser.add_argument("name", choices=(*NAMES, PIPEDREAM))
    parser.add_argument("--stages", type=int, help="number of stages; with pipedream, give --replicas instead")
    parser.add_argument("--chunks", type=int, default=1, help="model chunks of a stage (default: 1)")
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--replicas", metavar="15-1", help="replicas of each stage; only with pipedream")
    parser.add_argument(
        "--semantics",
        choices=[str(one) for one in SEMANTICS],
        default=str(STASHING),
        help="only with pipedream (default: stashing)",
    )
    parser.add_argument(
        "--update-every", type=int, default=1, help="rounds between updates; only with pipedream (default: 1)"
    )
    asked = parser.parse_args(argv)
    if (asked.name == PIPEDREAM) != (asked.replicas is not None) or (asked.name == PIPEDREAM) == bool(asked.stages):
        parser.error("give --replicas with pipedream, and --stages with all others")
    try:
        if asked.name == PIPEDREAM:
            replicas = tuple(int(part) for part in asked.replicas.split("-"))
            stream = Stream(replicas, Semantics(asked.semantics), asked.update_every)
            prove(stream, asked.micro_batches)
            print(json.dumps(stream_as_json(stream, asked.micro_batches)))
            return 0
        stages = schedule(asked.name, asked.stages, asked.chunks, asked.micro_batches)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(stages, asked.chunks, asked.micro_batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
