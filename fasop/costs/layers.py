"""What a GPU takes for the parts of a model, from its profile or, where there is none, from its peak rates.

Times are seconds, sizes bytes. A profile's times are those of one rank of a tensor group, with the group's collectives
in them; nothing is guessed for a tensor size that was not measured. Times are of one number format: those in 16 bit
never serve a run in fp32, for which a roofline takes their place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from conf.schema.cluster import Gpu
from conf.schema.model import Model
from fasop.costs.blocks import Kinds
from fasop.costs.measured_module import LOSS, MeasuredModule
from fasop.costs.network.links import Link, Number
from fasop.costs.profiles.profile import OTHER_16_BIT, LayerProfile, ModelCosts
from fasop.costs.roofline import Time, roofline, roofline_of_counts, sums_of_counts, work_of_counts
from fasop.costs.sizes import BYTES
from fasop.costs.training import Training
from fasop.errors import SearchError
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.train_config import Precision


class Basis(IntEnum):
    """What a time rests on, from the best to the worst; a sum rests on the worst of its parts."""

    MEASURED = 0
    INTERPOLATED = 1
    """Between two measured micro-batch sizes."""
    OTHER_FORMAT = 2
    """In fp16 for bf16, or the other way round, on a GPU whose peak rates are the same in both."""
    OTHER_ENGINE = 3
    """Measured with another engine's layers, or with the same engine and other options."""
    EXTRAPOLATED = 4
    """Beyond the measured micro-batch sizes: an upper bound, if larger ones are never less efficient."""
    NOT_MEASURED = 5
    """An estimate (`fasop.costs.roofline`): what the GPU's peak rates allow, and the starts of its kernels."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds that the parts of a model take on a GPU."""

    embedding: Time
    """The time of all that the first stage has beside its layers."""
    layers: tuple[Time, ...]
    """The time of a layer of each kind (`fasop.costs.blocks.Blocks.kinds`)."""
    head: Time
    """The time of all that the last stage has beside its layers."""
    basis: Basis
    again: float = 0.0
    """What a layer's backward pass takes longer in those of a stage that are computed again, if not all are; of several
    kinds of layers the most."""

    def multiplied(self, forward: float, backward: float) -> LayerTimes:
        """With all forward and backward passes longer by these factors."""

        def longer(time: Time) -> Time:
            return Time(forward=forward * time.forward, backward=backward * time.backward)

        return LayerTimes(
            embedding=longer(self.embedding),
            layers=tuple(map(longer, self.layers)),
            head=longer(self.head),
            basis=self.basis,
            again=backward * self.again,
        )

    @property
    def layer(self) -> Time:
        """Return the times of the first kind of layer."""
        return self.layers[0]


def layer_times(gpu: Gpu, profile: LayerProfile | None, training: Training, within: Link[float]) -> LayerTimes:
    """For the tensor size, micro-batch and recomputation of `training`. Where ranks share sequences, these are the
    times of as many samples as a rank has tokens of.

    Recomputing repeats a layer's forward pass in its backward pass, or of it the attention's core, which is counted
    by its share of the operations. `within` connects the ranks of a tensor group; only a roofline needs it.

    Raises:
        SearchError: the profile knows the model in this number format, but not with this tensor size.
    """
    points, of_format = _known(gpu, profile, training)
    if points and isinstance(training.model, MeasuredModule) and training.model.alone is not None:
        times, basis = _shared_out(gpu, points, training, training.model.alone, within), Basis.NOT_MEASURED
    elif points:
        times, of_sizes = _profiled(gpu, points, training)
        basis = max(of_sizes, of_format)
    else:
        sizes = training.parallel.tensor_size, training.parallel.own_samples
        times = (roofline_of_counts if isinstance(training.model, MeasuredModule) else roofline)(
            gpu, training.model, training.precision, *sizes, within
        )
        basis = Basis.NOT_MEASURED
    blocks, again = training.blocks, 0.0
    if training.parallel.recompute.layers is not None:
        one = replace(training, parallel=replace(training.parallel, recompute=training.parallel.recompute.way))
        every = layer_times(gpu, profile, one, within)
        training = replace(training, parallel=replace(training.parallel, recompute=Recompute.none))
        plain = layer_times(gpu, profile, training, within)
        again = max(a.backward - b.backward for a, b in zip(every.layers, plain.layers, strict=True))
    if isinstance(training.model, MeasuredModule):
        times = _computed_again(training, times)
    return LayerTimes(
        embedding=_together(times, blocks.first),
        layers=tuple(_together({**times, **_recomputed(training, times, kinds)}, kinds) for kinds in blocks.kinds),
        head=_together(times, blocks.last),
        basis=basis,
        again=again,
    )


