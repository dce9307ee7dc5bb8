"""A model of tdpp as a graph: what a partition counts and what leads from it to others, with the times of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from conf.schema.values.partition import Partition
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import layer_times
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.memory.amounts import StageMemory
from fasop.costs.memory.shared_state import parameter_bytes
from fasop.costs.memory.stages import stage_memory
from fasop.costs.network.links import within
from fasop.costs.roofline import Time
from fasop.costs.sizes import embedding_parameters, head_parameters, kind_parameters, shared_parameters
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.graphs.division import StageDivision
from fasop.graphs.graph import PART, Graph, Operator
from fasop.graphs.own.versioned_memory import ExtraMemory, VersionedMemory
from megatron_ext.contract.models.pieces import Wire
from megatron_ext.contract.parallel_config import Recompute, Schedule

FIRST, LAST = "first stage", "last stage"
"""Nodes of what these have beside their layers; no block is named with a blank."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What lies at one place (`megatron_ext.contract.models.pieces.Wire`)."""

    name: str
    description: str
    time: Time
    numel: int
    kept: float
    fixed: float

    def __add__(self, other: _Part) -> _Part:
        """Both, under the name of this one."""
        return _Part(
            name=self.name,
            description=f"{self.description} and {other.description}",
            time=Time(
                forward=self.time.forward + other.time.forward, backward=self.time.backward + other.time.backward
            ),
            numel=self.numel + other.numel,
            kept=self.kept + other.kept,
            fixed=self.fixed + other.fixed,
        )


def graph_of(training: Training, kind: NodeKind, *, together: bool = False) -> Graph:
    """A mini-batch is a micro-batch of `training`. Nodes come in the order of layers.

    A block that gives several wires to different ones has a node behind it for each of them, so that a cut sends no
    others. With `together` what the first and the last stage have beside their layers lies in the first and the last
    layer, for without a flush every stage has a layer.

    Raises:
        SearchError: the GPU's profile does not know the model.
    """
    parts, wires = _parts(training, kind), _wires(training)
    last = max(place for place, part in parts.items() if part.name != LAST)
    if together:
        for place, into in ((-1, 0), (last + 1, last)):
            if place in parts:
                parts[into] += parts.pop(place)
        wires = [
            Wire(max(wire.giver, 0), tuple(min(taker, last) for taker in wire.takers), wire.numbers) for wire in wires
        ]
    inputs: dict[int, list[str]] = {place: [] for place in parts}
    nodes: list[Operator] = []
    for place, part in parts.items():
        gives = [(takers, wire.numbers) for wire in wires if wire.giver == place and (takers := _others(wire, parts))]
        node = Operator(
            name=part.name,
            description=part.description,
            forward_ms=part.time.forward * 1e3,
            backward_ms=part.time.backward * 1e3,
            outputs=tuple(float(size) for _, size in gives) or (0.0,),
            parameter_bytes=part.numel * training.reduced_bytes,
            inputs=tuple(dict.fromkeys(inputs[place])),
            kept_bytes=part.kept,
            fixed_bytes=part.fixed,
        )
        nodes.append(node)
        apart = len({takers for takers, _ in gives}) > 1
        for number, (takers, size) in enumerate(gives):
            name = f"{part.name}[{number}]" if apart else part.name
            if apart:
                nodes.append(_result(name, number, node, size))
            for taker in takers:
                inputs[taker].append(name)
    return Graph(tuple(nodes))


def _others(wire: Wire, parts: Mapping[int, _Part]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(taker for taker in wire.takers if taker != wire.giver and taker in parts))


def _result(name: str, number: int, of: Operator, size: float) -> Operator:
    return Operator(
        name=name,
        description=f"{PART}({number})",
        forward_ms=0.0,
        backward_ms=0.0,
        outputs=(float(size),),
        parameter_bytes=0.0,
        inputs=(of.name,),
    )


def _wires(training: Training) -> list[Wire]:
    """A profile that does not know them has what crosses each cut, which a chain sends as well."""
    messages = training.messages
    return training.wires or [Wire(place - 1, (place,), size) for place, size in enumerate(messages)]


def _parts(training: Training, kind: NodeKind) -> dict[int, _Part]:
    """Map each place to its part, in their order."""
    model, blocks = training.model, training.blocks
    times = layer_times(kind.gpu, kind.profile, training, within(kind.group))
    parameters = kind_parameters(model, 1, own_word=True)
    parts: dict[int, _Part] = {}
    if blocks.first:
        parts[-1] = _Part(
            name=FIRST,
            description=_said(training, blocks.first),
            time=times.embedding,
            numel=embedding_parameters(model, 1),
            kept=_kept(training, blocks.first),
            fixed=_fixed(training, blocks.first),
        )
    for number, which in enumerate(blocks.sequence):
        kinds = blocks.kinds[which]
        parts[number] = _Part(
            name=blocks.names[number] if blocks.names else model.sized(1).block_name(number),
            description=_said(training, kinds),
            time=times.layers[which],
            numel=parameters[which],
            kept=_between(training, which).activations.layer,
            fixed=_fixed(training, kinds),
        )
    if blocks.last:
        parts[blocks.layers] = _Part(
            name=LAST,
            description=_said(training, blocks.last),
            time=times.head,
            numel=head_parameters(model, 1, own_word=True),
            kept=_kept(training, blocks.last),
            fixed=_fixed(training, blocks.last),
        )
    return parts


