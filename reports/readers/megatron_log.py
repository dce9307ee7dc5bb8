"""A log of Megatron-LM, alone or in its job's folder, as a run that pages can be made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from conf.errors import RunFolderError
from conf.run_folder.log_lines import LogText
from conf.run_folder.run_files import opened, unreadable
from megatron_ext.contract.layout import Layout as Grid
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place, RunNode
from megatron_ext.contract.rules.engine import MEGATRON_LM
from reports.errors import NeitherError, ReportError
from reports.readers import upstream_log
from reports.readers.events import EVENT, Timeline, frame
from reports.readers.json_lines import metrics_frame
from reports.readers.legacy_log import Blocks
from reports.readers.legacy_timeline import INTERLEAVED, Layout, timeline
from reports.readers.log_facts import Facts
from reports.readers.record import UNKNOWN, Record

STRANGE_LIMIT = 1 << 26
"""Characters before the first line that is known, from which a file is not a log: nobody waits for data of many GB."""
RANK_LIMIT = 1 << 14
MOST_NOTES = 20
"""The most notes on what was left out of the times; a badly damaged log has thousands."""
MODEL = ("layers", "hidden", "heads", "sequence_length", "padded_vocab_size")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parallel sizes that the user gives; None: to be found."""

    tensor: int | None = None
    data: int | None = None
    pipeline: int | None = None


@dataclass(frozen=True, kw_only=True)
class _File:
    """What was read from one file."""

    path: Path
    blocks: Blocks
    facts: Facts
    log: upstream_log.UpstreamLog


def is_log(path: Path) -> bool:
    """Whether it is a file, or a folder of a job as the shell scripts left them: `log2/<job id>/<node>.out`."""
    return path.is_file() or (path.is_dir() and not (path / "plan.json").exists() and any(path.glob("*.out")))


def read(path: Path, given: Sizes) -> tuple[Record, Timeline]:
    """Reads a log, or those in a folder of a job: one of them, that of the last rank, has the iterations.

    Raises:
        NeitherError: it is not a log, or cannot be read.
        ReportError: its ranks do not fit the parallel sizes.
    """
    paths = sorted(path.glob("*.out")) if path.is_dir() else [path]
    files, unread = list[_File](), list[NeitherError]()
    for one in paths:
        try:
            files.append(_read(one))
        except NeitherError as error:
            unread.append(error)
    if not files:
        raise unread[0]
    main = max(files, key=lambda file: (len(file.blocks.calls), len(file.log.metrics)))
    if not main.log.metrics and not main.blocks.calls:
        raise _no_log(path, main)
    facts = _merged([main, *(file for file in files if file is not main)])
    left_out = [f"{file.path.name}: {note}" if path.is_dir() else note for file in files for note in file.log.notes]
    notes = [*_few([*map(str, unread), *left_out, *facts.notes])]
    layout = _layout(main.blocks, facts, given, notes)
    without_times = Timeline(
        frame(np.zeros(0, EVENT), ()), hosts={}, uncertainty_ns=None, notes=tuple(main.blocks.notes)
    )
    seen = timeline(main.blocks, layout) if layout else without_times
    seen = replace(seen, notes=_few(seen.notes))
    plan = _plan(files, main, facts, layout, seen)
    log = replace(
        main.log,
        timers=main.log.timers or _timers(main.blocks),
        memory={rank: mib for file in files for rank, mib in file.log.memory.items()},
    )
    if plan.global_batch_size and plan.model.sequence_length:
        log = log.with_tokens(plan.model.sequence_length, plan.global_batch_size)
    record = Record(
        name=f"{path.parent.name}/{path.stem}".lstrip("/") if path.is_file() else path.name,
        log=path,
        diff=Path(),
        plan=plan,
        metrics=metrics_frame(log.metrics),
        upstream=log,
        config="",
        experiment=None,
        overrides=(),
        provenance={},
        node_states={},
        failures=(),
        memory={},
        notes=tuple(notes),
    )
    return record, seen


def _read(path: Path) -> _File:
    blocks, facts = Blocks(), Facts()
    try:
        with opened(path) as file:
            text = LogText(file)
            log = upstream_log.parse(facts.watch(blocks.rest(_not_too_strange(text, facts))))
    except (OSError, RunFolderError) as error:
        raise NeitherError(str(error) if isinstance(error, RunFolderError) else str(unreadable(path, error))) from error
    return _File(path=path, blocks=blocks, facts=facts, log=replace(log, notes=(*text.notes, *log.notes)))


