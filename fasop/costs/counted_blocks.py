"""The blocks of a model of transformers that no profile knows: counted by a process of its own, without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conf.blocks_of_module import digest_of
from conf.schema.experiment import Model, Precision
from fasop.costs.measured_module import LOSS, BlockCounts, MeasuredBlock, MeasuredModule, MeasuredWire
from fasop.errors import SearchError
from megatron_ext.contract.files import digest_of_file, read_regular_text, user_cache, write_atomic

PROJECT = Path(__file__).resolve().parents[2]
COUNTER = "megatron_ext.memory"


def counted(model: Model, precision: Precision, tensor: int, sizes: Sequence[int]) -> MeasuredModule:
    """The model as a rank of a tensor group has it, with micro-batches of these sizes.

    Raises:
        SearchError: torch or transformers is not here, or the model cannot be cut so.
    """
    digest = digest_of(model)
    content = _content(model, tensor)
    found = json.loads(_answer(content, str(precision), tensor, tuple(sizes), digest))
    if "error" in found:
        measure = f"measure its blocks with 'tdpp profile {model.said} profile=NAME', and add profile=NAME"
        raise SearchError(f"{model.said}: the memory of its blocks cannot be counted here: {found['error']}; {measure}")
    module, by_name = found["module"], found["bytes"]
    blocks = [*module["blocks"], {"name": LOSS, "kind": LOSS, "held": "last", "parameters": 0, "fixed_bytes": 0}]

    def of(key: str, number: int) -> tuple[int, ...]:
        return tuple(values[number] for values in by_name[key])

    def work(number: int, which: int) -> tuple[int, ...]:
        return tuple(values[number][which] for values in by_name["work"])

    return MeasuredModule(
        model,
        digest=digest,
        sequence=[
            MeasuredBlock(
                name=block["name"],
                kind=block["kind"],
                held=block.get("held"),
                parameters=block["parameters"],
                fixed_bytes=block["fixed_bytes"],
                kept=of("kept", number),
                given=of("given", number),
                counts=BlockCounts(
                    passing=of("passing", number),
                    passing_again=of("passing_again", number),
                    dropped=of("dropped", number),
                    operations=work(number, 0),
                    traffic=work(number, 1),
                    kernels=max(work(number, 2)),
                ),
            )
            for number, block in enumerate(blocks)
        ],
        sizes=sizes,
        crossing=[of("crossing", number) for number in range(len(by_name["crossing"][0]))],
        wires=[
            MeasuredWire(giver=giver, takers=tuple(takers), bytes=of("wires", number))
            for number, (giver, *takers) in enumerate(module["wires"])
        ],
        tied_parameters=module["tied_parameters"],
        tied_blocks=module["tied_blocks"],
        tensor=tensor,
        always=max(one for (one,) in by_name["always"]),
    )


def _content(model: Model, tensor: int) -> str:
    return json.dumps(asdict(model.sized(tensor)), default=str, sort_keys=True)


@lru_cache(maxsize=16)
def _answer(content: str, precision: str, tensor: int, sizes: tuple[int, ...], digest: str) -> str:
    """What the process prints, which is kept in the user's cache; `digest` is of what `model.config` names."""
    train = {"seed": 1, "precision": precision}
    request = {"model": json.loads(content), "train": train, "sizes": sizes, "tensor": tensor}
    key = hashlib.sha256(json.dumps([request, digest, _versions()]).encode()).hexdigest()
    kept = user_cache() / "counted" / f"{key}.json"
    try:
        return read_regular_text(kept)
    except (OSError, ValueError):  # it was not counted before
        found = _counted(request)
    if not found.startswith('{"error"'):
        with contextlib.suppress(OSError):
            kept.parent.mkdir(0o700, parents=True, exist_ok=True)
            write_atomic(kept, found)
    return found


def _versions() -> list[str]:
    """Those of all that decides the counts."""
    measuring = PROJECT / "megatron_ext" / "measuring"
    found = [digest_of_file(measuring / name) for name in ("counting.py", "live_bytes.py")]
    for package in ("tdpp", "torch", "transformers"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("")
    return found


def _counted(request: Mapping[str, Any]) -> str:
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", COUNTER]
    done = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return json.dumps({"error": f"the count exited with {done.returncode}: {last[0]}"})
    return lines[-1]