def _said(training: Training, kinds: Sequence[str]) -> str:
    """Kinds of blocks, which a measured model has by the names of blocks."""
    model = training.model
    return " ".join(model.block(name).kind for name in kinds) if isinstance(model, MeasuredModule) else " ".join(kinds)


def _kept(training: Training, kinds: Sequence[str]) -> float:
    """Bytes of a mini-batch of what the first or the last stage has beside its layers; of other families `held_of`
    counts them."""
    model, full = training.model, training.parallel.recompute is Recompute.full
    if not isinstance(model, MeasuredModule):
        return 0.0
    return sum((model.given if full else model.kept)(name, training.parallel.micro_batch_size) for name in kinds)


def _fixed(training: Training, kinds: Sequence[str]) -> float:
    model = training.model
    return float(sum(model.block(name).fixed_bytes for name in kinds)) if isinstance(model, MeasuredModule) else 0.0


def _between(training: Training, kind: int) -> StageMemory[float]:
    """Work out the memory of a stage between others."""
    return stage_memory(_of_stages(training, 3), 1.0, 1.0, kind)


def _of_stages(training: Training, stages: int) -> Training:
    plain = replace(
        training.parallel,
        pipeline=stages,
        chunks=1,
        schedule=Schedule.one_f_one_b,
        partition=None,
        replicas=None,
        node_order=None,
    )
    return replace(training, parallel=plain)


def held_of(training: Training) -> VersionedMemory:
    """Work out what stages hold by byte of a summed gradient; all as `fasop.costs.memory` predicts it of a run, but for
    what a GPU has anyway."""
    state, gradient = parameter_bytes(training), training.reduced_bytes
    measured = isinstance(training.model, MeasuredModule)
    received = float(max(training.crossing)) if measured else 0.0

    def beside(stages: int, stage: int) -> ExtraMemory:
        of_one, of_two = (stage_memory(_of_stages(training, stages), float(stage), n) for n in (1.0, 2.0))
        each = of_two.activations.fixed - of_one.activations.fixed
        once = of_one.activations.fixed - each + of_one.buffers.fixed + of_one.fragments.fixed
        ends = [(stage == 0, training.blocks.first), (stage == stages - 1, training.blocks.last)]
        known = sum(_kept(training, kinds) for there, kinds in ends if there) + received * (stage > 0)
        return ExtraMemory(once=once, each=each - known)

    return VersionedMemory(
        version=state.weight / gradient,
        once=(state.gradient + state.optimizer) / gradient,
        received=received,
        beside=(beside(3, 1), beside(3, 2), beside(3, 0), beside(1, 0)),
    )


def require_streaming(training: Training) -> None:
    """Raises SearchError for what does not train without a flush: parameters that blocks share, of which stages would
    have several versions, and for a number of layers that are computed again, which depends on the stage."""
    if training.parallel.recompute.layers is not None:
        raise SearchError(
            f"parallel.recompute={training.parallel.recompute}: this search counts with layers that are all alike; use "
            "full or none"
        )
    if shared_parameters(training.model, 1)[0]:
        raise SearchError(
            f"parallel.schedule=pipedream: blocks of {training.model.said} share parameters, which would get several "
            f"versions on stages that update without a flush; untie them, or search a schedule with a flush"
        )


def partition_of(division: StageDivision) -> Partition:
    """Layers by stage, of a graph of all `together`."""
    return Partition(tuple(sum(not node.is_part for node in stage.nodes) for stage in division.stages))


def plan_text(division: StageDivision, training: Training, command: str) -> str:
    """A file of the group `parallel`, which `tdpp launch` takes."""
    return "\n".join(
        [
            "# Found by: " + command.replace("\n", "\n# "),
            f"# Predicted: {division.pipeline_s * 1e3:.3f} ms per micro-batch in the steady state.",
            f"pipeline: {len(division.stages)}",
            f'partition: "{partition_of(division)}"',
            f'replicas: "{division.replicas}"',
            "schedule: pipedream",
            f"micro_batch_size: {training.parallel.micro_batch_size}",
            f"global_batch_size: {training.parallel.global_batch_size}",
            f'node_order: "{division.node_order}"',
            *([f"recompute: {recompute}"] if (recompute := training.parallel.recompute) is not Recompute.none else []),
            "",
        ]
    )
