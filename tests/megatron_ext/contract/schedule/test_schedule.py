"""Schedules as lists of actions: complete, in order, frugal, free of deadlock, with the bubbles of their papers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from conf.schema.experiment import Schedule
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.check import check, check_replicas, read
from megatron_ext.contract.schedule.iteration import as_json, replicated, schedule
from megatron_ext.contract.schedule.schedules import NAMES, Action, Actions, Kind
from megatron_ext.contract.schedule.streams import PIPEDREAM

TIMES = {Kind.FORWARD: 3, Kind.BACKWARD: 7, Kind.BACKWARD_INPUT: 4, Kind.BACKWARD_WEIGHT: 3}
"""Of one chunk; no two schedules have a bubble in common by accident."""


class Size(NamedTuple):
    name: str
    stages: int
    chunks: int
    micro_batches: int

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    def lists(self) -> list[Actions]:
        return schedule(*self)


simple = st.builds(
    Size,
    st.sampled_from([name for name in NAMES if name != "interleaved"]),
    st.integers(1, 9),
    st.just(1),
    st.integers(1, 24),
)
interleaved = st.builds(Size, st.just("interleaved"), st.integers(2, 7), st.integers(2, 4), st.integers(1, 18))
sizes = st.one_of(simple, interleaved)


def replayed(lists: list[Actions]) -> int:
    """When the last stage ends, if messages take no time: an oracle that shares no code with the check.

    Every action starts when those it depends on have ended, the one before it on its stage among them.
    """
    stages = len(lists)
    ends: dict[tuple[Kind, int, int], int] = {}
    """By kind, micro-batch and virtual stage."""
    clock, done = [0] * stages, [0] * stages
    while any(done[stage] < len(actions) for stage, actions in enumerate(lists)):
        before = list(done)
        for stage, actions in enumerate(lists):
            while done[stage] < len(actions):
                kind, m, chunk = actions[done[stage]]
                virtual = chunk * stages + stage
                if kind is Kind.RECV_FORWARD:
                    arrives = ends.get((Kind.SEND_FORWARD, m, virtual - 1))
                elif kind is Kind.RECV_BACKWARD:
                    arrives = ends.get((Kind.SEND_BACKWARD, m, virtual + 1))
                else:
                    arrives = 0
                if arrives is None:
                    break
                clock[stage] = max(clock[stage], arrives) + TIMES.get(kind, 0)
                ends[kind, m, virtual] = clock[stage]
                done[stage] += 1
        assert done != before, "every stage waits"
    return max(clock)


def held(actions: Actions, opening: Kind, closing: tuple[Kind, ...]) -> int:
    """The most pairs of micro-batch and chunk that are ever between two kinds of action."""
    now = most = 0
    for kind, _, _ in actions:
        now += (kind is opening) - (kind in closing)
        most = max(most, now)
    assert now == 0
    return most


def test_the_configuration_offers_the_schedules_that_there_are() -> None:
    assert sorted(Schedule) == sorted([*NAMES, PIPEDREAM])


@given(sizes)
def test_every_stage_does_each_micro_batch_and_chunk_once(size: Size) -> None:
    split = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    for stage, actions in enumerate(size.lists()):
        wanted: list[Action] = []
        for chunk in range(size.chunks):
            kinds = {Kind.FORWARD} | (split if size.name == "zb_h1" else {Kind.BACKWARD})
            if chunk * size.stages + stage > 0:
                kinds |= {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}
            if chunk * size.stages + stage < size.virtual_stages - 1:
                kinds |= {Kind.SEND_FORWARD, Kind.RECV_BACKWARD}
            wanted += [Action(kind, m, chunk) for kind in kinds for m in range(size.micro_batches)]
        assert Counter(actions) == Counter(wanted)


@given(sizes)
def test_no_stage_waits_for_ever(size: Size) -> None:
    lists = size.lists()
    check(lists, size.stages, size.chunks, size.micro_batches)
    replayed(lists)


@given(sizes)
def test_no_stage_holds_more_than_its_schedule_promises(size: Size) -> None:
    stages, micro_batches = size.stages, size.micro_batches
    for stage, actions in enumerate(size.lists()):
        graphs = held(actions, Kind.FORWARD, (Kind.BACKWARD, Kind.BACKWARD_INPUT))
        if size.name == "gpipe":
            assert graphs == micro_batches
        elif size.name == "model_parallel":
            assert graphs == 1
        elif size.name == "one_f_one_b":
            assert graphs == min(stages - stage, micro_batches)
        elif size.name == "zb_h1":
            assert graphs == min(stages - stage, micro_batches)
            assert held(actions, Kind.FORWARD, (Kind.BACKWARD_WEIGHT,)) == min(stages, micro_batches)
        else:
            most = 2 * (stages - 1 - stage) + (size.chunks - 1) * stages + 1
            assert graphs <= min(most, micro_batches * size.chunks)


@given(sizes)
def test_equal_stages_wait_as_long_as_the_paper_says(size: Size) -> None:
    forward, backward, backward_input, backward_weight = TIMES.values()
    micro_batches, ahead = size.micro_batches, size.stages - 1
    bubble = replayed(size.lists()) - micro_batches * size.chunks * (forward + backward)
    if size.name in ("gpipe", "one_f_one_b"):
        assert bubble == ahead * (forward + backward)
    elif size.name == "model_parallel":
        assert bubble == ahead * (forward + backward) * micro_batches
    elif size.name == "zb_h1" and micro_batches >= size.stages:
        assert bubble == ahead * (forward + backward_input - backward_weight)
    elif size.name == "zb_h1":  # too few micro-batches to fill 1F1B's bubble
        assert bubble <= ahead * (forward + backward)
    elif micro_batches % size.stages == 0:
        assert bubble == ahead * (forward + backward)  # of a chunk, so 1 / chunks of 1F1B's
    else:
        assert bubble <= (ahead + size.chunks * (-micro_batches % size.stages)) * (forward + backward)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (("two_f", 1, 1, 1), "'two_f' is not known; known: gpipe, one_f_one_b, interleaved, zb_h1"),
        (("interleaved", 4, 1, 8), "needs at least 2 stages and 2 chunks, not 4 and 1"),
        (("zb_h1", 4, 2, 8), "schedule=zb_h1 has 1 chunk on a stage, not 2; interleaved has more"),
        (("gpipe", 2, 1, 0), "needs a stage and a micro-batch, not 2 and 0"),
    ],
    ids=["unknown", "interleaved-one-chunk", "chunks-elsewhere", "no-micro-batch"],
)
def test_a_schedule_that_cannot_be_is_refused(size: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        schedule(*size)


def moved_behind(actions: Actions, one: Action, other: Action) -> None:
    actions.remove(one)
    actions.insert(actions.index(other) + 1, one)


def forget(lists: list[Actions]) -> None:
    lists[1].remove(Action(Kind.FORWARD, 2))


def twice(lists: list[Actions]) -> None:
    lists[0].append(Action(Kind.FORWARD, 2))


def too_many(lists: list[Actions]) -> None:
    lists[0].append(Action(Kind.FORWARD, 4))


def both(lists: list[Actions]) -> None:
    i = lists[1].index(Action(Kind.BACKWARD, 2))
    lists[1][i + 1 : i + 1] = [Action(Kind.BACKWARD_INPUT, 2), Action(Kind.BACKWARD_WEIGHT, 2)]


def too_early(lists: list[Actions]) -> None:
    moved_behind(lists[1], Action(Kind.RECV_FORWARD, 2), Action(Kind.FORWARD, 2))


def overtaken(lists: list[Actions]) -> None:
    moved_behind(lists[0], Action(Kind.SEND_FORWARD, 0), Action(Kind.SEND_FORWARD, 1))


def in_a_circle(lists: list[Actions]) -> None:
    for m in (1, 0):
        moved_behind(lists[1], Action(Kind.SEND_BACKWARD, m), Action(Kind.RECV_FORWARD, 2))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (forget, "stage 1 never does forward-compute of micro-batch 2, chunk 0"),
        (twice, "stage 0 does forward-compute of micro-batch 2, chunk 0 2 times"),
        (too_many, "stage 0 does forward-compute of micro-batch 4, chunk 0, which does not belong there"),
        (both, "stage 1 does backward-compute of micro-batch 2, chunk 0, which does not belong there"),
        (too_early, "stage 1 does forward-compute of micro-batch 2, chunk 0 before forward-recv of micro-batch 2"),
        (overtaken, "stage 1 waits for forward-send of micro-batch 0, chunk 0 of stage 0, but .* micro-batch 1,"),
        (in_a_circle, "waiting forever: stage 0 at backward-recv of micro-batch 0, chunk 0, stage 1 at forward-recv "
                      "of"),
        (list.pop, "the schedule has 1 stages, but the pipeline 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_schedule_that_would_hang_or_go_wrong_is_told_with_the_action(spoil, message: str) -> None:
    lists = schedule("one_f_one_b", 2, 1, 4)
    spoil(lists)
    with pytest.raises(EngineError, match=message):
        check(lists, 2, 1, 4)


@given(sizes, st.randoms(use_true_random=False))
def test_what_passes_the_check_runs_to_its_end(size: Size, random: Random) -> None:
    lists = size.lists()
    for _ in range(random.randint(1, 4)):
        actions = random.choice(lists)
        actions.insert(random.randrange(len(actions)), actions.pop(random.randrange(len(actions))))
    try:
        check(lists, size.stages, size.chunks, size.micro_batches)
    except EngineError:
        event("refused")
    else:
        event("passed")
        replayed(lists)


@given(size=sizes)
def test_a_schedule_survives_its_file(tmp_path_factory: pytest.TempPathFactory, size: Size) -> None:
    path = tmp_path_factory.getbasetemp() / "schedule.json"
    path.write_text(json.dumps(as_json(size.lists(), size.chunks, size.micro_batches)))
    assert read(path, size.stages, size.chunks, size.micro_batches) == size.lists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not a schedule of version 1"),
        ({"micro_batches": 3}, "micro_batches=3, but the plan has 2"),
        ({"actions": None}, "actions must be, by stage, a list of"),
        ({"actions": [[["forward", 0, 0]]]}, "'forward' is not a valid Kind; kinds: forward-compute, "),
        ({"actions": [[["forward-compute", 0]]]}, "actions must be, by stage, a list of"),
        ({"actions": [[["forward-compute", "0", 0]]]}, "'0', 0 are not two whole numbers"),
        ({"actions": [[["forward-compute", 0, 0]]]}, "never does backward-compute of micro-batch 0, chunk 0"),
    ],
    ids=["version", "size", "no-actions", "kind", "short", "text", "incomplete"],
)
def test_a_file_that_is_no_schedule_is_named_with_what_is_wrong(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(as_json(schedule("gpipe", 1, 1, 2), 1, 2) | change))
    with pytest.raises(EngineError, match=f"mine.json: .*{message}"):
        read(path, 1, 1, 2)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"version": 1, ')
    for name in ("cut.json", "none.json"):
        with pytest.raises(EngineError, match=f"{name}: cannot be read as a schedule"):
            read(tmp_path / name, 1, 1, 2)


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "large", "deep", "long"])
def test_what_is_no_file_to_read_whole_is_refused_at_once(tmp_path: Path, what: str) -> None:
    path = tmp_path / "mine.json"
    match what:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "large":
            with path.open("wb") as file:
                file.truncate(2**40)
        case "deep":
            path.write_text("[" * 100_000)
        case "long":
            path.write_text("9" * 5000)
    with pytest.raises(EngineError, match=f"^{re.escape(str(path))}: cannot be read as a schedule: "):
        read(path, 1, 1, 2)


def test_the_command_prints_a_schedule_without_torch(tmp_path: Path) -> None:
    arguments = ["interleaved", "--stages", "2", "--chunks", "2", "--micro-batches", "3"]
    without = "import sys; sys.modules['torch'] = None\nfrom megatron_ext.schedule import main"
    code = f"{without}\nsys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (tmp_path / "printed.json").write_text(done.stdout)
    assert read(tmp_path / "printed.json", 2, 2, 3) == schedule("interleaved", 2, 2, 3)


def test_the_documented_kinds_are_the_ones_that_run() -> None:
    section = Path("docs/formats.md").read_text().split("\n## Schedules\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(word for row in rows for word in re.findall("`(.+?)`", row)) == sorted(
        kind.value for kind in Kind if kind is not Kind.UPDATE
    )
    keys = as_json(schedule("gpipe", 1, 1, 1), 1, 1)
    assert all(f"`{key}`" in section for key in keys)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "interleaved"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_with_unlike_numbers_of_replicas_run_to_their_end(name: str, stages: int) -> None:
    for replicas in product(range(1, 5), repeat=stages):
        for micro_batches in {max(replicas), max(replicas) + 1, 7, 12}:
            lists = replicated(name, replicas, micro_batches)
            check_replicas(lists, 1, micro_batches)
            assert [len(of_stage) for of_stage in lists] == list(replicas)
            if set(replicas) == {1}:
                assert [of_stage[0] for of_stage in lists] == schedule(name, stages, 1, micro_batches)


def test_the_first_stage_of_15_replicas_holds_two_micro_batches_and_the_last_one() -> None:
    """PipeDream's 15-1 (Narayanan et al. 2019): as many in flight as there are ranks."""
    first, last = replicated("one_f_one_b", (15, 1), 60)
    for actions, most in ((first[0], 2), (first[14], 2), (last[0], 1)):
        held = np.cumsum([{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0) for action in actions])
        assert held.max() == most


def test_replicas_that_wait_for_each_other_for_ever_are_found_out() -> None:
    lists = replicated("one_f_one_b", (2, 1), 4)
    lists[1][0] = [action._replace(micro_batch=3 - action.micro_batch) for action in lists[1][0]]
    with pytest.raises(EngineError, match=r"waits for .* comes first|deadlock"):
        check_replicas(lists, 1, 4)
    with pytest.raises(EngineError, match="cannot each take one of 2 micro-batches"):
        replicated("gpipe", (3, 1), 2)
    with pytest.raises(EngineError, match="schedule=interleaved needs the same number of replicas at every stage"):
        replicated("interleaved", (2, 1), 4)
