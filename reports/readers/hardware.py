"""What the nodes of a run could do at most, and what they cost, from its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conf.run_folder.rundir import RunDir
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
    """The price of the nodes whose price is known."""
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


TRACE = re.compile(r"rank-(\d{5,9})\.iteration-(\d{1,9})\.json\.gz")
OF_NODE = re.compile(r"(.+?)(?:\.iteration-(\d{1,9}))?")
"""The name of a node's report without its ending: with the iteration that it shows, if that is one."""


@dataclass(frozen=True, kw_only=True)
class ProfileFile:
    path: str
    """Within the run's folder."""
    of: str
    """Whose work it shows: a rank or a node."""
    iteration: int | None
    """None: all of them."""
    opener: str
    """The program that shows it."""


def profile_files(run: RunDir) -> list[ProfileFile]:
    """Returns what profilers left by iteration, those of all iterations first."""
    return sorted(_found(run), key=lambda one: (one.iteration or 0, one.path))


def _found(run: RunDir) -> Iterator[ProfileFile]:
    for path in run.traces.glob("*.json.gz"):
        if named := TRACE.fullmatch(path.name):
            rank, traced = map(int, named.groups())
            where = f"{path.parent.name}/{path.name}"
            yield ProfileFile(path=where, of=f"rank {rank}", iteration=traced, opener="ui.perfetto.dev")
    for folder, ending, opener in ((run.nsys, "nsys-rep", "Nsight Systems"), (run.ncu, "ncu-rep", "Nsight Compute")):
        for path in folder.glob(f"*.{ending}"):
            if named := OF_NODE.fullmatch(path.stem):
                node, iteration = named.groups()
                where, at = f"{folder.name}/{path.name}", int(iteration) if iteration else None
                yield ProfileFile(path=where, of=f"node {node}", iteration=at, opener=opener)
