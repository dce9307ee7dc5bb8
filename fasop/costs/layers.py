"""What a GPU takes for the parts of a model, from its profile or, where there is none, from its peak rates.

Times are seconds, sizes bytes. A profile's times are those of one rank of a tensor group, with the group's collectives
in them; nothing is guessed for a tensor size that was not measured. Times are of one number format: those in 16 bit
never serve a run in fp32, for which a roofline takes their place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from conf.schema.experiment import Gpu, Model, Recompute
from fasop.costs.links import Link, Number
from fasop.costs.profile import OTHER_16_BIT, Cost, LayerProfile, ModelCosts
from fasop.costs.sizes import activation_bytes, layer_parameters
from fasop.costs.training import Training
from fasop.errors import SearchError


class Basis(IntEnum):
    """What a time rests on, from the best to the worst; a sum rests on the worst of its parts."""

    MEASURED = 0
    INTERPOLATED = 1
    """Between two measured micro-batch sizes."""
    OTHER_FORMAT = 2
    """In fp16 for bf16, or the other way round, on a GPU whose peak rates are the same in both."""
    EXTRAPOLATED = 3
    """Beyond the measured micro-batch sizes: an upper bound, if larger ones are never less efficient."""
    NOT_MEASURED = 4
    """A roofline: what the GPU's peak rates allow, and so a lower bound."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one micro-batch."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds that the parts of a model take on a GPU."""

    embedding: Time
    layer: Time
    head: Time
    basis: Basis

    def multiplied(self, forward: float, backward: float) -> LayerTimes:
        """With all forward and backward passes longer by these factors."""

        def longer(time: Time) -> Time:
            return Time(forward=forward * time.forward, backward=backward * time.backward)

        return LayerTimes(
            embedding=longer(self.embedding), layer=longer(self.layer), head=longer(self.head), basis=self.basis
        )


def layer_times(gpu: Gpu, profile: LayerProfile | None, training: Training, within: Link[float]) -> LayerTimes:
    """For the tensor size, micro-batch and recomputation of `training`.

    Recomputing repeats a layer's forward pass in its backward pass, or of it the attention's core, which is counted
    by its share of the operations. `within` connects the ranks of a tensor group; only a roofline needs it.

    Raises:
        SearchError: the profile knows the model in this number format, but not with this tensor size.
    """
    model, parallel = training.model, training.parallel
    points, basis = _known(gpu, profile, training)
    times = _profiled(gpu, points, basis, training) if points else _roofline(gpu, training, within)
    again = {Recompute.none: 0.0, Recompute.selective: _core_share(model), Recompute.full: 1.0}[parallel.recompute]
    layer = Time(forward=times.layer.forward, backward=times.layer.backward + again * times.layer.forward)
    return LayerTimes(embedding=times.embedding, layer=layer, head=times.head, basis=times.basis)


def measured_tensor_sizes(gpu: Gpu, profile: LayerProfile | None, training: Training) -> set[int] | None:
    """Those that a profile has for a model; None where it has no times for it: a roofline serves for any."""
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
    return f"profile {gpu.profile!r} of {gpu.name} has no times of model={model.name} (of this shape)"


def _known(gpu: Gpu, profile: LayerProfile | None, training: Training) -> tuple[Sequence[ModelCosts], Basis]:
    """What a profile has for a model, and what its times then rest on."""
    if profile is None:
        return (), Basis.NOT_MEASURED
    if points := profile.points(training.model, training.precision):
        return points, Basis.MEASURED
    other = OTHER_16_BIT.get(training.precision)
    if other is not None and gpu.fp16_tflops == gpu.bf16_tflops:
        return profile.points(training.model, other), Basis.OTHER_FORMAT
    return (), Basis.NOT_MEASURED


def _profiled(gpu: Gpu, points: Sequence[ModelCosts], of_format: Basis, training: Training) -> LayerTimes:
    parallel = training.parallel
    known = {p.micro_batch_size: p for p in points if p.tensor == parallel.tensor}
    if not known:
        sizes = ", ".join(map(str, sorted({p.tensor for p in points})))
        raise SearchError(
            f"the profile {gpu.profile!r} of {gpu.name} has no costs for model={points[0].model} "
            f"parallel.tensor={parallel.tensor}; it has tensor sizes {sizes}; use those, or measure this one with "
            "'tdpp profile'"
        )
    sizes_known = sorted(known)
    basis, of = _between(sizes_known, parallel.micro_batch_size)

    def time(part: Callable[[ModelCosts], Cost]) -> Time:
        costs = [part(known[size]) for size in sizes_known]
        return Time(forward=of([c.forward for c in costs]) * 1e-3, backward=of([c.backward for c in costs]) * 1e-3)

    return LayerTimes(
        embedding=time(lambda p: p.embedding),
        layer=time(lambda p: p.layer),
        head=time(lambda p: p.head),
        basis=max(basis, of_format),
    )