def _together(times: Mapping[str, Time], kinds: Kinds) -> Time:
    """Add up the times of blocks that lie together."""
    return Time(
        forward=sum(times[kind].forward for kind in kinds), backward=sum(times[kind].backward for kind in kinds)
    )


def _recomputed(training: Training, times: Mapping[str, Time], kinds: Kinds) -> Mapping[str, Time]:
    """Add to the backward pass what is computed again, by kind of block of a layer: the last one's forward pass, or a
    part of it."""
    time, recompute = times[kinds[-1]], training.parallel.recompute
    if recompute is Recompute.none or isinstance(training.model, MeasuredModule):
        return {}
    again = 1.0 if recompute is Recompute.full else _core_share(training.model, kinds[-1])
    return {kinds[-1]: Time(forward=time.forward, backward=time.backward + again * time.forward)}


def _computed_again(training: Training, times: Mapping[str, Time]) -> Mapping[str, Time]:
    """Add what full recomputation repeats of a user's module: every block's forward pass, but not the loss."""
    if training.parallel.recompute is Recompute.none:
        return times
    return {
        name: time if name == LOSS else Time(forward=time.forward, backward=time.backward + time.forward)
        for name, time in times.items()
    }


def measured_tensor_sizes(gpu: Gpu, profile: LayerProfile | None, training: Training) -> set[int] | None:
    """Those that a profile has for a model; None where it has no times for it: a roofline serves for any."""
    if isinstance(training.model, MeasuredModule):
        return {*training.model.groups}
    points, _ = _known(gpu, profile, training)
    return {costs.tensor for costs in points} or None


def why_not_measured(gpu: Gpu, profile: LayerProfile | None, training: Training) -> str | None:
    """Why times of a GPU come from a roofline; None if they do not."""
    if _known(gpu, profile, training)[0]:
        return None
    model, precision = training.model, training.precision
    if profile is None:
        return f"{gpu.name} has no profile"
    others = profile.precisions(model)
    if others:
        other = others[-1]
        return (
            f"profile {gpu.profile!r} of {gpu.name} has times of model={model.name} in {' and '.join(others)}, not in "
            f"train.precision={precision}: search train.precision={other}, or measure {precision} with 'tdpp profile'"
        )
    if unlike := profile.unlike(model):
        return (
            f"profile {gpu.profile!r} of {gpu.name} has times of model={model.name} with {', '.join(unlike)}, not of "
            f"this one"
        )
    return f"profile {gpu.profile!r} of {gpu.name} has no times of model={model.name} (of this shape)"


def _known(gpu: Gpu, profile: LayerProfile | None, training: Training) -> tuple[Sequence[ModelCosts], Basis]:
    """What a profile has for a model, and what its times then rest on."""
    if profile is None:
        return (), Basis.NOT_MEASURED
    of_engine = Basis.MEASURED if profile.is_of(training.engine) else Basis.OTHER_ENGINE
    if points := profile.points(training.model, training.precision):
        return points, of_engine
    other = OTHER_16_BIT.get(training.precision)
    if other is not None and gpu.fp16_tflops == gpu.bf16_tflops:
        return profile.points(training.model, other), max(of_engine, Basis.OTHER_FORMAT)
    return (), Basis.NOT_MEASURED


def _profiled(gpu: Gpu, points: Sequence[ModelCosts], training: Training) -> tuple[Mapping[str, Time], Basis]:
    """Look the times up in a profile, by kind of block."""
    parallel = training.parallel
    known = {p.micro_batch_size: p for p in points if p.tensor == parallel.tensor_size}
    if not known:
        sizes = ", ".join(map(str, sorted({p.tensor for p in points})))
        raise SearchError(
            f"the profile {gpu.profile!r} of {gpu.name} has no costs for model={points[0].model} "
            f"parallel.tensor={parallel.tensor_size}; it has tensor sizes {sizes}; use those, or measure this one with "
            "'tdpp profile'"
        )
    sizes_known = sorted(known)
    basis, of = _between(sizes_known, parallel.own_samples)

    def time(kind: str) -> Time:
        costs = [known[size].parts[kind] for size in sizes_known]
        return Time(forward=of([c.forward for c in costs]) * 1e-3, backward=of([c.backward for c in costs]) * 1e-3)

    model, every = training.model, training.blocks.every_kind
    if isinstance(model, MeasuredModule):
        return {name: time(model.block(name).kind) for name in every}, basis
    return {kind: time(kind) for kind in every}, basis


