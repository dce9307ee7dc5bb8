"""Profiles: what the parts of a model take on a GPU, and what messages take between such GPUs (docs/profile.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

from conf.errors import ConfigError
from conf.schema.cluster import Gpu
from conf.schema.engine import Engine, EngineKind
from conf.schema.model import Model
from conf.schema.values.ranges import MISSING, config
from fasop.costs.blocks import blocks_of
from fasop.costs.measured_module import LOSS, MeasuredModule
from fasop.costs.profiles.steps import (
    AllReduces,
    CollectiveTimes,
    Host,
    Room,
    Steps,
    check_all_reduces,
    check_buckets,
    check_collectives,
    check_hosts,
    check_steps,
)
from fasop.costs.sizes import ADAM_BYTES
from megatron_ext.contract.train_config import Precision

OTHER_16_BIT = {Precision.fp16: Precision.bf16, Precision.bf16: Precision.fp16}
"""Times of the one serve for the other, where nothing else tells them apart."""
USUAL = ("embedding", "layer", "head")
"""Kinds of blocks that most models have, and that have keys of their own."""
HELD = ("first", "last", "next")
"""Which stages may hold a block."""


@config
class Cost:
    """What one micro-batch takes on one rank. Times are medians, in milliseconds."""

    forward: float = MISSING
    backward: float = MISSING
    forward_spread: float | None = None
    """Half of the median's 95 % confidence interval, ms; null: not known."""
    backward_spread: float | None = None
    activation_bytes: int | None = None
    """What is kept from the forward to the backward pass."""


@config
class SequenceBytes:
    """Bytes of one micro-batch, by the blocks of a user's module in their order."""

    kept: list[int] = MISSING
    """That autograd keeps of each block, every storage once: with the block that made it."""
    given: list[int] = MISSING
    """That each block gives to others, and takes from the micro-batch."""
    crossing: list[int] = MISSING
    """That cross a cut behind so many blocks that a partition counts, from none to all, with what is handed on."""
    wires: list[int] = field(default_factory=list)
    """Bytes of each of the module's `wires`; empty: not known."""


@config
class ModelCosts:
    """Costs of a model's parts for one tensor size, micro-batch and number format."""

    model: str = MISSING
    """A key of the profile's `models` or `modules`."""
    tensor: int = MISSING
    micro_batch_size: int = MISSING
    precision: Precision = MISSING
    embedding: Cost | None = None
    layer: Cost | None = None
    head: Cost | None = None
    """Final norm, logits and loss."""
    blocks: dict[str, Cost] = field(default_factory=dict)
    """Costs of other kinds of blocks, by their names: a T5's `encoder` and `decoder`, and what lies between them."""
    sequence: SequenceBytes | None = None
    """What a user's module keeps and sends."""
    peak_bytes: int | None = None
    """Most that the allocator held at once, but for weights, gradients and optimizer, while embedding, `peak_layers`
    layers and head went forward and backward; null: not measured, as on a CPU."""
    peak_layers: int | None = None

    @property
    def parts(self) -> Mapping[str, Cost]:
        """Map each kind of block to its cost."""
        usual = {"embedding": self.embedding, "layer": self.layer, "head": self.head}
        return {**{name: cost for name, cost in usual.items() if cost is not None}, **self.blocks}

    @classmethod
    def of(cls, parts: Mapping[str, Cost], **values: Any) -> ModelCosts:
        """Make the costs of a model from blocks by kind."""
        others = {name: cost for name, cost in parts.items() if name not in USUAL}
        embedding, layer, head = map(parts.get, USUAL)
        return cls(embedding=embedding, layer=layer, head=head, blocks=others, **values)

    def __str__(self) -> str:
        return (
            f"model={self.model} parallel.tensor={self.tensor} parallel.micro_batch_size={self.micro_batch_size} "
            f"train.precision={self.precision}"
        )


COST_NOTHING = ("norm_epsilon", "rotary_base", "rotary_percent", "rope_scaling_factor", "decoder_layers")
"""Options of a model that change numbers, or how many layers there are, and no times."""


