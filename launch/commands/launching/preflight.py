"""What else would fail only on the ranks, once the nodes were waited for, is found before anything is started:
data that do not suit the model, a model of transformers that cannot be trained as its plan says, a busy machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from conf.blocks_of_module import asked_of, blocks_of, can_look, digest_of, samples_of_module
from conf.errors import TdppError, reworded
from conf.schema.adapt import Rule
from conf.schema.experiment import ContainerKind, ExecutorKind, Experiment, Rehearse
from conf.schema.train import LrPolicy, Train
from conf.torch_answers import ERROR, FAILED, answer, has_transformers
from conf.visible import plural, size_text
from launch.doctor.judge import checkpoint_bytes
from launch.errors import LaunchError, of_engine
from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.goal import BLEU, SPLIT, names_metric
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.rules.engine import MEGATRON_LM

if TYPE_CHECKING:
    from megatron_ext.checkpoints.meta import Checkpoint

Preflight = Callable[[Experiment], Sequence[str]]
_MOST_PROVED = 2000
"""Micro-batches of a stream that are replayed before a launch; tests prove that streams go on as they began."""


def _check_module(experiment: Experiment) -> list[str]:
    """Raises a TdppError for a module that cannot be trained, as far as this machine can tell."""
    model = experiment.model
    if not can_look() or experiment.container.kind is not ContainerKind.none:
        return [f"model.code={model.code} is checked when the run starts, on its nodes"]
    count = len(blocks_of(asked_of(experiment)))
    if count != model.layers:
        raise LaunchError(
            f"model.layers={model.layers}, but model.code={model.code} has {count} blocks; leave model.layers out"
        )
    return []


def _check_evaluation(experiment: Experiment) -> None:
    """Raises a TdppError where there is nothing to evaluate on, or nobody knows how much of it."""
    from megatron_ext.contract.errors import EngineError
    from megatron_ext.inference.sentences import held_out

    train, model = experiment.train, experiment.model
    if train.eval_interval is None or not readable(experiment):
        return
    with reworded(
        LaunchError,
        f"train.eval_interval={train.eval_interval} evaluates on the {SPLIT} split, which is unusable: ",
        of=TdppError,
    ):
        count = samples_in_split(experiment, SPLIT)
    if model.traits.translates and names_metric(BLEU, train.until, train.best):
        with reworded(LaunchError, f"train.{'until' if train.until else 'best'}: ", of=EngineError):
            held_out(os.path.abspath(experiment.data.prefix), SPLIT)  # noqa: PTH100  (as in the plan)
    if count is None and train.eval_iterations is None:
        data = f"of model.code={model.code}" if model.traits.user_code else "of a blend"
        data = f"of model.family={model.family}" if model.traits.masks else data
        raise LaunchError(
            f"train.eval_iterations=null evaluates the whole {SPLIT} split, but the data {data} do not say how many "
            f"samples it has; set train.eval_iterations to a number of global batches"
        )


def preflight(experiment: Experiment) -> Sequence[str]:
    """Returns what is odd about what the run would read; a rehearsal reads nothing.

    Raises:
        TdppError: the data, `train.load` or `parallel.schedule_file` do not fit the experiment, or its model of
            transformers cannot be trained so.
    """
    # Only a launch needs these, and help and resume do not wait for numpy.
    from data_prep.training import check_for_training, known_order
    from megatron_ext.checkpoints import meta
    from megatron_ext.checkpoints.foreign.torch_dist import is_torch_dist
    from megatron_ext.contract.errors import EngineError
    from megatron_ext.contract.schedule import check as schedule_check
    from megatron_ext.contract.schedule import iteration
    from megatron_ext.contract.schedule.stream_check import prove

    of_model = check_model(experiment)
    if experiment.executor.rehearse is not Rehearse.none:
        return of_model
    doubts = _check_module(experiment) if experiment.model.traits.user_code else check_for_training(experiment)
    doubts = [*of_model, *doubts]
    train = experiment.train
    if train.lr_policy is LrPolicy.constant and train.min_lr not in (0.0, Train.min_lr):
        text = f"train.min_lr={train.min_lr:g} has no effect: train.lr_policy=constant never lowers the rate"
        doubts = [*doubts, text]
    _check_evaluation(experiment)
    length = with_length(experiment).train
    model, parallel = experiment.model, experiment.parallel
    if train.load is not None:
        with of_engine():
            found = meta.to_load(Path(train.load), model.sized(1).identity(), train, train.iterations)
        if found.meta.consumed_samples and found.meta.order:
            samples = length.samples or found.position.consumed(length.last_iteration, parallel.global_batch_size)
            _require_order(found, known_order(experiment, samples), f"train.load={train.load}: ")
        if found.published and is_torch_dist(found.folder):
            text = (
                f"train.load={train.load}: only the weights are loaded; to continue that training, run tdpp checkpoint "
                f"convert {train.load} FOLDER --to tdpp, and give train.load=FOLDER"
            )
            doubts = [*doubts, text]
    if parallel.schedule_file is not None:
        path = Path(parallel.schedule_file)
        with reworded(
            LaunchError,
            "parallel.schedule_file=",
            "; 'python -m megatron_ext.schedule' prints those that have a name",
            of=EngineError,
        ):
            schedule_check.read(path, parallel.pipeline, parallel.chunks, parallel.micro_batches)
    count = parallel.global_batch_size // parallel.micro_batch_size
    if parallel.stream is not None:
        prove(parallel.stream, min((train.iterations or _MOST_PROVED) * count, _MOST_PROVED))
    elif not parallel.layout.even:
        actions = iteration.replicated(str(parallel.schedule), parallel.layout.replicas, count)
        schedule_check.check_replicas(actions, parallel.chunks, count)
    return doubts


def before_launch(experiment: Experiment) -> Sequence[str]:
    """Returns what `preflight` does, and what is odd about where the run is to compute."""
    odd = [*preflight(experiment), *_kept(experiment)]
    if (use := shared_cpus(experiment)) is None:
        return odd
    ranks, cpus = use
    return [*odd, f"{ranks} ranks share {plural(cpus, 'CPU')} and wait for each other, so times vary"]


def _kept(experiment: Experiment) -> list[str]:
    """What checkpoints in the memory of nodes take of it: each part is on two, of two checkpoints."""
    if experiment.train.save_memory is None or not (one := checkpoint_bytes(experiment)):
        return []
    nodes = sum(group.count for group in experiment.cluster.groups.values())
    return [
        f"train.save_memory={experiment.train.save_memory} takes up to {size_text(4 * one)} of the memory of "
        f"{plural(nodes, 'node')} together, beside the ranks"
    ]


def shared_cpus(experiment: Experiment) -> tuple[int, int] | None:
    """Ranks and this machine's CPUs, of a run that has fewer CPUs than ranks here; a rehearsal computes nothing."""
    on_cpus = all(gpu.is_cpu for gpu in experiment.cluster.gpus.values())
    executor = experiment.executor
    if not on_cpus or executor.kind is not ExecutorKind.local or executor.rehearse is not Rehearse.none:
        return None
    ranks, cpus = experiment.parallel.world_size, usable_cores()
    return (ranks, cpus) if ranks > cpus else None


