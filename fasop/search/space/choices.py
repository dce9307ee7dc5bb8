"""What a search tries of each part of a plan.

A search chooses everything of `parallel` but the global batch. What a command line gives of it stays:
`parallel.recompute=full` is the one value that is tried, and `parallel.recompute=none,full` tries both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from conf.reading.values import NoValue, Reader, flag, one_of, read, several, whole
from conf.schema.engine import Engine, EngineKind
from conf.schema.model import Model
from conf.schema.train import Train
from conf.schema.values.partition import AUTO
from fasop.costs.blocks import blocks_of
from fasop.costs.parallelism import Parallelism
from fasop.errors import SearchError
from fasop.frozen import replace
from megatron_ext.contract.parallel_config import RECOMPUTES, Recompute, Schedule

SIZES = ("tensor", "data", "pipeline", "expert", "context", "micro_batch_size")
FOUND = ("partition", "node_order", "shares", "replicas")
"""What nobody can give: finding it is what a search is for."""
SEARCHED = tuple(schedule for schedule in Schedule if schedule.definition.searched)
"""Schedules that can be the fastest, and that flush."""
BY_STAGE = ("zero", "offload")
"""What a launch also takes stage by stage."""
NOT_SEARCHED = ("semantics", "update_every", "depth")
"""What only a launch takes."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values that are tried, in this order; of a size None tries every one that is possible."""

    tensor: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] | None = None
    schedule: tuple[Schedule, ...] = (Schedule.one_f_one_b,)
    chunks: tuple[int, ...] = (2,)
    """With the schedule `interleaved`."""
    recompute: tuple[Recompute, ...] = (Recompute.none,)
    sharded_optimizer: tuple[bool, ...] = (False,)
    sequence_parallel: tuple[bool, ...] = (False,)
    replicated: tuple[bool, ...] = (False, True)
    """Whether there are several replicas: one alone shares nothing out."""

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Those that are given, by key."""
        return {key: value for key in SIZES if (value := getattr(self, key)) is not None}

    def tries(self, parallel: Parallelism) -> bool:
        """Whether the sizes of a plan are to be tried."""
        if (parallel.data > 1) not in self.replicated:
            return False
        replicas = {"data": parallel.data // parallel.context}  # as `parallel.data` counts them
        return all(replicas.get(key, getattr(parallel, key)) in values for key, values in self.sizes.items())

    @property
    def ways(self) -> Iterator[tuple[Schedule, int]]:
        """Every schedule, with each number of chunks that it can have."""
        for schedule in self.schedule:
            yield from ((schedule, chunks) for chunks in (self.chunks if schedule.definition.has_chunks else (1,)))

    def runs(self, sized: Parallelism, schedule: Schedule, chunks: int, model: Model, engine: Engine) -> bool:
        """Whether such a pipeline can run a schedule, and needs to be tried with it.

        Every chunk of an interleaved schedule can have a layer. Megatron's takes micro-batches in groups of as many as
        stages, and refuses a last group that is not whole.
        A single stage takes as long with every schedule; with 1F1B it holds one micro-batch at a time, as few as any.
        """
        if engine.kind is EngineKind.megatron_core and model.traits.decoder and sized.pipeline > 1:
            return False  # megatron_ext.contract.rules.engine
        if sized.pipeline == 1 and Schedule.one_f_one_b in self.schedule:
            return schedule is Schedule.one_f_one_b
        if not schedule.definition.has_chunks:
            return True
        if sized.zero is not None and sized.shares is not None:
            return False  # megatron_ext.contract.rules.memory
        whole = engine.kind is EngineKind.tdpp or sized.micro_batches % sized.pipeline == 0
        return whole and sized.pipeline > 1 and sized.pipeline * chunks <= blocks_of(model).layers

    def variants(self, sized: Parallelism) -> Iterator[Parallelism]:
        """A plan's sizes and schedule with each option that changes anything; those that save memory come last."""
        for recompute in self.recompute:
            for sharded in _that_matter(self.sharded_optimizer, sized.data > 1):
                for sequence in _that_matter(self.sequence_parallel, sized.tensor_size > 1):
                    yield replace(sized, recompute=recompute, sharded_optimizer=sharded, sequence_parallel=sequence)


def _that_matter(values: Sequence[bool], matters: bool) -> Sequence[bool]:
    """An option that changes nothing for these sizes is off, where it may be."""
    return values if matters or False not in values else (False,)