@config
class Shape:
    """What of a model decides the costs of its parts, whatever it is called and however many layers it has."""

    hidden: int = MISSING
    heads: int = MISSING
    sequence_length: int = MISSING
    vocab_size: int = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    """Those that are not GPT-2's and cost something, by their keys in `model`."""

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, model: Model) -> Shape:
        """Never changed: all that ask get the same one."""
        own = model.sized(1).own_options()
        return cls(
            hidden=model.hidden,
            heads=model.heads,
            sequence_length=model.sequence_length,
            vocab_size=model.vocab_size,
            options={key: value for key, value in own.items() if key not in COST_NOTHING},
        )


@config
class ModuleBlock:
    name: str = MISSING
    kind: str = MISSING
    """The name under which `ModelCosts.blocks` has its times."""
    parameters: int = MISSING
    fixed_bytes: int = 0
    """Bytes of what is not trained: buffers, and frozen parameters."""
    held: str | None = None
    """Where it lies if no partition counts it: `first` or `last` stage, or that of the `next` block."""


@config
class Module:
    """A user's module that was measured, or a model of another family whose blocks no formula describes."""

    code: str = MISSING
    """FILE.py:NAME, without folders; or the model's family."""
    digest: str = MISSING
    """SHA-256 of the file, or of what makes the model the one that it is."""
    capture: bool = False
    blocks: list[ModuleBlock] = MISSING
    """In their order."""
    wires: list[list[int]] = field(default_factory=list)
    """What leads from a block to others: where its giver lies, then its takers. Blocks that a partition counts lie at
    their numbers, those of the first stage at -1, those of the last one and the loss behind all; empty: not known."""
    tied_parameters: int = 0
    """That several blocks have copies of."""
    tied_blocks: int = 0
    """That have copies of one parameter, at most."""

    def is_of(self, model: Model, digest: str) -> bool:
        """Whether it is this module, whose file has such a content."""
        return (self.code, self.digest, self.capture) == (model.code_name, digest, model.capture)

    @property
    def counted(self) -> list[str]:
        """The names of the blocks that a partition counts."""
        return [block.name for block in self.blocks if block.held is None]


@config
class LinkTimes:
    """Microseconds by message size, and the latency and bandwidth fitted to them."""

    latency_us: float = MISSING
    gbit_per_s: float = MISSING
    """Bandwidth. Those of an all-reduce, latency and bandwidth, belong to each link of the ring that would take as
    long."""
    ranks: int = 2
    """That took part."""
    us_by_bytes: dict[int, float] = field(default_factory=dict)


@config
class Links:
    p2p: LinkTimes | None = None
    """A message one way. Between nodes all ranks of a node send at once: `gbit_per_s` is the node's, times a rank's."""
    all_reduce: LinkTimes | None = None