def check_start(plan: Plan, experiment: Experiment) -> None:
    """Raises TdppError if the run of this plan cannot go on from its checkpoint, or with its data. Megatron-LM reads
    its own itself."""
    if plan.engine == MEGATRON_LM:
        return
    from data_prep.training import known_order
    from megatron_ext.checkpoints import meta
    from megatron_ext.contract.errors import EngineError

    try:
        found = meta.start_of(plan)
    except EngineError as error:
        latest = plan.files.latest_checkpoint
        way_out = (
            f"; once {latest} names another checkpoint, the run continues from that one" if latest.exists() else ""
        )
        raise LaunchError(f"resume={plan.run}: {error}{way_out}") from error
    if found is None or not found.meta.consumed_samples or not found.meta.order or not readable(experiment):
        return
    samples = plan.train.samples or found.position.consumed(plan.train.iterations, plan.global_batch_size)
    with reworded(LaunchError, f"resume={plan.run}: ", of=(EngineError, TdppError)):
        order = known_order(experiment, samples)
    data = experiment.data
    which = "a corpus of data.blend" if data.blend else f"data.prefix={data.prefix}"
    _require_order(found, order, f"resume={plan.run}: {which} is not as it was, so restore it: ")


def _require_order(found: Checkpoint, order: Mapping[str, float], said: str) -> None:
    """Raises LaunchError if what a launch knows of the order of samples is not what a checkpoint has, after what is
    `said` first."""
    from megatron_ext.checkpoints import meta
    from megatron_ext.contract.errors import EngineError

    before = found.meta.order or {}
    with reworded(LaunchError, said, of=EngineError):
        meta.require_order(found, {key: order[key] for key in order if key in before})


def with_length(experiment: Experiment) -> Experiment:
    """The same experiment with its iterations; where it goes on from a checkpoint, from the one that is the newest now.
    Raises TdppError: the data do not say how many samples an epoch has, or nothing is left to train."""
    experiment = _with_intervals(experiment)
    from megatron_ext.checkpoints import meta
    from megatron_ext.data.samples import BEGINNING

    train = experiment.train
    size, key = _least_batch(experiment)
    if train.iterations is not None:
        return experiment
    samples = train.samples
    if samples is None:
        instead = "give train.samples or train.iterations"
        samples = (train.epochs or 0) * _in_epoch(experiment, train.length, instead)
    start, load = BEGINNING, train.load
    if load is not None:
        with of_engine():
            found = meta.to_load(Path(load), experiment.model.sized(1).identity(), train, None)
        start, load = found.position, str(found.folder)
    iterations = (samples - start.samples) // size
    if iterations < 1:
        trained = f", and {load} has seen {start.samples} of them" if load is not None else ""
        raise LaunchError(
            f"{train.length}: that is {plural(samples, 'sample')}{trained}: too few for one global batch of "
            f"{key}={size}; train longer, or use a smaller batch"
        )
    return replace(
        experiment, train=replace(train, iterations=start.iteration + iterations, samples=samples, load=load)
    )