def _not_too_strange(lines: Iterable[str], facts: Facts) -> Iterator[str]:
    """The lines, up to where it is plain that `facts`, which watches them, will never know one."""
    passed = 0
    for line in lines:
        passed += len(line)
        if passed > STRANGE_LIMIT and not facts.known:
            return
        yield line


def _no_log(path: Path, main: _File) -> NeitherError:
    if main.facts.strange is None:
        found = "it is empty" if main.blocks.lines == 0 else f"it ends after line {main.blocks.lines}"
    else:
        number, text = main.facts.strange
        found = f"it is unreadable from line {number} on, which begins {text!r}"
    where = "" if main.path == path else f"; {main.path}"
    return NeitherError(
        f"{path} is not a log of Megatron-LM: expected lines such as ' iteration       10/      50 | consumed samples: "
        f"… | elapsed time per iteration (ms): … |' (printed by its last rank{where}): {found}. Give a run of tdpp, "
        "the .out file of a job's last node, or the folder with the .out files of all its nodes",
        brief=f"{main.path} is not a log of Megatron-LM: {found}",
    )


def _merged(files: Sequence[_File]) -> Facts:
    """What the files say together; where they differ, the first."""
    facts = Facts(
        partition=next((file.facts.partition for file in files if file.facts.partition), ()),
        iterations=files[0].facts.iterations,
        notes=[note for file in files for note in file.facts.notes],
        listed=any(file.facts.listed for file in files),
        uneven=any(file.facts.uneven for file in files),
    )
    for file in reversed(files):
        facts.numbers |= file.facts.numbers
    return facts


def _layout(blocks: Blocks, facts: Facts, given: Sizes, notes: list[str]) -> Layout | None:
    """How the ranks lie: as given, else as the log says, else as follows from which ranks send and receive."""
    message = {key: facts.numbers.get(key) for key in ("tensor", "data", "pipeline")}
    if message["data"] is not None:  # replicas, each of as many ranks that share its sequences
        message["data"] *= facts.numbers.get("context", 1)
    sizes = message | {key: value for key, value in vars(given).items() if value is not None}
    seen = {call.rank for call in blocks.calls}
    world = facts.numbers.get("world") or next(count for count in range(len(seen) + 1) if count not in seen)
    known = math.prod(size for size in sizes.values() if size is not None)
    missing = [key for key, size in sizes.items() if size is None]
    if missing == ["tensor"] or missing == ["data"] or missing == ["pipeline"]:
        if world and world % known == 0:
            sizes[missing[0]] = world // known
    elif missing and seen:
        sizes = _derived(blocks, world, sizes)
        words = " x ".join(f"{key} {size}" for key, size in sizes.items())
        notes.append(
            f"the log does not give the {', '.join(missing)} size: {words} is derived from the ranks that receive "
            f"nothing from an earlier stage, with one tensor-parallel rank if none is given; set --tensor, --data and "
            f"--pipeline to correct it"
        )
    if any(size is None for size in sizes.values()):
        notes.append("the log does not give the layout of its ranks; set --tensor, --data and --pipeline")
        return None
    layout = Layout(**{key: size for key, size in sizes.items() if size is not None})
    product = f"tensor {layout.tensor} x data {layout.data} x pipeline {layout.pipeline} = {layout.ranks} ranks"
    if layout.ranks != (world or layout.ranks):
        raise ReportError(
            f"{product}, but the log shows {world}: give --tensor, --data and --pipeline whose product is {world}"
        )
    if layout.ranks > RANK_LIMIT:
        raise ReportError(f"{product}: a page shows at most {RANK_LIMIT}")
    return layout


