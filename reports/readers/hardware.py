"""What the nodes of a run could do at most, and what they cost, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema.experiment import Experiment, Gpu
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Node


def gpu_of(node: Node, experiment: Experiment) -> Gpu:
    """The kind of GPU of a node's group."""
    return experiment.cluster.gpus[experiment.cluster.groups[node.group].gpu]


def peak_tflops(plan: Plan, experiment: Experiment) -> float | None:
    """TFLOP/s that the GPUs of all ranks together can reach in the run's precision; None on CPUs.

    What `conf/gpu` says of a CPU is not a data sheet.
    """
    gpus = [(gpu_of(node, experiment), len(node.ranks)) for node in plan.planned_nodes]
    if any(gpu.is_cpu for gpu, _ in gpus):
        return None
    return sum(count * float(getattr(gpu, f"{plan.train.precision}_tflops")) for gpu, count in gpus)


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a run's nodes cost, US dollars."""

    per_hour: float
    """Of those whose price is known."""
    unknown: tuple[str, ...]
    """Node groups whose price is not known."""

    def of_ms(self, milliseconds: float) -> float:
        return self.per_hour * milliseconds / 3.6e6


def price(plan: Plan, experiment: Experiment) -> Price:
    groups: Sequence[str] = [node.group for node in plan.planned_nodes]
    prices = {name: experiment.cluster.groups[name].price_per_hour for name in groups}
    return Price(
        per_hour=sum(prices[name] or 0.0 for name in groups),
        unknown=tuple(name for name, dollars in prices.items() if dollars is None),
    )
