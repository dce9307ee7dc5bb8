"""engine=megatron_core records what tdpp's own engine does, under the same names: one event for each pass and message.

make test-megatron
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fasop.simulation import rendezvous
from fasop.simulation.vectorised import Times
from megatron_ext.contract.events import ACTIVATIONS, ALL_REDUCE, GRADIENTS
from reports.readers.events import read_run
from tests.support.cases import each
from tests.support.megatron_ext.core_layouts import LAYOUTS, MEGATRON, MODELS
from tests.support.megatron_ext.engine_run import EngineRun, make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")

COMPARED = (
    *("forward-compute", "backward-compute", "loss-compute", "forward-send", "forward-recv", "backward-send"),
    *("backward-recv", "embedding-grads-all-reduce", "batch-generator", "optimizer"),
)


def table_of(run: EngineRun) -> pd.DataFrame:
    return read_run({rank.rank: run.run.events / f"rank-{rank.rank:05d}.bin" for rank in run.plan.ranks}).events


def events(run: EngineRun) -> Counter[tuple[object, ...]]:
    """How often each rank has each event, by micro-batch, chunk and peer."""
    assert run.go() == 0, run.stderr()
    table = table_of(run)
    rows = zip(*(table[name] for name in ("rank", "name", "iteration", "micro_batch", "chunk", "peer")), strict=True)
    return Counter(tuple(row) for row in rows if row[1] in COMPARED)


def sent(run: EngineRun) -> list[dict[str, float]]:
    files = sorted((run.run.path / "traffic").iterdir())
    kinds = (ACTIVATIONS, GRADIENTS, ALL_REDUCE)
    return [{kind: json.loads(file.read_text())["bytes"][kind] for kind in kinds} for file in files]


@pytest.mark.parametrize(("model", "layout"), each([*MODELS], ["single", "uneven", "interleaved", "data"]))
def test_the_same_passes_and_messages_are_recorded(tmp_path: Path, corpus: Path, model: str, layout: str) -> None:
    runs = [
        make_run(tmp_path / f"run{number}", corpus, *engine, *MODELS[model], *LAYOUTS[layout], "train.iterations=3")
        for number, engine in enumerate([(), (MEGATRON,)])
    ]
    ours, theirs = (events(run) for run in runs)
    assert sum(ours.values()) > 0
    assert theirs == ours


@pytest.mark.parametrize("layout", ["uneven", "interleaved"])
def test_the_same_bytes_go_from_stage_to_stage(tmp_path: Path, corpus: Path, layout: str) -> None:
    found = []
    for number, engine in enumerate([(), (MEGATRON,)]):
        run = make_run(tmp_path / f"run{number}", corpus, *engine, *MODELS["llama"], *LAYOUTS[layout])
        assert run.go() == 0, run.stderr()
        found.append(sent(run))
    assert found[0] == found[1]


def test_a_rank_is_alone_with_its_messages_and_passes(tmp_path: Path, corpus: Path) -> None:
    """Spans of a rank lie one after another."""
    run = make_run(tmp_path / "run", corpus, MEGATRON, *MODELS["gpt2"], *LAYOUTS["interleaved"], "train.iterations=3")
    assert run.go() == 0, run.stderr()
    table = table_of(run)
    for _, own in table[table.name.isin(COMPARED[:7])].sort_values("start_ns").groupby("rank"):
        assert (own.start_ns[1:].to_numpy() >= own.end_ns[:-1].to_numpy()).all()


@pytest.mark.parametrize("stages", [2, 3])
def test_interleaved_stages_wait_for_messages_when_the_simulation_says(
    tmp_path: Path, corpus: Path, stages: int
) -> None:
    partition = {2: "1-1-1-1", 3: "1-1-1-1-0-0"}[stages]
    own = (
        *LAYOUTS["interleaved"],
        *(f"parallel.pipeline={stages}", f"parallel.partition={partition}", f"parallel.global_batch_size={2 * stages}"),
        *("parallel.micro_batch_size=1", "train.iterations=2"),
    )
    run = make_run(tmp_path / "run", corpus, MEGATRON, *MODELS["gpt2"], *own)
    assert run.go() == 0, run.stderr()
    table = table_of(run)
    table = table[table.name.isin([*COMPARED[:2], *COMPARED[3:7]]) & (table.iteration == 2)]
    for stage, (_, rows) in enumerate(table.sort_values(["start_ns", "end_ns"], kind="stable").groupby("rank")):
        found = list(zip(rows.name, rows.micro_batch, rows.chunk, strict=True))
        assert found == _simulated(stages, 2, 2 * stages)[stage]


def _simulated(stages: int, chunks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """The events of each stage of a simulated iteration."""
    times = Times(*(np.ones((count, 1)) for count in (*2 * [stages * chunks], *3 * [stages])))
    every = rendezvous.events(micro_batches, times)
    return [[(event.kind, event.micro_batch, event.chunk) for event in own] for own in every]
