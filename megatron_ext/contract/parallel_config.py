"""The keys of a plan as a user gives them: how the model and the batch are cut, and which node takes which part.

People write some of them as text, such as `2*3-1`, or leave them to a launch. plan.json has the numbers
(`megatron_ext.contract.plan.Content`), within the ranges that the keys have here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Dict, Iterable, Iterator, List, Optional, Tuple, Union

from megatron_ext.contract.keys import Get, Range, Word, option, shown
from megatron_ext.contract.schedule.schedules import DEFAULT, OF_ANY_COUNT, SCHEDULES, PipelineSchedule
from megatron_ext.contract.schedule.streams import Semantics

if TYPE_CHECKING:
    OneOrMany = Union[int, str]
    ZeroByStage = Optional[OneOrMany]
    Chosen = int
else:
    OneOrMany = ZeroByStage = Chosen = Any  # omegaconf 2.3 cannot merge a union into a part that has no value yet

MOST_RANKS = 2**17
"""The most ranks of a plan."""
NEEDED: Any = "???"
"""In the place of a default: users must give the key. This is Hydra's mark for it."""


class Schedule(Word):
    """In which order a stage takes its forward and backward passes (megatron_ext/contract/schedule/schedules.py)."""

    gpipe = "gpipe"
    """All forward, then all backward."""
    one_f_one_b = "one_f_one_b"
    """1F1B: one forward, one backward pass in turn. A stage holds at most one micro-batch more than there are stages
    after it."""
    interleaved = "interleaved"
    """Interleaved 1F1B over several chunks of the model per stage: a smaller bubble for more messages and memory."""
    zb_h1 = "zb_h1"
    """1F1B that computes weight gradients where it would wait (ZB-H1): a smaller bubble; no stage holds more than the
    first one."""
    model_parallel = "model_parallel"
    """No overlap: a micro-batch passes through all stages and back before the next one starts. Never the fastest."""
    pipedream = "pipedream"
    """1F1B without a flush: stages update their weights independently and keep older versions of them."""

    @property
    def definition(self) -> PipelineSchedule:
        """What it is: its actions, memory and bounds."""
        return SCHEDULES[self]

    @property
    def label(self) -> str:
        """Its name in the literature, for tables, sentences and pages; files keep the key."""
        return self.definition.label


class Recompute(str):
    """Which activations are computed again in the backward pass, to save their memory: `none`, `selective` (the
    attention's core), `full` (everything except each layer's input), or `full:3`, as `full` in the first three layers
    of each stage, or of each of its chunks; or one of these, but `selective`, for each stage: `full:3-none`. Equal
    texts are one object."""

    none: ClassVar[Recompute]
    selective: ClassVar[Recompute]
    full: ClassVar[Recompute]
    _known: ClassVar[Dict[str, Recompute]] = {}

    def __new__(cls, text: str) -> Recompute:
        """Raises ValueError, with the rule, for a text that is none of these."""
        found = cls._known.get(text)
        if found is None:
            ways: List[str] = []
            for item in text.split("-"):
                match = re.fullmatch(
                    r"(none|selective|full(?::[1-9][0-9]{0,5})?)(?:\*([1-9][0-9]{0,3}))?", item, re.ASCII
                )
                ways += [match[1]] * int(match[2] or 1) if match else [""]
            if "" in ways or ("selective" in ways and len({*ways}) > 1):
                raise ValueError(
                    "none, selective, full, or full:N for N layers of each stage, such as full:3, or one of them but "
                    "selective for each stage joined by dashes, such as full:3-none"
                )
            once = ways[0] if len({*ways}) == 1 else "-".join(ways)
            found = cls._known[str(text)] = super().__new__(cls, text) if once == text else cls(once)
        return found

    @property
    def stages(self) -> Tuple[Recompute, ...]:
        """What each stage does; where all do the same, that alone."""
        return tuple(map(Recompute, self.split("-")))

    def of_stage(self, stage: int) -> Recompute:
        """Return what a stage does."""
        return self.stages[stage] if "-" in self else self

    @property
    def way(self) -> Recompute:
        """What is done to a layer that is computed again: this text without a number of layers."""
        return Recompute.full if "-" in self else Recompute(self.partition(":")[0])

    @property
    def layers(self) -> Optional[int]:
        """How many layers of each stage are computed again; None: all, or with `none` none. Of several stages that
        differ each has its own."""
        assert "-" not in self, self
        number = self.partition(":")[2]
        return int(number) if number else None