def runnable(engine: Engine, train: Train, model: Model) -> Choices:
    """All that can be run with these parts of a configuration (conf/schema/rules/), and that is predicted."""
    megatron = engine.kind is not EngineKind.tdpp
    # Compiled layers, LSTMs and a user's blocks compute the gradients of weights and inputs together.
    whole = train.compile or model.traits.recurrent or model.measured
    schedules = tuple(
        schedule
        for schedule in SEARCHED
        if (schedule.definition.megatron_lm or not megatron) and not (whole and schedule.definition.splits_backward)
    )
    both = (False, True)
    if model.measured:  # whose blocks share no sequences out
        return Choices(schedule=schedules, recompute=(Recompute.none, Recompute.full), sharded_optimizer=both)
    recompute = tuple(way for way in RECOMPUTES if model.attends or way is not Recompute.selective)
    return Choices(schedule=schedules, recompute=recompute, sharded_optimizer=both, sequence_parallel=both)


def tried(allowed: Choices, given: Mapping[str, tuple[Any, ...]], engine: Engine, sequence_parallel: bool) -> Choices:
    """What a command line gives; of the rest all that is allowed and can be worth it.

    tdpp's engine keeps no attention scores, so that to recompute the attention's core saves it nothing. Sharing the
    sequence is as configured: the times of profiles are of one way of the two.

    Raises:
        SearchError: what is given cannot be run, or is not predicted.
    """
    for key in ("schedule", "recompute", "sharded_optimizer", "sequence_parallel"):
        can = getattr(allowed, key)
        for value in given.get(key, ()):
            if (value.way if isinstance(value, Recompute) else value) not in can:
                raise SearchError(
                    f"parallel.{key}={_text(value)} cannot be searched with this engine, model and train.compile; use "
                    f"one of {', '.join(map(_text, can))}"
                )
    worth = replace(
        allowed,
        sequence_parallel=tuple(v for v in allowed.sequence_parallel if v == sequence_parallel) or (False,),
        recompute=tuple(
            r for r in allowed.recompute if r is not Recompute.selective or engine.kind is EngineKind.megatron_lm
        ),
    )
    found = replace(worth, **given)
    if "chunks" in given and not any(one.definition.has_chunks for one in found.schedule):
        raise SearchError(
            f"parallel.chunks={','.join(map(str, found.chunks))} needs the schedule interleaved, but the search "
            f"covers only {', '.join(found.schedule)}; leave it out"
        )
    return found


def split(overrides: Sequence[str]) -> tuple[Mapping[str, tuple[Any, ...]], list[str]]:
    """The values that overrides give for parts of a plan, and the other overrides.

    Raises:
        SearchError: a value is none, or what a search finds is given.
    """
    given: dict[str, tuple[Any, ...]] = {}
    others = []
    for word in overrides:
        name, equals, value = word.partition("=")
        key = name.removeprefix("++").removeprefix("parallel.")
        if (
            not equals
            or name.removeprefix("++") != f"parallel.{key}"
            or key not in (*_KEYS, *FOUND, *NOT_SEARCHED, *BY_STAGE)
        ):
            others.append(word)
        elif key in NOT_SEARCHED:
            raise SearchError(
                f"{word}: a search covers schedules with a flush, and semantics=stashing with an update after each "
                f"round; leave it out, or {_REHEARSED}"
            )
        elif value == AUTO and key in ("shares", "micro_batch_size"):
            continue
        elif key in BY_STAGE and ("-" in value or "*" in value):
            raise SearchError(
                f"{word}: a search takes one value of it for all stages; give one of them, or leave it out"
            )
        elif key in FOUND:
            raise SearchError(
                f"{word}: the search itself finds the {key.replace('_', ' ')}; leave it out{_instead(key)}"
            )
        elif key in BY_STAGE:
            others.append(word)
        else:
            given[key] = read(f"parallel.{key}", value, several(_KEYS[key]), SearchError)
    return given, others


_REHEARSED = "measure a plan with it by 'tdpp launch … executor.rehearse=virtual'"


def _instead(key: str) -> str:
    """What else to do about a key that is given."""
    if key != "replicas":
        return ""
    return " (by_stage=true looks closer), or measure a plan with it by 'tdpp launch … executor.rehearse=virtual'"


def _tensor(text: str) -> int:
    if "-" in text.strip("-") or "*" in text:
        raise NoValue("must be single sizes: the search finds which stage has which")
    return whole(text)


def _recompute(text: str) -> Recompute:
    try:
        way = Recompute(text)
    except ValueError as rule:
        raise NoValue(f"must be {rule}") from rule
    if len(way.stages) > 1:
        raise NoValue("must be one for all stages: the search finds which stage computes how many layers again")
    return way


def _chunks(text: str) -> int:
    if whole(text) < 2:
        raise NoValue("must be at least 2, as in every interleaved schedule")
    return int(text)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_KEYS: Mapping[str, Reader[Any]] = {
    **dict.fromkeys(SIZES, whole),
    "tensor": _tensor,
    "schedule": one_of(Schedule),
    "chunks": _chunks,
    "recompute": _recompute,
    "sharded_optimizer": flag,
    "sequence_parallel": flag,
}
assert {*_KEYS, "replicated"} == {field.name for field in fields(Choices)}
