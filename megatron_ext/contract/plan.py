"""`plan.json`, typed: one run, for the ranks and for whoever looks at it (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_json
from megatron_ext.contract.keys import left_out
from megatron_ext.contract.layout import Layout, PlacedPlan, stage_name
from megatron_ext.contract.models.pieces import in_words
from megatron_ext.contract.parallel_config import Offload
from megatron_ext.contract.plan_check import PlanFault, build
from megatron_ext.contract.plan_content import EVEN, SINCE_VERSION_2, VERSION, Content, check_plan
from megatron_ext.contract.plan_parts import Node, Place
from megatron_ext.contract.rules.engine import TDPP
from megatron_ext.contract.run_files import PLANS, RunFiles
from megatron_ext.contract.schedule.iteration import dealt_to
from megatron_ext.contract.schedule.streams import Stream


@dataclass(frozen=True)
class StageOfRun:
    """A stage of a run; where islands have plans of their own, of one of these."""

    name: str
    """Its number, and that of its island: `0`, or `0 of island 1`."""
    plan: Plan
    """The plan that it is of."""
    number: int
    """In that plan."""
    ranks: List[int]


@dataclass(frozen=True)
class Plan(PlacedPlan, Content):
    """One run."""

    folder: Path
    """Where its plan.json lies: the run folder."""
    engine: str = TDPP
    whole: Optional[Plan] = None
    """The run's, of which this is the plan of an island (`of_island`); None: this is the run's."""
    part: Optional[Layout] = None
    """The ranks of that island."""

    @property
    def resumable(self) -> bool:
        """Whether the run leaves checkpoints from which it goes on when it is started again."""
        return self.train.checkpoint and self.rehearsal is None

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Reads plan.json for a rank, which needs every key. Raises EngineError: the file is not a plan that this
        engine understands; the message has the key, its value and the rule."""
        content = read_json(path, EngineError, "cannot be read as a plan")
        try:
            check_plan(content, whole=True)
        except PlanFault as fault:
            raise EngineError(f"{path}: {fault}") from fault
        folder = path.absolute().parent
        return cls.of(content, folder.parent if folder.name == PLANS else folder)

    @classmethod
    def parse(cls, content: Mapping[str, Any], folder: Path) -> Plan:
        """The plan of a run for whoever looks at it, from JSON with all of `KEYS`.

        A plan of another version of tdpp may lack other keys.

        Raises:
            PlanFault: it breaks a rule.
        """
        check_plan(content, whole=False)
        return cls.of(content, folder)

    @classmethod
    def of(cls, content: Mapping[str, Any], folder: Path) -> Plan:
        """What is known of a plan; numbers that `content` lacks are 0, names and lists are empty."""
        return cls(**vars(build(Content, content)), folder=folder, engine=content.get("engine", TDPP))

    def as_json(self) -> Dict[str, Any]:
        """The content of plan.json; of the model's options, those that are not GPT-2's."""
        even = all(getattr(self, key) is None for key in SINCE_VERSION_2)
        content = {"version": EVEN if even else VERSION, **_written(self)}
        del content["folder"]  # and of an island none is written
        for key in self.model.traits.lacks:
            del content["model"][key]
        return content

    @property
    def files(self) -> RunFiles:
        """The files of the run."""
        return RunFiles(self.folder)

    @cached_property
    def layout(self) -> Layout:
        """Where ranks stand."""
        if self.part is not None:
            return self.part
        if self.island_plans is not None:
            own = zip(self.island_plans, self.islands or ())
            return Layout.joined([Layout(tuple(one.tensors), (size,) * one.pipeline) for one, size in own])
        grid = Layout.grid(self.tensor, self.data, self.pipeline)
        replicas = tuple(self.replicas or grid.replicas)
        return Layout(tuple(self.tensors or grid.tensors), replicas, tuple(self.islands or ()))

    def of_island(self, place: Place) -> Plan:
        """Return the plan of the island in which a rank is: this one, where all islands are cut alike.

        Replicas and micro-batches have the numbers that they have in the run.
        """
        return next(own for own in reversed(self.by_island) if place.dp >= own.layout.start)

    @cached_property
    def stages(self) -> Sequence[StageOfRun]:
        """Every stage, island by island where these have plans of their own."""
        one_each = self.island_plans is not None
        ranks: Dict[Tuple[int, int], List[int]] = {}
        for place in self.ranks:
            ranks.setdefault((self.of_island(place).layout.start, place.stage), []).append(place.rank)
        return [
            StageOfRun(
                stage_name(stage, island if one_each else None), own, stage, ranks.get((own.layout.start, stage), [])
            )
            for island, own in enumerate(self.by_island)
            for stage in range(own.pipeline)
        ]

    @cached_property
    def by_island(self) -> Sequence[Plan]:
        """The plan of each island that has its own; else this one alone."""
        return [
            replace(
                self,
                tensor=max(own.tensors),
                tensors=own.tensors if len({*own.tensors}) > 1 else None,
                pipeline=own.pipeline,
                partition=own.partition,
                shares=[*self.micro_batches],
                island_plans=None,
                whole=self,
                part=part,
            )
            for own, part in zip(self.island_plans or (), self.layout.parts)
        ] or [self]

    @cached_property
    def stream(self) -> Optional[Stream]:
        """How micro-batches stream through the stages; None where each iteration flushes them."""
        if self.streaming is None:
            return None
        depth = None if self.streaming.depth is None else tuple(self.streaming.depth)
        return Stream(self.layout.replicas, self.streaming.semantics, self.streaming.update_every, depth)

    def proportions(self, stage: int) -> List[int]:
        """Return the proportions in which the replicas of a stage keep what they share out."""
        return [1] * self.layout.replicas[stage] if self.shards is None else self.shards[stage]

    def zero_of(self, stage: int) -> int:
        """Return what the replicas of a stage keep a share of, as a stage of ZeRO."""
        return (self.zero or int(self.sharded_optimizer)) if self.zeros is None else self.zeros[stage]

    def offload_of(self, stage: int) -> Offload:
        """Return what the ranks of a stage keep in the host's memory."""
        return (self.offload or Offload.none) if self.offloads is None else self.offloads[stage]

    def copies_in_model_group(self, stage: int) -> int:
        """Return how many ranks of a `Layout.model_groups` have the same gradients of this stage's weights."""
        once = self.zero_of(stage) > 0 if self.sharded_optimizer else self.layout.even
        return 1 if once else self.layout.replicas[stage]

    @property
    def by_node(self) -> List[List[List[int]]]:
        """The data groups of `hierarchical_stages`, each by node: those that lie evenly on several nodes."""
        found: List[List[List[int]]] = []
        for group in self.layout.data_groups() if self.hierarchical_stages else ():
            stage, _, _ = self.layout.stage_dp_tp(group[0])
            if stage not in (self.hierarchical_stages or ()):
                continue
            of_nodes: Dict[int, List[int]] = {}
            for rank in group:
                of_nodes.setdefault(self.ranks[rank].node, []).append(rank)
            counts = {len(ranks) for ranks in of_nodes.values()}
            if len(of_nodes) > 1 and len(counts) == 1 and counts != {1}:
                found.append(list(of_nodes.values()))
        return found

    @property
    def micro_batches(self) -> Sequence[int]:
        """Micro-batches of each replica in one iteration, in a stage that has the most; 0 where a log does not say."""
        if self.shares is not None:
            return self.shares
        if self.replicas is not None or self.streaming is not None:
            count = self.global_batch_size // self.micro_batch_size
            return [len(range(replica, count, self.data)) for replica in range(self.data)]
        step = self.taking * self.micro_batch_size
        return [self.global_batch_size // step if step else 0] * self.taking

    @property
    def taking(self) -> int:
        """Replicas that take micro-batches of their own: ranks that share sequences take the same ones."""
        return self.data // (self.context or 1)

    @property
    def sizes(self) -> Dict[str, str]:
        """In words, `tensor`, `data` and `pipeline`: one number, or one by stage where stages differ, and by island."""
        if self.island_plans is not None:
            tensors = ["-".join(map(str, own.tensors or [own.tensor])) for own in self.by_island]
            data, pipelines = "/".join(map(str, self.islands or ())), [str(own.pipeline) for own in self.by_island]
            return {"tensor": "/".join(tensors), "data": data, "pipeline": "/".join(pipelines)}
        return {
            "tensor": "-".join(map(str, self.tensors or [self.tensor])),
            "data": "-".join(map(str, self.replicas or [self.data])),
            "pipeline": str(self.pipeline),
        }

    @property
    def micro_batch_numbers(self) -> int:
        """How many numbers the actions of a rank give micro-batches at most: those of a replica, or of all of them."""
        if self.replicas is not None or self.streaming is not None:
            return self.global_batch_size // self.micro_batch_size
        return max(self.micro_batches, default=0)

    def taken_by(self, stage: int, dp: int) -> Sequence[int]:
        """The numbers of a replica's micro-batches among those of the iteration, rising."""
        if self.replicas is not None or self.streaming is not None:
            return range(dp, self.global_batch_size // self.micro_batch_size, self.layout.replicas[stage])
        return dealt_to(dp // (self.context or 1), tuple(self.micro_batches))

    @property
    def node_names(self) -> List[str]:
        """Names of the nodes that the run has, by node rank."""
        return [node.name for node in self.nodes]

    @property
    def used(self) -> List[int]:
        """Node ranks of the nodes that take part: all, but in an elastic run."""
        return [node_rank for node_rank, node in enumerate(self.nodes) if node.ranks or self.elastic is None]

    @property
    def planned_nodes(self) -> Sequence[Node]:
        """The nodes whose times the run has: its own, or those that it rehearses."""
        return self.rehearsal.nodes if self.rehearsal else [self.nodes[node_rank] for node_rank in self.used]

    def node_of(self, rank: int) -> str:
        """Name of the node that a rank runs on or, in a rehearsal, stands for."""
        place = self.ranks[rank]
        return place.emulates or self.nodes[place.node].name

    def layers_of(self, virtual_stage: int) -> range:
        """Global numbers of the transformer layers of a virtual stage."""
        first = sum(self.partition[:virtual_stage])
        return range(first, first + self.partition[virtual_stage])

    def named(self, virtual_stage: int) -> str:
        """The counted blocks of a virtual stage by their names, in few words; empty if it has none."""
        names = [
            self.model.block_name(n) if self.blocks is None else self.blocks[n] for n in self.layers_of(virtual_stage)
        ]
        return in_words(names)


def _written(value: Any) -> Any:
    """A dataclass as JSON, without keys that plan.json leaves out."""
    if isinstance(value, (list, tuple)):
        return [_written(item) for item in value]
    if not is_dataclass(value):
        return value
    without = left_out(type(value))
    content = ((each.name, getattr(value, each.name)) for each in fields(value))
    return {name: _written(own) for name, own in content if name not in without or own != without[name]}