def _with_intervals(experiment: Experiment) -> Experiment:
    """The same with intervals in iterations: those nearest to the epochs that are asked for, at least one."""
    epochs = experiment.train.in_epochs
    if not epochs:
        return experiment
    given = " ".join(f"train.{key}={getattr(experiment.train, key)}" for key in epochs)
    if experiment.adapt.rule is not Rule.none:
        raise LaunchError(
            f"{given}: with adapt.rule={experiment.adapt.rule} the batch changes, so an epoch has no fixed number of "
            f"iterations; give iterations"
        )
    each = Fraction(_in_epoch(experiment, given, "give iterations"), experiment.parallel.global_batch_size)
    intervals = {key: max(1, round(count * each)) for key, count in epochs.items()}
    return replace(experiment, train=experiment.train.with_intervals(intervals))


def _least_batch(experiment: Experiment) -> tuple[int, str]:
    """Returns the batch in samples and its key; of a batch that adapts the smallest, which bounds the iterations."""
    batch = experiment.parallel.global_batch_size
    if experiment.adapt.rule is Rule.none:
        return batch, "parallel.global_batch_size"
    return experiment.adapt.bounds(batch)[0], "adapt.lower"


def data_there(experiment: Experiment) -> bool:
    """Whether there is any file of the data."""
    prefix = Path(experiment.data.prefix)
    return prefix.parent.is_dir() and any(file.name.startswith(prefix.name) for file in prefix.parent.iterdir())


def samples_in_split(experiment: Experiment, split: str) -> int | None:
    """How many samples a split has before any of them comes again; None where no number says that, as of a blend.
    Raises TdppError: the split cannot be used, or has no sample."""
    if experiment.model.traits.user_code:
        return samples_of_module(asked_of(experiment), split)
    from data_prep import training

    return training.samples_in_split(experiment, split)


def readable(experiment: Experiment) -> bool:
    """Whether this machine can look at the data: those of a module may be in its container alone."""
    return not experiment.model.traits.user_code or (can_look() and experiment.container.kind is ContainerKind.none)


def _in_epoch(experiment: Experiment, given: str, instead: str) -> int:
    """The samples of an epoch, which `given` needs; a message names that and what to give `instead`."""
    model = experiment.model
    if not readable(experiment):
        raise LaunchError(
            f"{given}: the samples of model.code={model.code} can be counted only where its ranks run; {instead}"
        )
    count = samples_in_split(experiment, "train")
    if count is not None:
        return count
    if experiment.data.blend and not model.traits.user_code:
        why = f"the {len(experiment.data.corpora())} corpora of data.blend end at different times"
    elif model.traits.user_code:
        why = f"the data of model.code={model.code} have no end"
    else:
        why = f"with model.family={model.family} every epoch cuts the text into other samples"
    raise LaunchError(f"{given}: {why}, so an epoch has no fixed number of samples; {instead}")


CHECK = "megatron_ext.check"


def check_model(experiment: Experiment) -> list[str]:
    """Returns what only the ranks can tell. Raises TdppError: transformers has no such model, or tdpp cannot train it
    in this layout, with these adapters, or with packed documents."""
    model, parallel, train = experiment.model, experiment.parallel, experiment.train
    if model.config is None:
        return []
    if experiment.container.kind is not ContainerKind.none or not has_transformers():
        return [f"model.config={model.config} is checked when the run starts, on its nodes"]
    documents = experiment.data.documents()
    adapters = {key: getattr(train, key) for key in ("lora_rank", "lora_alpha", "lora_targets")}
    tensors = sorted(set(parallel.layout.tensors))
    request = {
        "model": asdict(model.sized(1)),
        "train": {"seed": 1, "precision": str(train.precision), **adapters},
        "pipeline": len(tensors),
        "tensors": tensors,
        "data_documents": documents and asdict(documents),
    }
    found = answer(CHECK, request, digest_of(model))
    if ERROR in found:
        raise LaunchError(found[ERROR])
    if FAILED in found:
        return [f"model.config={model.config} is checked when the run starts, on its nodes: {found[FAILED]}"]
    if not found["tried"]:
        return [f"data.packing=true: whether model.config={model.config} keeps documents apart is tried on the nodes"]
    return []