@config
class LayerProfile:
    """What was measured on one type of GPU."""

    gpu: str = MISSING
    source: str = MISSING
    """Where the figures come from."""
    date: str | None = None
    device: str | None = None
    """The GPU's name, which its driver gives."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the software that it was measured with."""
    engine: EngineKind | None = None
    """Whose layers and optimizer were measured; null: not known, and they serve for any."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """`engine.options` with which they were."""
    models: dict[str, Shape] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)
    """Users' modules, by name."""
    costs: list[ModelCosts] = field(default_factory=list)
    optimizer_ns_per_parameter: dict[Precision, float] = field(default_factory=dict)
    """Nanoseconds a parameter of a rank takes in the whole optimizer step; without: what the GPU's memory allows."""
    within: Links = field(default_factory=Links)
    """Between GPUs of a node."""
    between: Links = field(default_factory=Links)
    """From node to node."""
    collectives: list[CollectiveTimes] = field(default_factory=list)
    """Measured collectives, which take the place of what the links say of these operations."""
    steps: list[Steps] = field(default_factory=list)
    """Whole training steps with IIDP's or JABAS's engine (docs/iidp.md)."""
    buckets_mib: dict[str, list[float]] = field(default_factory=dict)
    """For each model, sizes of the buckets in which its gradients are summed, in the order of the backward pass."""
    room: list[Room] = field(default_factory=list)
    """How large a micro-batch may be, for each model and number format."""
    all_reduces: dict[str, AllReduces] = field(default_factory=dict)
    """`within` a node and `between` nodes, of a cluster on which steps were measured."""
    links: dict[str, Any] = field(default_factory=dict)
    """Between groups of nodes of the cluster that was measured, as `cluster.links` has them."""
    hosts: dict[str, Host] = field(default_factory=dict)
    """Hosts of which steps were measured, by name."""

    def __post_init__(self) -> None:
        _check(self)

    def points(self, model: Model, precision: Precision) -> list[ModelCosts]:
        """All costs of a model of this shape in this number format; none if it was not measured."""
        names = self.names(model)
        kinds = set(blocks_of(model).every_kind) if names & self.models.keys() else set()
        return [
            costs
            for costs in self.costs
            if costs.model in names and costs.precision is precision and kinds <= costs.parts.keys()
        ]

    def is_of(self, engine: Engine) -> bool:
        """Whether it has times of the layers that an engine trains. Megatron-LM's are Megatron-Core's."""
        if self.engine is None:
            return True
        ours, theirs = (EngineKind.tdpp is kind for kind in (self.engine, engine.kind))
        return ours is theirs and self.engine_options == engine.options

    def names(self, model: Model) -> set[str]:
        """Those of models of this shape, or of this module."""
        if isinstance(model, MeasuredModule):
            return {name for name, module in self.modules.items() if module.is_of(model, model.digest)}
        return {name for name, shape in self.models.items() if shape == Shape.of(model)}

    def unlike(self, model: Model) -> list[str]:
        """In words, in which keys the model of this name is another one; none where the profile has none."""
        if isinstance(model, MeasuredModule) or (known := self.models.get(model.name)) is None:
            return []
        theirs, own = ({**vars(shape), **shape.options} for shape in (known, Shape.of(model)))
        keys = [key for key in {**theirs, **own} if key != "options" and theirs.get(key) != own.get(key)]
        return [f"model.{key}={theirs.get(key, 'the default')}" for key in keys]

    def room_for(self, model: Model, precision: Precision) -> int | None:
        """The largest micro-batch that was trained with the whole of a model of this shape; None: not tried."""
        names = self.names(model)
        alike = [one for one in self.room if one.model in names and one.precision is precision]
        return alike[0].micro_batch_size if alike else None

    def precisions(self, model: Model) -> list[Precision]:
        """The number formats in which a model of this shape was measured."""
        return [precision for precision in Precision if self.points(model, precision)]


def optimizer_s_per_parameter(gpu: Gpu, profile: LayerProfile | None, precision: Precision) -> float:
    """Return the seconds of an optimizer step as measured, in this number format or in the other one of 16 bits, of
    which a step moves as many bytes; or by the memory traffic of Adam, a lower bound."""
    known = {} if profile is None else profile.optimizer_ns_per_parameter
    for measured in (precision, OTHER_16_BIT.get(precision)):
        if measured in known:
            return known[measured] * 1e-9
    return ADAM_BYTES[precision] / (gpu.memory_gb_per_s * 1e9)


def _check(profile: LayerProfile) -> None:
    """Raises ConfigError for the first figure that cannot be."""
    for model, shape in profile.models.items():
        for key in ("hidden", "heads", "sequence_length", "vocab_size"):
            if getattr(shape, key) < 1:
                raise ConfigError(f"models.{model}.{key}={getattr(shape, key)} must be at least 1")
    for name, module in profile.modules.items():
        _possible_module(name, module)
    if not profile.costs and not profile.steps and not profile.collectives:
        raise ConfigError(f"costs of {profile.gpu} is empty: a profile needs the times of at least one model")
    for costs in profile.costs:
        _possible(costs)
        if costs.model in profile.modules:
            _of_module(costs, profile.modules[costs.model])
        elif costs.model not in profile.models:
            raise ConfigError(
                f"costs are for model {costs.model}, but models has no such key; set hidden, heads, sequence_length "
                f"and vocab_size in models.{costs.model}"
            )
    _distinct(profile.costs)
    check_steps(profile.steps)
    check_buckets(profile.buckets_mib)
    check_all_reduces(profile.all_reduces)
    check_hosts(profile.hosts)
    check_collectives(profile.collectives)
    for precision, nanoseconds in profile.optimizer_ns_per_parameter.items():
        if not (math.isfinite(nanoseconds) and nanoseconds > 0):
            raise ConfigError(f"optimizer_ns_per_parameter.{precision}={nanoseconds} must be above 0 nanoseconds")
    for place, links in (("within", profile.within), ("between", profile.between)):
        for kind, times in (("p2p", links.p2p), ("all_reduce", links.all_reduce)):
            if times is not None:
                _possible_link(f"{place}.{kind}", times)


