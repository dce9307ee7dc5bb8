"""What is published of PipeDream's experiments, to stand beside runs of the same models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.facts.side_by_side import Facts


@dataclass(frozen=True, kw_only=True)
class Published:
    """Of a model on so many workers."""

    model: str
    workers: int
    where: str
    replicas: str
    speed_up: float
    """Over data parallelism."""
    of: str
    """What was so much faster."""
    source: str


PAPER = "Narayanan et al., SOSP 2019, abstract"
OPTIMIZER = "optimizer_graph_hierarchical.py --activation_compression_ratio 1 on its repository's profile"
_STRAIGHT_4, _TEN, _TWENTY_FIVE = "1-1-1-1", "10 Gbit/s", "25 Gbit/s"


def _answer(model: str, workers: int, where: str, replicas: str, speed_up: float) -> Published:
    return Published(
        model=model, workers=workers, where=where, replicas=replicas, speed_up=speed_up,
        of="throughput, predicted", source=OPTIMIZER,
    )  # fmt: skip


PUBLISHED = (
    Published(
        model="vgg16", workers=16, where="four servers of four V100, 10 Gbit/s", replicas="15-1", speed_up=5.3,
        of="time to accuracy, at most", source=PAPER,
    ),
    _answer("vgg16", 4, _TEN, "3-1", 2.84),
    _answer("vgg16", 4, _TWENTY_FIVE, "3-1", 1.74),
    _answer("vgg16", 16, _TWENTY_FIVE, "15-1", 1.84),
    _answer("resnet50", 4, _TEN, "2-2", 1.13),
    _answer("resnet50", 4, _TWENTY_FIVE, "3-1", 1.16),
    _answer("resnet50", 16, _TWENTY_FIVE, "7-4-3-1-1", 1.08),
    _answer("gnmt-16", 4, _TEN, _STRAIGHT_4, 5.81),
    _answer("gnmt-16", 4, _TWENTY_FIVE, _STRAIGHT_4, 2.89),
    _answer("gnmt-16", 16, _TWENTY_FIVE, "1-1-1-1-1-1-1-1-1-1-1-1-3-1", 2.75),
)  # fmt: skip


def published(runs: Sequence[Facts]) -> list[Published]:
    """Of the models and numbers of workers of these runs."""
    known = {(run.model, run.workers) for run in runs}
    return [one for one in PUBLISHED if (one.model, one.workers) in known]