Recompute.none, Recompute.selective, Recompute.full = map(Recompute, ("none", "selective", "full"))
RECOMPUTES = Recompute.none, Recompute.selective, Recompute.full
"""The ways, from the least to the most that is computed again."""
if TYPE_CHECKING:
    RecomputeText = Recompute
else:
    RecomputeText = str  # omegaconf knows no subclasses of str


class ReduceDtype(Word):
    """Number format in which replicas send each other gradients to sum; each adds up its own micro-batches in fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    """Half the bytes, for sums that are rounded to 8 bits, and 2 bytes of memory for a parameter."""


class Compress(Word):
    """In which form activations and their gradients go from stage to stage."""

    none = "none"
    """They are sent as they are."""
    int8 = "int8"
    """In 8 bits, with one scale in fp32 for each 256 numbers: about a quarter of the bytes of fp32."""


SCATTERS = ("false", "true", "auto")
"""The values of `Parallel.scatter_messages`; the first one is the default."""
BLOCK = 256
"""The numbers of a message that have one scale with `Compress.int8`."""
SCALE_BYTES = 4


def compressed_bytes(numbers: int) -> int:
    """Bytes of a message of so many numbers with `Compress.int8`: one for each, and a scale for each block."""
    return numbers + SCALE_BYTES * -(-numbers // BLOCK)


class Offload(Word):
    """What a rank keeps in its host's memory instead of its GPU's."""

    none = "none"
    optimizer = "optimizer"
    """The optimizer's state and its fp32 weights, which pass through the GPU piece by piece in each update."""
    activations = "activations"
    """What layers keep from the forward to the backward pass of a micro-batch; two layers of it are on the GPU."""
    both = "both"

    @property
    def takes_optimizer(self) -> bool:
        return self in (Offload.optimizer, Offload.both)

    @property
    def takes_activations(self) -> bool:
        return self in (Offload.activations, Offload.both)

    @classmethod
    def together(cls, ways: Iterable[Offload]) -> Offload:
        """Return what is kept there by any of several ranks."""
        every = {*ways} - {cls.none}
        return cls.both if len(every) > 1 else next(iter(every), cls.none)


if TYPE_CHECKING:
    OffloadByStage = Union[Offload, str]
else:
    OffloadByStage = str  # omegaconf would take no text for a word


def of_any_stage(value: object) -> List[str]:
    """List what a value says of any stage that is written once for all stages or stage by stage: `3*2-1` says 3 and
    1."""
    return [item.partition("*")[0].strip() for item in str(value).split("-")]


def largest_zero(value: object) -> int:
    """Return the largest stage of ZeRO that a value of `zero` has for any stage; 0 for none."""
    return 0 if value is None else max(map(int, of_any_stage(value)))


LEAST_OFFLOADED = 2**16
"""Bytes of an activation below which it stays on the GPU."""
PIECE = 2**22
"""Numbers of each part of an offloaded optimizer's state that come to the GPU together."""
SLOTS = 3
"""Pieces that are there at once: one on its way in, one that is updated, and one on its way back."""


class Shards(Word):
    """How large a part each replica of a stage keeps of what `zero` shares out."""

    equal = "equal"
    """All keep as much."""
    memory = "memory"
    """In proportion to the memory that is left on their GPUs, such as of 24 and of 80 GiB."""


