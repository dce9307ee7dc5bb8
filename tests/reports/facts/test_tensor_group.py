"""A rank that is slower than the others of its tensor group is the one that a page blames, and nobody else."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from torch import Tensor

from launch.commands.report import main
from megatron_ext.tasks.language.transformer import Embedding
from reports.facts.breakdown import TENSOR, waiting_ns
from reports.facts.frames import TITLES
from reports.facts.statistics import statistics
from tests.reports.conftest import Opener
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run
from tests.support.reports.in_browser import events_of, iteration, ready
from tests.support.reports.records import records

SLOWER_S = 0.01
RANKS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Two stages of two ranks each; rank 1 takes 10 ms longer in each of its 4 forward passes."""
    folder = tmp_path_factory.mktemp("tensor")
    sizes = ("parallel.tensor=2", "parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2")
    made = make_run(
        folder / "runs/tiny/20260101-000000-aaaa", make_corpus(folder), *sizes, "parallel.micro_batch_size=2"
    )
    forward = Embedding.forward

    def slow(embedding: Embedding, tokens: Tensor) -> Tensor:
        if embedding.tensor.rank == 1:
            time.sleep(SLOWER_S)
        return forward(embedding, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "forward", slow)
        assert made.go() == 0, made.stderr()
    made.run.config.touch()
    main([str(made.run.path)])
    return made


@pytest.mark.slow
def test_only_the_slow_rank_computed_longer_and_the_others_waited_for_it(run: EngineRun):
    said = (run.run.path / "report/index.html").read_text()
    stragglers = said.split("<h2>Stragglers</h2>")[1].split("</section>")[0]
    assert "computed over 5% longer than the others of" in stragglers
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in stragglers.split("<tr>")[2:]]
    # The passes of this model take 1 ms: between the ranks of the other stage, chance can be 5 %.
    assert [(row[0], row[2]) for row in rows if row[2] == "0"] == [("1", "0")]
    assert rows[0][0] == "1"

    ranks = run.run.read_plan().ranks
    figures = statistics(events_of(run.run.path, RANKS), ranks)
    usual = {key: np.median(values[:, figures.steady], axis=1) for key, values in vars(figures.spent).items()}
    slower_ms = 4 * 1e3 * SLOWER_S
    assert usual["forward"][1] > usual["forward"][0] + 0.9 * slower_ms
    assert usual["imbalance"][0] > 0.9 * slower_ms
    assert usual["bubble"][2:].min() > 1e3 * SLOWER_S, "the other stage waits at least for the first message"
    assert (usual["tensor"] > 0).all()


def test_a_tables_row_has_the_tensor_groups_communication(run: EngineRun):
    said = (run.run.path / "report/index.html").read_text()
    stages = said.split("<h2>Stages</h2>")[1].split("</section>")[0]
    heads = re.findall(r"<th[^>]*>(.*?)</th>", stages)
    row = re.findall(r"<td[^>]*>(.*?)</td>", stages)[: len(heads)]
    told = dict(zip(heads, row, strict=True))
    times = [float(told[head].replace(",", "")) for head in TITLES.values()]
    period_ms = statistics(events_of(run.run.path, RANKS), run.run.read_plan().ranks).usual_period_ms
    assert sum(times) == pytest.approx(period_ms, abs=0.05 * len(times))
    assert float(told["tensor group"]) > 0


def test_the_timeline_tells_the_same_waits(run: EngineRun, open_page: Opener):
    page = ready(open_page(run.run.path / "report/timeline.html"))
    timeline = events_of(run.run.path, RANKS)
    expected = waiting_ns(timeline, run.run.read_plan().ranks)
    shown = records(timeline)["iteration"] == iteration(page)
    said = page.evaluate("Array.from(events.name.keys()).slice(0, events.measured).map((i) => events.waiting[i])")
    assert [wait for wait, here in zip(said, shown, strict=True) if here] == expected[shown].tolist()
    found = page.evaluate(
        "chart.what.find(0, chart.length, 0, chart.rows.length - 1).filter(({wait}) => wait > 0).length"
    )
    assert found == np.count_nonzero(expected[shown] > 0)
    inside = np.isin(
        records(timeline)["name"], [timeline.names.index(name) for name in TENSOR if name in timeline.names]
    )
    assert expected[shown & inside].max() > 0.9e9 * SLOWER_S
