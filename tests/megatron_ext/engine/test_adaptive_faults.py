"""What goes wrong in the iteration in which a batch changes leaves no trace: the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.checkpoints import saving
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.run_files import CHECKPOINTS, LATEST
from megatron_ext.contract.worker import SAVED
from megatron_ext.engine.adaptation import Adaptation
from megatron_ext.engine.engine import Engine
from megatron_ext.parallel import interruption
from tests.megatron_ext.engine.test_adaptive_agrees import GROWING, LAYOUTS, batches, decisions
from tests.megatron_ext.engine.test_micro_batch_sizes_agree import IN_STREAMS, STREAMS, decide_in_turn
from tests.megatron_ext.test_worker import alive, pids
from tests.support.launch.live import wait_for
from tests.support.megatron_ext.engine_run import EngineRun, make_run

pytestmark = pytest.mark.slow
OWN = [
    *(word for word in GROWING if not word.startswith("adapt.rate")),
    *("train.save_interval=2", "train.save_async=true", "adapt.rule=noise", "adapt.smoothing=2"),
]
"""Its decisions come from measurements of two iterations, of which a checkpoint has to keep some."""
SIZES = "micro-batches of other sizes and in other streams"
SIZED = [
    *("parallel.data=2", "parallel.micro_batch_size=2", "adapt.rebalance=true", "adapt.micro_batch_sizes=[4,6]"),
    STREAMS,
]
CHANGE = 4
"""After this iteration the batch changes, which every uninterrupted run here is asserted to do; it is saved, too."""
KILLED = {
    "rank 0 has decided and told nobody": (0, Adaptation, "_follow"),
    "the last rank has heard of it and does not follow": (-1, Engine, "divide"),
    "rank 0 has followed and not saved": (0, interruption.Interruption, "agreed"),
    "the first iteration with the new batch has begun": (-1, Engine, "_batch"),
}
"""Which rank dies, and before which of its calls after iteration `CHANGE`, in one start after another."""
ASKED = {"shares 3-1": CHANGE - 1, "two stages": CHANGE}
"""After which iteration a rank is asked to save and end. All hear of it an iteration later: the change is the last
thing that the start does, or the last but one."""


@pytest.fixture(scope="module", params=list(ASKED))
def uninterrupted(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineRun]:
    own = [*OWN, *LAYOUTS.get(request.param, SIZED)]
    run = make_run(tmp_path_factory.mktemp("uninterrupted") / "run", corpus, *own)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == SIZES:
            decide_in_turn(patch, IN_STREAMS)
        assert run.go() == 0, run.stderr()
        sizes = batches(run)
        assert sizes[CHANGE] != sizes[CHANGE - 1]
        assert len(sizes) > CHANGE + 2
        yield run


@pytest.fixture
def again(uninterrupted: EngineRun, corpus: Path, tmp_path: Path) -> EngineRun:
    """A run like the uninterrupted one that has not begun."""
    run = make_run(tmp_path / "run", corpus)
    content = json.loads(uninterrupted.run.plan.read_text())
    old, new = str(uninterrupted.run.path), str(run.run.path)
    run.run.plan.write_text(json.dumps(content).replace(old, new))
    return EngineRun(run.run, type(run.plan).read(run.run.plan))


def before(
    monkeypatch: pytest.MonkeyPatch, run: EngineRun, rank: int, owner: type, name: str, iteration: int, signum: int
) -> None:
    """Has a rank of the runs to come send itself a signal before its first call of a method after this iteration."""
    method, step = getattr(owner, name), Engine.step
    seen = {"iteration": 0, "rank": -1, "signalled": False}

    def noting(self: Engine, iteration: int, **others: Any) -> Any:
        seen.update(iteration=iteration, rank=self._place.rank)
        return step(self, iteration, **others)

    def signalling(*words: Any, **others: Any) -> Any:
        due = seen["iteration"] >= iteration + (name == "_batch")  # which a step calls itself
        if due and seen["rank"] == rank % run.plan.world_size and not seen["signalled"]:
            seen["signalled"] = True
            if signum == signal.SIGKILL:
                wait_for((run.run.path / CHECKPOINTS / LATEST).exists)
            os.kill(os.getpid(), signum)
        return method(*words, **others)

    monkeypatch.setattr(Engine, "step", noting)
    monkeypatch.setattr(owner, name, signalling)
    if signum == signal.SIGKILL:  # rank 0 publishes between iterations what is written: here, before the one that ends
        monkeypatch.setattr(saving._Writer, "start", saving._Writer.run)


def assert_same(run: EngineRun, expected: EngineRun) -> None:
    """To the last bit."""
    assert [line["iteration"] for line in run.metrics()] == [line["iteration"] for line in expected.metrics()]
    assert batches(run) == batches(expected)
    np.testing.assert_array_equal(run.losses(), expected.losses())
    own = {"unix", "micro_batch_ms", "iteration_ms"}
    one, other = ([{k: v for k, v in line.items() if k not in own} for line in decisions(x)] for x in (run, expected))
    assert one == other
    state = expected.state()
    assert run.state().keys() == state.keys()
    for name, tensor in run.state().items():
        assert torch.equal(tensor, state[name]), name
    assert run.run.read_json(run.run.goal) == expected.run.read_json(expected.run.goal)
    assert not any(alive(pid) for pid in pids(run).values())


@pytest.mark.parametrize("uninterrupted", [SIZES], indirect=True)
def test_ranks_killed_in_the_iteration_of_a_change_leave_no_trace(
    uninterrupted: EngineRun, again: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for when, (rank, owner, name) in KILLED.items():
        before(monkeypatch, again, rank, owner, name, CHANGE, signal.SIGKILL)
        assert again.go() == 1, when
        assert [error["type"] for error in again.errors() if not error["symptom"]] == ["Killed"], when
        assert not any(alive(pid) for pid in pids(again).values()), when
        assert Checkpoint.at(again.run.path).meta.iteration in (CHANGE - 2, CHANGE), when
        assert CHANGE - 1 <= len(again.metrics()) <= CHANGE, when
        monkeypatch.undo()
    assert again.go() == 0, again.stderr()
    assert_same(again, uninterrupted)


def test_asked_to_save_and_end_as_the_batch_changes_a_run_later_goes_on(
    uninterrupted: EngineRun, again: EngineRun, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    asked = ASKED[request.node.callspec.params["uninterrupted"]]
    before(monkeypatch, again, -1, Adaptation, "after", asked, interruption.SIGNAL)
    assert again.go() == SAVED, again.stderr()
    assert not again.errors()
    assert Checkpoint.at(again.run.path).meta.iteration == len(again.metrics()) == asked + 1
    monkeypatch.undo()
    assert again.go() == 0, again.stderr()
    assert_same(again, uninterrupted)
