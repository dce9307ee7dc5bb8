"""What each configuration of PipeDream's driver, and each file of stages and ranks, of its public repository is here.

    python -m benchmarks.public_drivers --public CHECKOUT

A file of stages and ranks that no configuration names is given one, on hosts of four GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from conf.compose import command_line, compose
from conf.errors import TdppError
from conf.pipedream.placement import read
from conf.schema.experiment import Experiment

KINDS = ("image_classification", "translation")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", type=Path, required=True, help="a checkout of the public repository")
    runtime = parser.parse_args().public.absolute() / "runtime"
    failed = 0
    for kind in KINDS:
        for file in sorted((runtime / kind / "driver_configs").glob("*.yml")):
            failed += _shown(file.name, file)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(runtime / kind):
            for number, placement in enumerate(sorted((runtime / kind / "models").glob("*/*/*conf*.json"))):
                package = placement.parent
                file = Path(folder) / f"{number}.yml"
                file.write_text(_driver(kind, package, placement))
                failed += _shown(str(placement.relative_to(runtime / kind / "models")), file)
    return int(failed > 0)


def _driver(kind: str, package: Path, placement: Path) -> str:
    """A configuration, quoted as the public ones are."""
    ranks = sum(read(placement, "file").replicas)
    machines = [f"host{rank // 4}:{rank % 4}" for rank in range(ranks)]
    values = {
        "log_directory": "/tmp",
        "module": f"models.{package.parent.name}.{package.name}",
        "data_dir": "/data/any",
        "config_file": str(placement),
        "container": "pytorch:19.05-py3",
        "machines": machines,
        "batch_size": 64,
        "learning_rate_policy": "polynomial",
        "model_type": kind,
        "distributed_backend": "gloo",
    }
    return "".join(f"{key!r}: {value!r}\n" for key, value in values.items())


def _shown(name: str, file: Path) -> int:
    try:
        words = [f"pipedream={file}", "dry_run=true"]
        with command_line(words) as found:
            notes = [note for note in found.notes if "PipeDream cuts" in note or "stage" in note]
        made: Experiment = compose(words)
    except TdppError as error:
        print(f"{name}: {error}")
        return 1
    parallel = made.parallel
    print(
        f"{name}: model={made.model.name} partition={made.partition} replicas={list(parallel.layout.replicas)} "
        f"depth={parallel.depth} hosts={len(made.executor.reached)} {'; '.join(notes)}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