BUCKET_BYTES = 16 * 2**20
"""Bytes of gradients that one message sums at least: large enough for bandwidth, small enough to overlap. A larger
matrix is a message of its own."""
BUCKETS_UNDER_WAY = 2
"""Buckets of gradients that a rank sums at once with `zero=2`; the next one waits for the first of them."""
SCATTERED = 2
"""The stage of ZeRO from which on a replica keeps the sums of its share of the gradients alone."""
GATHERED = 3
"""The stage of ZeRO in which it keeps its share of the weights alone, too."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Parallel:
    """The plan as a user gives it."""

    tensor: OneOrMany = option(1, Range(1, 1024))
    """Tensor parallel size: ranks that share the layers of a stage; one number, or one per stage, such as 4-4-2-2; with
    train.sync_every also by island, such as 1/2."""
    data: int = option(1, Range(1, MOST_RANKS))
    """Data parallel size: replicas of every stage."""
    pipeline: int = option(1, Range(1, 10_000))
    """Number of pipeline stages."""
    partition: Optional[str] = None
    """Transformer layers per stage, such as 0-11-8-8-8-8-5-0; null: as even as possible. With train.sync_every also by
    island, such as 6-6/12; parallel.pipeline is then the most stages of any.

    With several chunks: first the layers of every stage's chunk 0, then of chunk 1, and so on.
    """
    expert: int = option(1, Range(1, 1024))
    """Expert parallel size: replicas that share the experts of each layer out (model.experts), of parallel.data."""
    context: int = option(1, Range(1, 1024))
    """Context parallel size: ranks of each replica that share its sequences; each has two of 2 x `context` pieces, one
    from either end, and all keys and values in turn. For long sequences, with engine=megatron_core or megatron_lm."""
    sequence_parallel: bool = False
    """Sequence parallelism: split the sequence over the tensor group outside its parallel regions. Less memory, the
    same communication volume."""
    recompute: RecomputeText = Recompute.none
    """Which activations are computed again in the backward pass, to save their memory. `none`; `selective`: only the
    attention core; `full`: everything except each layer's input; `full:3`: the same in the first three layers of each
    stage, or of each of its chunks; `full:3-none`: by stage."""
    sharded_optimizer: bool = False
    """Each replica keeps only its share of the optimizer state: another name of `zero=1`."""
    zero: ZeroByStage = option(None, Range(0, 3))
    """What a replica keeps only its share of, by the stages of ZeRO. 1: the optimizer's state; 2: the sums of
    gradients, too, which replicas add up after each micro-batch; 3: the weights, too, which replicas gather block by
    block in each pass; 0: nothing; null: 1 with `sharded_optimizer`, else 0. One number, or one per stage, such as
    3-1."""
    shards: Shards = Shards.equal
    """How large a part each replica of a stage keeps of what `zero` or `sharded_optimizer` shares out. `memory`: in
    proportion to the memory that all else leaves on its GPU, where a stage lies on unlike GPUs."""
    offload: OffloadByStage = Offload.none
    """What ranks keep in their host's memory. `none`; `optimizer`: the optimizer's state and its fp32 weights, which
    pass through the GPU piece by piece in each update, 12 bytes a parameter less with 16-bit weights and Adam;
    `activations`: what layers keep for their backward passes, all but two layers of it; `both`. One word, or one per
    stage, such as optimizer-none."""
    reduce_dtype: ReduceDtype = ReduceDtype.fp32
    compress: Compress = Compress.none
    scatter_messages: str = SCATTERS[0]
    """Whether each rank of a tensor group sends its part of a message alone to the next stage, whose tensor group puts
    them together: `true` at every cut, `auto` at those where that is predicted to be faster, `false` at none."""
    hierarchical_reduce: bool = False
    """Sum a stage's gradients within each node first, and across nodes after, wherever its replicas lie evenly on
    several nodes, as many on each, and the links make that faster."""
    micro_batch_size: Chosen = option(1, Range(1, 2**20))
    """Samples that pass through the stages together; auto: a launch chooses the size with the fastest predicted
    iteration."""
    global_batch_size: int = option(NEEDED, Range(1, 2**20))
    """Samples per iteration, over all replicas."""
    schedule: Schedule = Schedule.one_f_one_b
    chunks: int = option(1, Range(1, 10_000))
    """Chunks of the model per stage, 2 or more with the schedule `interleaved`."""
    schedule_file: Optional[str] = None
    """File of your own schedule, which replaces `schedule` (docs/formats.md)."""
    replicas: Optional[str] = None
    """Replicas per stage, such as 15-1, which take micro-batches in turn; null: `data` replicas in every stage."""
    shares: Optional[str] = None
    """Proportions of micro-batches per replica, such as 3-1 or 3*4-1*4, for replicas on GPUs of different speed; auto:
    a launch chooses those with the fastest predicted iteration; null: all take the same number."""
    streams: Optional[str] = None
    """Copies of the model on each replica's GPU that share its weights and run micro-batches concurrently: one number,
    or one per replica, such as 3*4-1*4; auto: a launch chooses those with the fastest predicted iteration, from the
    measurements of `tdpp profile streams=…`; null: 1."""
    islands: Optional[str] = None
    """With train.sync_every: replicas of each island, in which gradients are summed in every iteration, such as 2-2 or
    1*4; null: each replica is an island."""
    semantics: Semantics = Semantics.stashing
    """With the schedule `pipedream`: which versions of the weights micro-batches use."""
    update_every: int = option(1, Range(1, 2**20))
    """With the schedule `pipedream`: rounds of a stage's replicas between two updates of its weights."""
    depth: Optional[str] = None
    """With the schedule `pipedream`: forward passes of each stage's replicas before their first backward pass, such as
    3-1-0; null: as many as keep all ranks busy."""
    node_order: Optional[str] = None
    """Node groups in the order of node ranks, such as hgx+gpu2*7; null: all nodes, in the cluster's order."""


