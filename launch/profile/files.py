"""Profiles as files: measured anew they replace or extend what is there; as graphs they are a file for each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conf.errors import ConfigError, reworded
from conf.reading.files import write_whole
from conf.schema.experiment import Engine, EngineKind, Experiment
from fasop.costs.hardware import NodeKind
from fasop.costs.known_blocks import with_known_blocks
from fasop.costs.profiles.doubts import in_words
from fasop.costs.profiles.files import profile_path, read_profile
from fasop.costs.profiles.profile import LayerProfile, Links, Module, Shape
from fasop.costs.profiles.profile_text import profile_text
from fasop.costs.training import Training
from fasop.graphs.graph_text import graph_text
from fasop.graphs.of_model import graph_of
from launch.errors import LaunchError
from launch.profile.arguments import Arguments


def write(name: str, profile: LayerProfile, arguments: Arguments, comment: str) -> LayerProfile:
    """Writes `fasop/profiles/<name>.yaml`, or the file `name`, and returns what is in it.

    Raises:
        OutputError: it cannot be written.
        LaunchError: what is there is of another GPU or model.
        ConfigError: both together cannot be.
    """
    path = profile_path(name)
    if arguments.add and path.exists():
        profile = added(read_profile(name), profile)
        before = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        kept = [line for line in before if line not in profile_text(profile, "")]
        comment = "\n".join([*kept, comment])
    write_whole(path, profile_text(profile, comment))
    return profile


def check_engine(name: str, engine: Engine) -> None:
    """Raises LaunchError where measurements of an engine would go into a profile of another one's, before anything is
    measured."""
    if not profile_path(name).exists():
        return
    old = read_profile(name)
    before = old.engine or EngineKind.tdpp  # which alone was measured before profiles named it
    if (before, old.engine_options) != (engine.kind, engine.options):
        raise LaunchError(
            f"add=true: profile {name!r} has times of {in_words(before, old.engine_options)}, not of "
            f"{in_words(engine.kind, engine.options)}; choose another profile=NAME, or replace it with overwrite=true"
        )


def added(old: LayerProfile, new: LayerProfile) -> LayerProfile:
    """Both together; what is of the same sizes and number format is the new one's. Raises LaunchError: they are of
    different types of GPU, or of different models under one name."""
    if old.gpu != new.gpu:
        raise LaunchError(
            f"add=true: the profile is for gpu {old.gpu}, but the new measurements are for {new.gpu}; choose another "
            f"profile=NAME"
        )
    known: dict[str, Shape | Module] = {**old.models, **old.modules}
    added: dict[str, Shape | Module] = {**new.models, **new.modules}
    for name, model in added.items():
        before = known.get(name, model)
        if before != model:
            raise LaunchError(
                f"add=true: the profile already has another model named {name!r} ({_in_words(before)}, not "
                f"{_in_words(model)}); give the new one another name with model.name=…, or replace the file with "
                f"overwrite=true"
            )
    measured = {str(costs) for costs in new.costs}
    again = {one.name for one in new.collectives}
    tried = {(one.model, one.precision) for one in new.room}
    costs = [*(one for one in old.costs if str(one) not in measured), *new.costs]
    with reworded(ConfigError, "add=true: combined with the existing profile: ", of=ConfigError):
        return replace(
            new,
            engine=old.engine,
            source=new.source if new.source in old.source else f"{old.source}; {new.source}",
            models={**old.models, **new.models},
            modules={**old.modules, **new.modules},
            costs=sorted(costs, key=lambda one: (one.model, one.precision, one.tensor, one.micro_batch_size)),
            optimizer_ns_per_parameter={**old.optimizer_ns_per_parameter, **new.optimizer_ns_per_parameter},
            steps=[*(one for one in old.steps if str(one) not in {*map(str, new.steps)}), *new.steps],
            room=[*(one for one in old.room if (one.model, one.precision) not in tried), *new.room],
            buckets_mib={**old.buckets_mib, **new.buckets_mib},
            all_reduces={**old.all_reduces, **new.all_reduces},
            hosts={**old.hosts, **new.hosts},
            collectives=[*(one for one in old.collectives if one.name not in again), *new.collectives],
            links={row: {**old.links.get(row, {}), **new.links.get(row, {})} for row in {**old.links, **new.links}},
            within=_together(old.within, new.within),
            between=_together(old.between, new.between),
        )


def _in_words(model: Shape | Module) -> str:
    if isinstance(model, Shape):
        return str(model)
    return f"{model.code} of SHA-256 {model.digest[:8]}…, model.capture={str(model.capture).lower()}"


def _together(old: Links, new: Links) -> Links:
    return Links(p2p=new.p2p or old.p2p, all_reduce=new.all_reduce or old.all_reduce)


def graph_paths(file: Path, gpus: Sequence[str]) -> dict[str, Path]:
    """Returns the file of each GPU; of several each has one of its own."""
    return {gpu: file if len(gpus) == 1 else file.with_name(f"{file.stem}_{gpu}{file.suffix}") for gpu in gpus}


def write_graphs(file: Path, experiment: Experiment, profiles: Mapping[str, LayerProfile]) -> list[Path]:
    """Writes the graphs, with the times of the largest micro-batch that was measured. Raises OutputError: a file cannot
    be written."""
    written = graph_paths(file, [*profiles])
    for gpu, profile in profiles.items():
        write_whole(written[gpu], graph_text(graph_of(*_of(experiment, gpu, profile))))
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
