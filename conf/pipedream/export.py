"""What PipeDream's runtime needs of a division: stages and ranks, configurations of its driver and, of some models, the
stage modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from conf.pipedream import stage_source
from conf.pipedream.driver import Kind
from conf.pipedream.placement import placed
from conf.pipedream.words import MODELS
from megatron_ext.contract.models.model import ModelConfig

CONTAINER = "nvcr.io/nvidia/pytorch:23.04-py3"
PACKAGES, DRIVERS = "models", "driver_configs"
"""In the folder of a model's type, such as runtime/image_classification."""


def name_in_python(name: str) -> str:
    """A model's name as a part of a module's name; some have PipeDream's."""
    known = {ours: theirs for theirs, ours in MODELS.items()}
    return known.get(name, re.sub(r"\W", "_", name, flags=re.ASCII))


def package_folder(name: str, ranks: int) -> Path:
    return Path(PACKAGES) / name_in_python(name) / f"gpus={ranks}"


def files_of(
    name: str,
    replicas: Sequence[int],
    graph: str,
    machines: Sequence[str],
    kind: Kind | None,
    batch: int | None = None,
    model: ModelConfig | None = None,
    partition: Sequence[int] | None = None,
) -> dict[Path, str]:
    """The files to write, by path in the folder of a model's type.

    Args:
        graph: the annotated graph, `gpus=N.txt`.
        machines: `host:gpu` by rank.
        kind: of the model; None: PipeDream's driver knows none such, so that there are no configurations for it.
        batch: samples of a worker; None: that of PipeDream's programs.
        model, partition: of a model of tdpp.
    """
    ranks, stages = sum(replicas), len(replicas)
    package = package_folder(name, ranks)
    modules = [*range(stages), stages - 1]
    found = {
        package / f"gpus={ranks}.txt": graph,
        package / "dp_conf.json": placed([0] * (stages + 1), [ranks]).text(),
        package / "mp_conf.json": placed(modules, [1] * stages, partition=partition).text(),
        package / "hybrid_conf.json": placed(modules, replicas, partition=partition).text(),
    }
    if model is not None and partition is not None and model.family in stage_source.WRITTEN:
        source = stage_source.package(model, partition, name_in_python(name))
        found |= {package / file: text for file, text in source.items()}
        found[package.parent / "__init__.py"] = ""
    if kind is None:
        return found
    for suffix, file in (("pipedream", "hybrid_conf.json"), ("dp", "dp_conf.json")):
        driver = Path(DRIVERS) / f"{name_in_python(name)}_{ranks}{suffix}.yml"
        found[driver] = _driver(package, package / file, machines[:ranks], kind, batch)
    return found


def _driver(package: Path, placement: Path, machines: Sequence[str], kind: Kind, batch: int | None) -> str:
    """Learning rates are those of PipeDream's own files."""
    images = kind is Kind.images
    values = {
        "log_directory": "runs",
        "module": ".".join(package.parts),
        "data_dir": "data",
        "config_file": str(placement),
        "container": CONTAINER,
        "machines": list(machines),
        **({} if batch is None else {"batch_size": batch}),
        "learning_rate": 0.01 if images else 0.0003,
        "weight_decay": 0.0005 if images else 0.0,
        "epochs": 60 if images else 10,
        "print_frequency": 100,
        "verbose_frequency": 0,
        "learning_rate_policy": "polynomial",
        "model_type": str(kind),
        "distributed_backend": "nccl" if placement.name.startswith("dp") else "gloo",
    }
    return "".join(f"{key!r}: {value!r}\n" for key, value in values.items())