def _shared_out(
    gpu: Gpu, points: Sequence[ModelCosts], training: Training, alone: MeasuredModule, within: Link[float]
) -> Mapping[str, Time]:
    """Estimate the times of a rank in a tensor group of a size that no profile has, or of one that trains adapters.

    Those of all weights without a group, as much less as what was counted takes by the GPU's peak rates, and the
    group's sums.
    """
    model, batch = training.model, training.parallel.micro_batch_size
    assert isinstance(model, MeasuredModule)
    times, _ = _profiled(gpu, points, replace(training, parallel=replace(training.parallel, tensor=1)))
    whole, own = (work_of_counts(gpu, one, training.precision, batch) for one in (alone, model))
    sums = sums_of_counts(model, batch, within)

    def part(own: float, whole: float) -> float:
        return own / whole if whole else 1.0

    return {
        name: Time(
            forward=part(own[name].forward, whole[name].forward) * time.forward + sums[name].forward,
            backward=part(own[name].backward, whole[name].backward) * time.backward + sums[name].backward,
        )
        for name, time in times.items()
    }


def _between(sizes: Sequence[int], wanted: float) -> tuple[Basis, Callable[[Sequence[float]], float]]:
    """How to get the value at `wanted` from the values at `sizes`, which increase.

    Above the largest size in proportion to it, below the smallest that one's value: upper bounds both, as a larger
    micro-batch takes longer in all and less for each sample. A part of a sample takes what the two smallest sizes say
    that does not depend on their samples, and its part of the rest; of a single size, its part.
    """
    right = bisect_left(sizes, wanted)
    if right < len(sizes) and sizes[right] == wanted:
        return Basis.MEASURED, lambda values: values[right]
    if right == 0 and wanted < 1:
        share = (sizes[0] - wanted) / (sizes[1] - sizes[0]) if len(sizes) > 1 else 0.0

        def of_part(values: Sequence[float]) -> float:
            least = values[0] * wanted / sizes[0]
            return max(least, values[0] - share * max(0.0, values[1] - values[0])) if len(values) > 1 else least

        return Basis.EXTRAPOLATED, of_part
    if right == 0:
        return Basis.EXTRAPOLATED, lambda values: values[0]
    if right == len(sizes):
        return Basis.EXTRAPOLATED, lambda values: values[-1] * wanted / sizes[-1]
    low, high = sizes[right - 1], sizes[right]
    share = (wanted - low) / (high - low)
    return Basis.INTERPOLATED, lambda values: values[right - 1] + share * (values[right] - values[right - 1])


def _core_share(model: Model, kind: str) -> float:
    """The part of a layer's operations that is the attention's core: scores and their product with the values."""
    sizes = model.sized(1)
    return sizes.traits.attention_operations(sizes, kind) / max(1, sizes.traits.operations(sizes, kind))


def gradients_summed(link: Link[Number], training: Training) -> Link[Number]:
    """Seconds per parameter, and latency, until all replicas have the sum of the gradients or, with a sharded
    optimizer, of their share of them."""
    if training.islands:
        return _islands_met(link, training)
    replicas, scattered = training.parallel.data, training.parallel.sharded_optimizer
    summed = link.reduce_scatter(replicas) if scattered else link.all_reduce(replicas)
    return Link(latency_s=summed.latency_s, s_per_byte=training.reduced_bytes * summed.s_per_byte)


def _islands_met(link: Link[Number], training: Training) -> Link[Number]:
    """The same where only the replicas of an island sum gradients, and islands average their weights, fp32, every so
    many iterations, which here count as their part of it; the largest island takes longest, and the smallest cuts the
    weights into the fewest shares."""
    within, across = link.all_reduce(max(training.islands)), link.all_reduce(len(training.islands))
    sent = BYTES[Precision.fp32] / min(training.islands) * across.s_per_byte
    return Link(
        latency_s=within.latency_s + across.latency_s / training.sync_every,
        s_per_byte=training.reduced_bytes * within.s_per_byte + sent / training.sync_every,
    )


def weights_handed_out(link: Link[Number], training: Training) -> Link[Number]:
    """Seconds per parameter, and latency, until replicas with a sharded optimizer have each other's new weights, but
    for those that gather them in each pass, or an island's part of a common step: the weights, fp32, go across islands
    in shares and then through each island."""
    if training.meeting is not None:
        through, width = link.all_gather(training.parallel.data), BYTES[Precision.fp32]
        return Link(
            latency_s=(through.latency_s + training.meeting.latency_s) / training.sync_every,
            s_per_byte=width * (through.s_per_byte + training.meeting.s_per_byte) / training.sync_every,
        )
    hands_out = training.parallel.sharded_optimizer and not training.gathers
    return weights_gathered(link, training, training.parallel.data if hands_out else 1)


def weights_gathered(link: Link[Number], training: Training, replicas: int) -> Link[Number]:
    """Seconds per parameter, and latency, until so many replicas have each other's shares of the weights."""
    gathered = link.all_gather(replicas)
    return Link(latency_s=gathered.latency_s, s_per_byte=training.width * gathered.s_per_byte)