def broken_by_replicas(get: Get, prefix: str, most: int) -> Iterator[str]:
    """Every rule broken by stages with different numbers of replicas, as a message.

    Args:
        get: the value of a key, or what it is to be where there is none.
        prefix: what stands before the keys in messages: `parallel.`, or nothing in plan.json.
        most: the replicas of the stage with the most.
    """
    wrong = f"{prefix}replicas={get('replicas', None)}"
    for key, allowed in (("shares", None), ("schedule_file", None), ("chunks", 1)):
        value = get(key, allowed)
        if value != allowed:
            yield (
                f"{prefix}{key}={value} cannot be combined with {wrong}: it needs the same number of replicas in every "
                f"stage; use {prefix}{key}={shown(allowed)}, or {prefix}replicas=null {prefix}data={most}"
            )
    name = get("schedule", DEFAULT)
    if SCHEDULES[name].has_chunks:
        *some, last = sorted(OF_ANY_COUNT)
        yield (
            f"{prefix}schedule={name} cannot be combined with {wrong}: it needs the same number of replicas in every "
            f"stage; use {', '.join(some)} or {last}"
        )


def broken_by_chunks(get: Get, prefix: str) -> Iterator[str]:
    """Every rule about the chunks of a stage that is broken; a schedule of one's own may have any number of them."""
    chunks, pipeline, name = get("chunks", 1), get("pipeline", 1), get("schedule", DEFAULT)
    several = SCHEDULES[name].has_chunks
    if chunks > 1 and pipeline == 1:
        yield (
            f"{prefix}chunks={chunks} needs {prefix}pipeline of at least 2, not {pipeline}: one stage holds the whole "
            f"model; use {prefix}chunks=1" + (f" and another {prefix}schedule, such as one_f_one_b" if several else "")
        )
    if get("schedule_file", None) is not None:
        return
    if several and chunks == 1:
        yield (
            f"{prefix}schedule={name} needs {prefix}chunks of at least 2, not {chunks}; use {prefix}chunks=2, or "
            f"{prefix}schedule=one_f_one_b"
        )
    if chunks > 1 and not several:
        yield (
            f"{prefix}chunks={chunks} needs {prefix}schedule=interleaved, but {name} has one chunk per stage; use "
            f"interleaved, or {prefix}chunks=1"
        )


def broken_by_stream(get: Get, prefix: str) -> Iterator[str]:
    """Every rule broken by what does not go with micro-batches that stream, where they do."""
    for key, allowed, why in (
        ("chunks", 1, "a stage has one part of the model"),
        ("shares", None, "replicas take micro-batches in turn"),
        ("sharded_optimizer", False, "each replica updates versions of its own"),
        ("offload", Offload.none, "each stage updates after every few micro-batches"),
    ):
        value = get(key, allowed)
        if value not in (None, allowed):
            yield (
                f"{prefix}{key}={shown(value)} cannot be combined with {prefix}schedule=pipedream, where {why}; use "
                f"{prefix}{key}={shown(allowed)}, or another schedule"
            )