def _between(sizes: Sequence[int], wanted: int) -> tuple[Basis, Callable[[Sequence[float]], float]]:
    """How to get the value at `wanted` from the values at `sizes`, which increase.

    Above the largest size in proportion to it, below the smallest that one's value: upper bounds both, as a larger
    micro-batch takes longer in all and less for each sample.
    """
    right = bisect_left(sizes, wanted)
    if right < len(sizes) and sizes[right] == wanted:
        return Basis.MEASURED, lambda values: values[right]
    if right == 0:
        return Basis.EXTRAPOLATED, lambda values: values[0]
    if right == len(sizes):
        return Basis.EXTRAPOLATED, lambda values: values[-1] * wanted / sizes[-1]
    low, high = sizes[right - 1], sizes[right]
    share = (wanted - low) / (high - low)
    return Basis.INTERPOLATED, lambda values: values[right - 1] + share * (values[right] - values[right - 1])


def _roofline(gpu: Gpu, training: Training, within: Link[float]) -> LayerTimes:
    """What peak rates allow (Williams et al. 2009): matrix products by the GPU's operations per second or the reading
    of their weights, everything else by the memory traffic; a backward pass takes twice a forward pass.

    Operations: Narayanan et al. 2021, appendix. A tensor group all-reduces its activations twice in a layer's forward
    pass and twice in its backward pass, once after the embedding and once before the head (Shoeybi et al. 2019).
    """
    model, parallel = training.model, training.parallel
    tensor, width, h = parallel.tensor, training.width, model.hidden
    tokens = parallel.micro_batch_size * model.sequence_length
    rate = {"fp32": gpu.fp32_tflops, "fp16": gpu.fp16_tflops, "bf16": gpu.bf16_tflops}[training.precision] * 1e12
    traffic = gpu.memory_gb_per_s * 1e9
    size = activation_bytes(model, parallel.micro_batch_size, training.precision)
    reduce = within.all_reduce(tensor).takes(float(size))

    def product(operations: float, weights: float) -> float:
        return max(operations / rate, width * weights / traffic)

    sizes = model.sized(tensor)
    matrices = product(parallel.micro_batch_size * sizes.operations("layer") / tensor, layer_parameters(model, tensor))
    # What memory.py counts, written and read.
    kept = sizes.outside_activations("layer") + sizes.inside_activations("layer") / tensor
    rest = 2 * width * parallel.micro_batch_size * kept / traffic
    embedding = 3 * width * tokens * h / traffic
    vocabulary = model.padded_vocab(tensor) // tensor
    logits = product(2 * tokens * h * vocabulary, h * vocabulary) + 2 * width * tokens * vocabulary / traffic
    return LayerTimes(
        embedding=Time(forward=embedding + reduce, backward=2 * embedding),
        layer=Time(forward=matrices + rest + 2 * reduce, backward=2 * (matrices + rest) + 2 * reduce),
        head=Time(forward=logits, backward=2 * logits + reduce),
        basis=Basis.NOT_MEASURED,
    )


def _core_share(model: Model) -> float:
    """The part of a layer's operations that is the attention's core: scores and their product with the values."""
    sizes = model.sized(1)
    return sizes.core_operations("layer") / sizes.operations("layer")


def gradients_summed(link: Link[Number], training: Training) -> Link[Number]:
    """Seconds per parameter, and latency, until all replicas have the sum of the gradients, or their share of it.

    An all-reduce; with a sharded optimizer tdpp's engine does so all the same, and Megatron-LM reduce-scatters.
    """
    scattered = training.parallel.sharded_optimizer and training.megatron_lm
    replicas = training.parallel.data
    summed = link.reduce_scatter(replicas) if scattered else link.all_reduce(replicas)
    return Link(latency_s=summed.latency_s, s_per_byte=training.gradient_bytes * summed.s_per_byte)


def weights_handed_out(link: Link[Number], training: Training) -> Link[Number]:
    """Seconds per parameter, and latency, until replicas with a sharded optimizer have each other's new weights."""
    gathered = link.all_gather(training.parallel.data if training.parallel.sharded_optimizer else 1)
    return Link(latency_s=gathered.latency_s, s_per_byte=training.width * gathered.s_per_byte)
