"""What was measured of a model as a `graph.txt` for each kind of GPU (docs/pipedream.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conf.reading.writable import why_not_writable, write_whole
from conf.schema.experiment import Experiment
from fasop.costs.hardware import NodeKind
from fasop.costs.known_blocks import with_known_blocks
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.training import Training
from fasop.graphs.graph_text import graph_text
from fasop.graphs.of_model import graph_of
from launch.errors import LaunchError
from launch.profile.arguments import Arguments


def files(file: Path, gpus: Sequence[str]) -> dict[str, Path]:
    """By GPU; of several each has a file of its own."""
    return {gpu: file if len(gpus) == 1 else file.with_name(f"{file.stem}_{gpu}{file.suffix}") for gpu in gpus}


def check_free(paths: Iterable[Path], arguments: Arguments) -> None:
    """Before anything is measured, so that no time is lost.

    Raises:
        LaunchError: a file is there, or cannot be.
    """
    for path in paths:
        if (why := why_not_writable(path)) is not None:
            raise LaunchError(f"graph_output={path}: {why}")
        if path.exists() and not (arguments.overwrite or arguments.add):
            raise LaunchError(f"graph_output={path} already exists; choose another name, or add overwrite=true")


def write(file: Path, experiment: Experiment, profiles: Mapping[str, LayerProfile]) -> list[Path]:
    """Writes the graphs, with the times of the largest micro-batch that was measured.

    Raises:
        LaunchError: a file cannot be written.
    """
    written = files(file, [*profiles])
    for gpu, profile in profiles.items():
        text = graph_text(graph_of(*_of(experiment, gpu, profile)))
        try:
            write_whole(written[gpu], text)
        except OSError as error:
            raise LaunchError(f"cannot write {written[gpu]}: {error.strerror}; choose another folder") from error
    return [*written.values()]


def _of(experiment: Experiment, gpu: str, profile: LayerProfile) -> tuple[Training, NodeKind]:
    cluster = experiment.cluster
    name, group = next((name, group) for name, group in cluster.groups.items() if group.gpu == gpu)
    kind = NodeKind(name=name, group=group, gpu=cluster.gpus[gpu], gpus=1, profile=profile)
    training = with_known_blocks(Training.of(experiment), [kind])
    points = profile.points(training.model, training.precision)
    largest = max((one.micro_batch_size for one in points if one.tensor == 1), default=1)
    parallel = replace(training.parallel, micro_batch_size=largest, global_batch_size=largest * training.parallel.data)
    return replace(training, parallel=parallel), kind
