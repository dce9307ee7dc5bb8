"""How the model and the batch are cut, and which node takes which part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

from conf.errors import ConfigError, reworded
from conf.schema.values import ranges
from conf.schema.values.islands import BY_ISLAND, check_with_own_plans, own_plans
from conf.schema.values.partition import (
    AUTO,
    Shares,
    by_replica,
    check_depth,
    depth_in,
    numbers_in,
    run_length_text,
    stages_in,
)
from conf.schema.values.ranges import config
from conf.visible import plural
from megatron_ext.contract import parallel_config
from megatron_ext.contract.keys import ranges_of, shown
from megatron_ext.contract.layout import Layout, PlacedPlan
from megatron_ext.contract.parallel_config import (
    GATHERED,
    SCATTERED,
    SCATTERS,
    Offload,
    Recompute,
    broken_by_chunks,
    broken_by_replicas,
    broken_by_stream,
)
from megatron_ext.contract.schedule.streams import Stream

ZERO, WORD = "[0-3]", "[a-z]+"
"""What a value of `zero` and one of `offload` are, as regular expressions."""
ONE_OR_BY_STAGE = "{}, or one of them for each stage joined by dashes, with *N for a run of N stages, such as {}"


@config
class Parallel(PlacedPlan, parallel_config.Parallel):
    """The plan: how the model and the batch are cut, and which node takes which part."""

    def __post_init__(self) -> None:
        if self.has_own_plans:
            check_with_own_plans(partial(getattr, self))
        with reworded(ConfigError, f"parallel.recompute={self.recompute} must be ", of=ValueError):
            way = Recompute(self.recompute)
            _once_or_by_stage(self, "recompute", str(self.recompute), "[a-z:0-9]+", "", "")
            object.__setattr__(self, "recompute", way)
        words = [word.value for word in Offload]
        text = _once_or_by_stage(self, "offload", str(self.offload), WORD, ", ".join(words), "both*2-none", words)
        object.__setattr__(self, "offload", Offload(text) if text in words else text)
        _read_zero(self)
        _read_scatter(self)
        ranges.check("parallel", self)
        _check_auto(self)
        for key in ("replicas", "shares", "streams", "islands", "schedule_file"):
            if self.context > 1 and getattr(self, key) is not None:
                raise ConfigError(
                    f"parallel.{key}={getattr(self, key)} cannot be combined with parallel.context={self.context}; "
                    f"use parallel.{key}=null, or parallel.context=1"
                )
        if not self.own_plans:  # each of which is checked by itself
            _check_by_stage(self)
        _check_islands(self)
        if not self.undecided:
            _check_shares(self)
            _check_batch(self)
        for broken in broken_by_chunks(partial(getattr, self), "parallel."):
            raise ConfigError(broken)
        _check_stream(self)
        _check_gpu_streams(self)

    @property
    def undecided(self) -> tuple[str, ...]:
        """The keys whose values are still to be chosen."""
        return tuple(key for key in ("micro_batch_size", "shares", "streams") if getattr(self, key) == AUTO)

    @property
    def stream(self) -> Stream | None:
        """How micro-batches stream through the stages; None with a schedule that flushes."""
        if self.schedule.definition.flushes or self.schedule_file is not None:
            return None
        depth = None if self.depth is None else depth_in(self.depth)
        return Stream(self.layout.replicas, self.semantics, self.update_every, depth)

    @property
    def streams_of(self) -> tuple[int, ...]:
        """Copies of the model on a GPU, by replica."""
        return by_replica(self.streams, self.layout.replicas[0])

    @property
    def islands_of(self) -> tuple[int, ...]:
        """Replicas of each island, where there are islands."""
        return (1,) * self.first_replicas if self.islands is None else numbers_in(self.islands)

    @property
    def first_replicas(self) -> int:
        """Replicas of the first stage."""
        return self.data * self.context if self.replicas is None else self.layout.replicas[0]

    @property
    def has_own_plans(self) -> bool:
        """Whether tensor sizes or layers are written island by island."""
        return BY_ISLAND in f"{self.tensor}{self.partition}"

    @cached_property
    def own_plans(self) -> tuple[Parallel, ...]:
        """The plan of each island by itself, where it has its own."""
        if not self.has_own_plans:
            return ()
        _check_islands(self)
        _check_shares(self)
        return own_plans(self, self.islands_of)

    @property
    def layout(self) -> Layout:
        """Where ranks stand."""
        if self.own_plans:
            return Layout.joined([own.layout for own in self.own_plans])
        tensors = (self.tensor,) * self.pipeline if isinstance(self.tensor, int) else numbers_in(self.tensor)
        replicas = (self.data * self.context,) * self.pipeline if self.replicas is None else numbers_in(self.replicas)
        return Layout(tensors, replicas)

    @property
    def zeros(self) -> tuple[int, ...]:
        """What the replicas of each stage keep a share of, as a stage of ZeRO."""
        if isinstance(self.zero, str):
            return tuple(map(int, stages_in(self.zero, ZERO)))
        return (self.zero or int(self.sharded_optimizer),) * self.pipeline

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """What the ranks of each stage keep in their host's memory."""
        if isinstance(self.offload, Offload):
            return (self.offload,) * self.pipeline
        return tuple(map(Offload, stages_in(self.offload, WORD)))

    @property
    def by_stage(self) -> bool:
        """Whether tensor sizes or replicas are written stage by stage."""
        return not isinstance(self.tensor, int) or self.replicas is not None

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a replica runs in an iteration; where replicas differ, the most."""
        if self.shares:
            return max(self.micro_batches_of)
        layout = self.layout  # made anew each time, and searches ask for thousands of plans
        if not layout.even or not self.schedule.definition.flushes:
            return -(-self.global_batch_size // self.micro_batch_size // min(layout.replicas))
        return self.global_batch_size // (layout.replicas[0] // self.context * self.micro_batch_size)

    @property
    def micro_batches_of(self) -> tuple[int, ...]:
        """Micro-batches of each replica, where all stages have as many replicas."""
        shares = Shares.parse(self.shares) if self.shares else Shares((1,) * (self.layout.replicas[0] // self.context))
        return shares.of(self.global_batch_size // self.micro_batch_size)

    @property
    def sizes(self) -> str:
        """The product, or sum of products, that is the number of ranks, in words."""
        layout = self.layout
        if self.own_plans:
            return " + ".join(f"({own.sizes})" for own in self.own_plans)
        if self.alike:
            sizes = {"tensor": self.tensor_size, "data": layout.replicas[0] // self.context, "pipeline": self.pipeline}
            sizes |= {"context": self.context} if self.context > 1 else {}
            return f"{' * '.join(f'parallel.{key}' for key in sizes)} = {' * '.join(map(str, sizes.values()))}"
        products = " + ".join(f"{t} * {r}" for t, r in zip(layout.tensors, layout.replicas, strict=True))
        return f"tensor size * replicas, stage by stage, = {products}"


def _read_zero(parallel: Parallel) -> None:
    """Makes what `zero` and `sharded_optimizer` have in common one value; `zero` then is that of plan.json."""
    zero = parallel.zero
    if zero == 0 and parallel.sharded_optimizer:
        raise ConfigError(
            "parallel.zero=0 cannot be combined with parallel.sharded_optimizer=true, which is parallel.zero=1; leave "
            "one of them out"
        )
    if isinstance(zero, str):
        zero = _once_or_by_stage(parallel, "zero", zero, ZERO, "0, 1, 2 or 3", "3*2-1")
        zero = int(zero) if zero.isdecimal() else zero
        object.__setattr__(parallel, "zero", zero)
    if isinstance(zero, str):
        object.__setattr__(parallel, "sharded_optimizer", True)  # of some stages, for not all have 0
    elif type(zero) is int and 0 <= zero <= GATHERED:
        object.__setattr__(parallel, "sharded_optimizer", zero >= 1)
        object.__setattr__(parallel, "zero", zero if zero >= SCATTERED else None)
    elif zero is not None and type(zero) is not int:
        raise ConfigError(f"parallel.zero={zero} must be {ONE_OR_BY_STAGE.format('0, 1, 2 or 3', '3*2-1')}")


def _once_or_by_stage(
    parallel: Parallel, key: str, text: str, item: str, allowed: str, like: str, words: Sequence[str] = ()
) -> str:
    """A value that is written once or by stage: the one that all stages have, or the shortest text by stage.

    Args:
        item: the regular expression of a value.
        allowed: the values, in words.
        like: an example by stage.
        words: the values, where not all that `item` allows is one.
    """
    try:
        found = stages_in(text, item)
    except ValueError:
        found = ()
    if not found or (words and not {*found} <= {*words}):
        raise ConfigError(f"parallel.{key}={text} must be {ONE_OR_BY_STAGE.format(allowed, like)}")
    if len(found) > 1 and len(found) != parallel.pipeline:
        fitted = (*found, *[found[-1]] * parallel.pipeline)[: parallel.pipeline]
        raise ConfigError(
            f"parallel.{key}={text} is for {plural(len(found), 'stage')}, but parallel.pipeline={parallel.pipeline}; "
            f"use parallel.pipeline={len(found)}, or parallel.{key}={run_length_text(fitted, '-')}"
        )
    return found[0] if len({*found}) == 1 else run_length_text(found, "-")


def _read_scatter(parallel: Parallel) -> None:
    """Makes `scatter_messages` one of its words, which YAML reads as true and false."""
    value = str(parallel.scatter_messages).lower()
    object.__setattr__(parallel, "scatter_messages", value)
    if value not in SCATTERS:
        raise ConfigError(f"parallel.scatter_messages={value} must be one of {', '.join(SCATTERS)}")
    if value != "true":
        return
    tensors = parallel.layout.tensors
    why = None
    if parallel.pipeline == 1 or max(tensors) == 1:
        why = "needs parallel.tensor and parallel.pipeline of at least 2: no tensor group sends a message"
    elif len({*tensors}) > 1:
        why = f"needs one parallel.tensor for all stages, not {parallel.tensor}, whose ranks have no parts in common"
    elif parallel.sequence_parallel:
        why = "cannot be combined with parallel.sequence_parallel=true, where each rank has and sends its part alone"
    if why is not None:
        raise ConfigError(f"parallel.scatter_messages=true {why}; use auto, which does it where it helps, or false")


def _check_auto(parallel: Parallel) -> None:
    size: object = parallel.micro_batch_size
    if size != AUTO and type(size) is not int:
        raise ConfigError(f"parallel.micro_batch_size={size} must be a whole number or auto")
    if parallel.undecided and parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.{parallel.undecided[0]}=auto cannot be combined with "
            f"parallel.schedule_file={parallel.schedule_file}, "
            "which is for a fixed number of micro-batches; use a named parallel.schedule"
        )


def _check_by_stage(parallel: Parallel) -> None:
    """What is written stage by stage."""
    stages = parallel.pipeline
    for key, value, one in (("tensor", parallel.tensor, "2"), ("replicas", parallel.replicas, "3")):
        if type(value) is int or (value is None and key == "replicas"):
            continue
        wrong = f"parallel.{key}={value}"
        try:
            numbers = numbers_in(value) if isinstance(value, str) else ()
        except ValueError:
            numbers = ()
        if not numbers:
            raise ConfigError(
                f"{wrong} must be {'a whole number, or ' if key == 'tensor' else ''}whole numbers by stage joined by "
                f"dashes, with *N for a run of N stages, such as {one}-1 or {one}*2-1*4"
            )
        for number in numbers:
            ranges.check_number(f"parallel.{key}", number, ranges_of(Parallel)["tensor" if key == "tensor" else "data"])
        if len(numbers) != stages:
            fitted = (*numbers, *[numbers[-1]] * stages)[:stages]
            raise ConfigError(
                f"{wrong} is for {plural(len(numbers), 'stage')}, but parallel.pipeline={stages}; use "
                f"parallel.pipeline={len(numbers)}, or parallel.{key}={run_length_text(fitted, '-')}"
            )
    if not parallel.layout.even:
        _check_unequal_replicas(parallel)


def _check_unequal_replicas(parallel: Parallel) -> None:
    wrong, largest = f"parallel.replicas={parallel.replicas}", max(parallel.layout.replicas)
    for broken in broken_by_replicas(partial(getattr, parallel), "parallel.", largest):
        raise ConfigError(broken)
    if parallel.undecided:
        return
    size, batch = parallel.micro_batch_size, parallel.global_batch_size
    if batch // size < largest and parallel.schedule.definition.flushes:
        fitted = tuple(min(count, batch // size) for count in parallel.layout.replicas)
        raise ConfigError(
            f"{wrong} has a stage of {largest} replicas, but parallel.global_batch_size={batch} gives it only "
            f"{plural(batch // size, 'micro-batch', 'es')} of {size}, so some replicas would get none; use "
            f"parallel.global_batch_size={largest * size}, or parallel.replicas={run_length_text(fitted, '-')}"
        )


def _check_islands(parallel: Parallel) -> None:
    if parallel.islands is None:
        return
    wrong, data = f"parallel.islands={parallel.islands}", parallel.first_replicas
    try:
        sizes = parallel.islands_of
    except ValueError as error:
        raise ConfigError(f"{wrong} is invalid: {error}; write for example 2-2 or 1*4") from None
    if len(sizes) < 2:
        raise ConfigError(f"{wrong} is one island, which has no others to meet; write for example 2-2 or 1*4")
    if sum(sizes) != data:
        raise ConfigError(
            f"{wrong} has {plural(sum(sizes), 'replica')} in all, but parallel.data={data}; use "
            f"parallel.data={sum(sizes)}, or islands that together have {plural(data, 'replica')}"
        )


def _check_shares(parallel: Parallel) -> None:
    if parallel.shares is None:
        return
    shares, data = Shares.parse(parallel.shares), parallel.first_replicas
    if len(shares.numbers) != data:
        count = len(shares.numbers)
        if parallel.replicas is not None:
            raise ConfigError(
                f"parallel.shares={shares} is for {plural(count, 'replica')}, but "
                f"parallel.replicas={parallel.replicas} has {data} in every stage; use {plural(data, 'share')}"
            )
        raise ConfigError(
            f"parallel.shares={shares} is for {plural(count, 'replica')}, but parallel.data={data}; "
            f"use parallel.data={count}, or {plural(data, 'share')}"
        )
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.shares={shares} cannot be combined with parallel.schedule_file={parallel.schedule_file}, which "
            "is for a fixed number of micro-batches; use a named parallel.schedule, or parallel.shares=null"
        )
    size, batch = parallel.micro_batch_size, parallel.global_batch_size
    if batch % (shares.least * size) == 0:
        return
    step = shares.least * size
    near = " or ".join(str(n) for n in (batch // step * step, (batch // step + 1) * step) if n)
    other = ""
    if batch % size == 0 and batch // size >= data:
        other = f", or parallel.shares={shares.fitted(batch // size)}"
    raise ConfigError(
        f"parallel.shares={shares} cannot divide parallel.global_batch_size={batch} in micro-batches of {size}: the "
        f"batch must be a multiple of {plural(shares.least, 'micro-batch', 'es')}, {plural(step, 'sample')}; use "
        f"parallel.global_batch_size={near}{other}"
    )


def _check_batch(parallel: Parallel) -> None:
    if parallel.shares is not None:
        return
    streams = parallel.stream is not None
    data = parallel.layout.replicas[0] // parallel.context if parallel.layout.even and not streams else 1
    size, batch = parallel.micro_batch_size, parallel.global_batch_size
    step = data * size
    if batch % step:
        near = ", ".join(str(n) for n in (batch // step * step, (batch // step + 1) * step) if n)
        by = f"parallel.data * parallel.micro_batch_size = {data} * {size} = {step}"
        raise ConfigError(
            f"parallel.global_batch_size={batch} is not divisible by "
            f"{f'parallel.micro_batch_size={size}' if streams else by}; the nearest that are: {near}"
        )


def _check_stream(parallel: Parallel) -> None:
    """What goes with micro-batches that stream, and what goes with them alone."""
    if parallel.stream is None:
        for key, value, default in (
            ("semantics", str(parallel.semantics), "stashing"),
            ("update_every", parallel.update_every, 1),
            ("depth", parallel.depth, None),
        ):
            if value != default:
                raise ConfigError(
                    f"parallel.{key}={value} works only with parallel.schedule=pipedream, not with "
                    f"{parallel.schedule}; use pipedream, or leave it out"
                )
        if not parallel.schedule.definition.flushes:
            raise ConfigError(
                f"parallel.schedule_file={parallel.schedule_file} cannot be combined with parallel.schedule=pipedream: "
                "the file's schedule has a flush; use parallel.schedule_file=null, or another schedule"
            )
        return
    for broken in broken_by_stream(partial(getattr, parallel), "parallel."):
        raise ConfigError(broken)
    if parallel.tensor_size > 1 and not parallel.layout.even:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} cannot be combined with parallel.schedule=pipedream and "
            f"parallel.replicas={parallel.replicas}: use parallel.tensor=1, or as many replicas in all stages"
        )
    check_depth(parallel.stream)


def check_data_parallel(parallel: Parallel, streams: str, none: str) -> None:
    """Raises ConfigError for a plan whose replicas are no whole models on one GPU each, as several `streams` need; they
    are given by a key and its value, and so is that there are `none`."""
    for key, value, allowed in (
        ("pipeline", parallel.pipeline, 1),
        ("tensor", parallel.tensor_size, 1),
        ("schedule_file", parallel.schedule_file, None),
        ("schedule", "pipedream" if parallel.stream is not None else "one_f_one_b", "one_f_one_b"),
    ):
        if value != allowed:
            raise ConfigError(
                f"{streams} cannot be combined with parallel.{key}={value}: it works only in data parallel plans; use "
                f"parallel.{key}={shown(allowed)}, or {none}"
            )


def _check_gpu_streams(parallel: Parallel) -> None:
    """Raises ConfigError where the plan does not go with streams, or its micro-batches cannot be dealt over them."""
    if parallel.streams is None:  # as in the thousands of plans of a search
        return
    streams = parallel.streams_of
    if max(streams) == 1 and parallel.streams != AUTO:
        return
    check_data_parallel(parallel, f"parallel.streams={parallel.streams}", "parallel.streams=null")
    if parallel.undecided:
        return
    for count, number in zip(parallel.micro_batches_of, streams, strict=True):
        if count % number:
            raise ConfigError(
                f"parallel.streams={parallel.streams}: a replica takes {plural(count, 'micro-batch', 'es')}, "
                f"which its {number} streams cannot share evenly; choose numbers of streams that divide each "
                f"replica's micro-batches"
            )