def _derived(blocks: Blocks, world: int, sizes: dict[str, int | None]) -> dict[str, int | None]:
    """Sizes of which at most one is known."""
    receivers = {call.rank for call in blocks.calls if call.name.endswith("forward-recv")}
    first = next((rank for rank in range(world) if rank in receivers), world)  # so many ranks are the first stage
    pipeline = sizes["pipeline"] or (world // first if first and world % first == 0 else None)
    if pipeline is None or world % pipeline:
        return sizes
    tensor = sizes["tensor"] or (world // pipeline // sizes["data"] if sizes["data"] else 1)
    return {"tensor": tensor, "data": world // pipeline // tensor or None, "pipeline": pipeline}


def _few(notes: Sequence[str]) -> tuple[str, ...]:
    """Returns the first of many notes, and how many more there are."""
    more = len(notes) - MOST_NOTES
    return (*notes[:MOST_NOTES], f"{more} more notes on the log are left out") if more > 1 else tuple(notes)


def _timers(blocks: Blocks) -> dict[str, tuple[float | None, float]]:
    """Least and largest time of all ranks, ms: medians of the blocks after the first, which warms up."""
    times: dict[str, list[list[float]]] = {}
    for block in blocks.spent[1:] or blocks.spent:
        for timer, spent in block.items():
            times.setdefault(timer, []).append(spent)
    return {
        timer: (median(min(spent) for spent in many if spent), median(max(spent) for spent in many if spent))
        for timer, many in times.items()
        if any(many)
    }


def _plan(files: Sequence[_File], main: _File, facts: Facts, layout: Layout | None, seen: Timeline) -> Plan:
    """What is known of the plan; without ranks where it is not known how they lie, and 0 for numbers that are not."""
    numbers = facts.numbers
    nodes = _nodes(files, numbers, layout.ranks if layout else 0)
    samples, data = numbers.get("global_batch_size", 0), layout.data if layout else 0
    context = numbers.get("context", 1) if data % numbers.get("context", 1) == 0 else 1
    micro_batches = int(max(seen.events["micro_batch"], default=-1)) + 1
    step = data // context * micro_batches
    size = numbers.get("micro_batch_size") or (samples // step if step else 0)
    interleaved = any(name in seen.names for name in INTERLEAVED) or "chunks" in numbers
    content = {
        "tensor": layout.tensor if layout else 0,
        "data": data,
        "context": context if context > 1 else None,
        "pipeline": layout.pipeline if layout else 0,
        "chunks": numbers.get("chunks", 1),
        "partition": _partition(facts, layout) if layout else [],
        "engine": MEGATRON_LM,
        "schedule": "one_f_one_b" if not interleaved else "interleaved" if "chunks" in numbers else UNKNOWN,
        "micro_batch_size": size,
        "global_batch_size": samples,
        "train": {"iterations": facts.iterations, "precision": UNKNOWN},
        "timeline": len(seen.events) > 0,
        "device": "cuda",
        "model": {key: numbers[key] for key in MODEL if key in numbers},
    }
    return replace(Plan.of(content, main.path.parent), nodes=nodes, ranks=_ranks(layout, nodes) if layout else [])


def _ranks(layout: Layout, nodes: Sequence[RunNode]) -> list[Place]:
    places = Grid.grid(layout.tensor, layout.data, layout.pipeline)
    return [
        Place(rank, number, local_rank, *places.stage_dp_tp(rank))
        for number, node in enumerate(nodes)
        for local_rank, rank in enumerate(node.ranks)
    ]


def _partition(facts: Facts, layout: Layout) -> tuple[int, ...]:
    """Layers by virtual stage: as the log lists them, else Megatron-LM's share of all; empty where it is not known."""
    numbers, stages = facts.numbers, layout.pipeline
    if len(facts.partition) == stages:
        return facts.partition
    if "layers" not in numbers or facts.uneven or not facts.listed:
        return ()
    parts = stages * numbers.get("chunks", 1)
    ends = {0: numbers.get("first_layers"), parts - 1: numbers.get("last_layers")}
    given = {part: layers for part, layers in ends.items() if layers is not None}
    left, rest = divmod(numbers["layers"] - sum(given.values()), max(parts - len(given), 1))
    if left < 0 or rest or (given and parts != stages) or (len(given) == parts and left):
        return ()
    return tuple(given.get(part, left) for part in range(parts))


def _nodes(files: Sequence[_File], numbers: dict[str, int], ranks: int) -> list[RunNode]:
    """The nodes in the order of their ranks; one of UNKNOWN name, which stands for any number, where the log does not
    say how many there are."""
    count = numbers.get("nodes", 0)
    if not ranks or not count or ranks % count:
        return [RunNode(UNKNOWN, "", UNKNOWN, list(range(ranks)), environment={})] if ranks else []
    names = {file.facts.numbers["node_rank"]: file.path.stem for file in files if "node_rank" in file.facts.numbers}
    each = ranks // count
    return [
        RunNode(names.get(node, f"node {node}"), "", UNKNOWN, list(range(first, first + each)), environment={})
        for node, first in enumerate(range(0, ranks, each))
    ]