def _possible(costs: ModelCosts) -> None:
    """Each figure by itself."""
    for name in USUAL if not costs.blocks else ():
        if name not in costs.parts:
            raise ConfigError(f"{costs}: {name} is not set, and blocks has no other kinds (docs/profile.md)")
    for key in ("tensor", "micro_batch_size"):
        if getattr(costs, key) < 1:
            raise ConfigError(f"{costs}: {key} must be at least 1")
    for name, part in costs.parts.items():
        for key in ("forward", "backward"):
            ms = getattr(part, key)
            if not (math.isfinite(ms) and ms > 0):
                raise ConfigError(f"{costs}: {name}.{key}={ms} must be above 0 milliseconds")
        for key in ("forward_spread", "backward_spread", "activation_bytes"):
            value = getattr(part, key)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{costs}: {name}.{key}={value} must be at least 0, or null if unknown")
    if costs.peak_bytes is not None and costs.peak_bytes < 0:
        raise ConfigError(f"{costs}: peak_bytes={costs.peak_bytes} must be at least 0, or null")


def _of_module(costs: ModelCosts, module: Module) -> None:
    """Raises ConfigError if a module's costs are not those of its blocks."""
    if costs.tensor != 1:
        raise ConfigError(f"{costs}: tensor must be 1 for a module")
    kinds = dict.fromkeys([*(block.kind for block in module.blocks), LOSS])
    if lacking := [kind for kind in kinds if kind not in costs.parts]:
        raise ConfigError(f"{costs}: blocks has no times of kind {lacking[0]}, which modules.{costs.model}.blocks has")
    if costs.sequence is None:
        raise ConfigError(f"{costs}: sequence is not set; give the bytes of each of modules.{costs.model}.blocks")
    blocks = len(module.blocks)
    lengths = {"kept": blocks, "given": blocks, "crossing": len(module.counted) + 1, "wires": len(module.wires)}
    for key, length in lengths.items():
        values = getattr(costs.sequence, key)
        if (key, values) != ("wires", []) and (len(values) != length or min(values, default=0) < 0):
            raise ConfigError(f"{costs}: sequence.{key} must be {length} numbers of bytes, for modules.{costs.model}")


def _possible_module(name: str, module: Module) -> None:
    if not module.counted:
        raise ConfigError(f"modules.{name}.blocks must have a block that a partition counts")
    for number, block in enumerate(module.blocks):
        if block.held not in (None, *HELD):
            raise ConfigError(f"modules.{name}.blocks[{number}].held={block.held} must be one of {', '.join(HELD)}")
        if block.parameters < 0 or block.fixed_bytes < 0:
            raise ConfigError(f"modules.{name}.blocks[{number}] must have parameters and fixed_bytes of at least 0")
    for number, ends in enumerate(module.wires):
        giver, *takers = ends or [-2]
        if not takers or not -1 <= giver < min(takers) or max(takers) > len(module.counted):
            raise ConfigError(
                f"modules.{name}.wires[{number}]={ends} must be the position of the sender, at least -1, followed by "
                f"the positions of receivers behind it, up to {len(module.counted)}"
            )


def _distinct(every: Sequence[ModelCosts]) -> None:
    seen = set()
    for costs in every:
        key = str(costs)
        if key in seen:
            raise ConfigError(f"{costs} occurs twice; keep one of them")
        seen.add(key)


def _possible_link(name: str, times: LinkTimes) -> None:
    if not (math.isfinite(times.latency_us) and times.latency_us >= 0):
        raise ConfigError(f"{name}.latency_us={times.latency_us} must be at least 0")
    if not (math.isfinite(times.gbit_per_s) and times.gbit_per_s > 0):
        raise ConfigError(f"{name}.gbit_per_s={times.gbit_per_s} must be above 0")
    if times.ranks < 2:
        raise ConfigError(f"{name}.ranks={times.ranks} must be at least 2")
    for size, us in times.us_by_bytes.items():
        if not (size > 0 and math.isfinite(us) and us > 0):
            raise ConfigError(f"{name}.us_by_bytes: {size}: {us} must be above 0, both")
