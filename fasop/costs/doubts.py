"""What a reader of predicted times must know about them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fasop.costs.hardware import NodeKind
from fasop.costs.layers import Basis, why_not_measured
from fasop.costs.training import Training

_BASES = {
    Basis.OTHER_FORMAT: "other format: measured in fp16 for bf16, or the other way round; peak rates are the same",
    Basis.EXTRAPOLATED: "extrapolated: beyond the micro-batch sizes of the profile, in proportion; an upper bound",
    Basis.NOT_MEASURED: "not measured: what the GPUs' peak rates allow; real runs take longer",
}


def doubts(training: Training, kinds: Sequence[NodeKind], bases: Collection[Basis]) -> Iterator[str]:
    """Of times on these nodes: what some of them rest on, what is odd about a profile, and why it does not serve."""
    yield from (text for basis, text in _BASES.items() if basis in bases)
    for name, profile in {kind.gpu.profile: kind.profile for kind in kinds}.items():
        if profile is not None:
            yield from (f"profile {name!r}: {doubt}" for doubt in profile.doubts(training.model))
    for gpu, profile in {kind.gpu: kind.profile for kind in kinds}.items():
        if profile is not None and profile.gpu != gpu.name:
            yield f"profile {gpu.profile!r} is of {profile.gpu}, not of {gpu.name}"
        if (why := why_not_measured(gpu, profile, training)) is not None:
            yield why
