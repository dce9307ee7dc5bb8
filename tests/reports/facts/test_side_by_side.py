"""What a run is compared by is read from its folder: how fast it was, what it sent, what its stages hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.run_folder.iteration_time import IterationTime
from conf.run_folder.rundir import RunDir
from reports.facts.learning import Learned
from reports.facts.side_by_side import facts, sent
from reports.readers import record
from reports.readers.record import Record
from tests.support.reports.synthetic import Shape, make_run


def made(folder: Path, **sizes: int) -> RunDir:
    make_run(folder, Shape(**sizes))
    return RunDir(folder)


def counted(run: RunDir, *ranks: dict[str, float], samples: int = 8) -> Record:
    for rank, kinds in enumerate(ranks):
        path = run.rank_traffic(rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"rank": rank, "stage": 0, "iteration": 3, "samples": samples, "bytes": kinds}))
    return record.read(run)


def test_bytes_are_those_of_all_ranks_for_a_sample(tmp_path: Path) -> None:
    read = counted(made(tmp_path / "a"), {"activations": 80, "gradients": 0}, {"activations": 0, "gradients": 40})
    found = sent(read)
    assert found is not None
    assert (found.by_kind, found.most, found.total) == ({"activations": 10.0, "gradients": 5.0}, 10.0, 15.0)


@pytest.mark.parametrize("samples", [0, 8])
def test_bytes_of_some_ranks_alone_are_not_those_of_the_run(tmp_path: Path, samples: int) -> None:
    """Nor those of ranks that have not trained yet."""
    ranks = [{"activations": 1}] * (2 if samples == 0 else 1)
    assert sent(counted(made(tmp_path / "a"), *ranks, samples=samples)) is None


def test_a_broken_count_is_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    counted(run, {"activations": 1}, {"activations": 1})
    run.rank_traffic(1).write_text('{"samples": 8, "bytes": {"activations": -1}}')
    read = record.read(run)
    assert sent(read) is None
    assert any("rank-00001.json" in note for note in read.notes)


def test_stages_of_a_run_with_a_flush_hold_one_version(tmp_path: Path) -> None:
    read = record.read(made(tmp_path / "a", pipeline=2, data=2))
    found = facts(read, Learned(), IterationTime(each_ms=(50.0,), per_sample=False, alone=False), None)
    assert found.samples_per_s == read.plan.global_batch_size / 0.05
    assert [(stage.replicas, stage.versions, stage.ahead) for stage in found.stages] == [(2, 1, None)] * 2
    assert (found.workers, found.depth, found.data_parallel) == (4, (), False)
