"""Several runs beside each other: what differs, which are best, and what became of the others."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median as statistics_of

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.rundir import RunDir
from conf.visible import span
from launch.commands.report import main
from megatron_ext.contract.adaptive.config import AdaptConfig
from reports.facts.statistics import statistics
from reports.figures.chart import Axis, Item, dots, parallel
from reports.pages import comparison, sweep_page
from reports.pages.comparison import Outcome, alike_in_speed, front, outcome, ranking, repeats, swept
from reports.readers import record
from reports.readers.megatron_log import Sizes
from reports.sources import Source
from tests.reports.conftest import Opener
from tests.reports.test_cli import Found, Judgement
from tests.support.reports.in_browser import until
from tests.support.reports.legacy import Job, calls, log
from tests.support.reports.synthetic import PRICE_PER_HOUR, Shape, make_run

NAN = math.nan
BASE = Outcome(
    name="tiny/a",
    link="a.html",
    verdict=None,
    settings={},
    iteration_ms=1.0,
    tokens_per_s=100.0,
    utilisation=NAN,
    dollars=1.0,
    memory_gib=NAN,
    loss=NAN,
)


def measured(link: str, *tokens_per_s: float, **settings: str) -> Outcome:
    """With lines of so many tokens a second."""
    return replace(
        BASE,
        name=link,
        link=link,
        settings={"parallel.partition": link, **settings},
        tokens_per_s=statistics_of(tokens_per_s),
        lines={"tokens_per_s": tokens_per_s},
    )


STAMPS = ("20260101-000000-aaaa", "20260101-000001-bbbb", "20260101-000002-cccc")


@dataclass(frozen=True)
class Good(Judgement):
    state: str = "succeeded"
    exit_code: int = 0
    reason: str = "all ended well"


def judge(run: RunDir) -> Found:
    return Found(Judgement(reason="Rank 1 <ran> out of memory.") if run.path.name == STAMPS[1] else Good())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one name: the second failed, the third has other layers and micro-batches."""
    folder = tmp_path_factory.mktemp("sweep") / "runs/tiny"
    for stamp, shape in zip(STAMPS, (Shape(), Shape(layers=9), Shape(layers=12, micro_batches=6)), strict=True):
        make_run(folder / stamp, shape)
    (folder / STAMPS[1] / "metrics.jsonl").write_text("")
    return folder


def test_a_folder_of_runs_is_compared_and_the_page_lies_in_it(runs: Path, capsys: pytest.CaptureFixture[str]):
    main([str(runs)], judge)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == [
        str(runs / stamp / "report" / name) for stamp in STAMPS for name in ("index.html", "timeline.html")
    ]
    assert printed[-1] == str(runs / "comparison.html")


def test_the_comparison_begins_with_the_best_run_and_ends_with_those_that_failed(runs: Path, open_page: Opener):
    main([str(runs / stamp) for stamp in STAMPS], judge)
    page = open_page(runs / "comparison.html", viewport={"width": 1366, "height": 768})
    metrics = {
        stamp: [json.loads(line) for line in (runs / stamp / "metrics.jsonl").read_text().splitlines()]
        for stamp in STAMPS
    }
    speed = {stamp: sum(line["tokens_per_s"] for line in lines[1:]) / 2 for stamp, lines in metrics.items() if lines}
    fastest = max(speed, key=lambda stamp: speed[stamp])
    answer = page.inner_text(".verdict")
    rates = [line["tokens_per_s"] for line in metrics[fastest][1:]]
    assert f"tiny/{fastest}: {speed[fastest]:,.0f} ± {(max(rates) - min(rates)) / 2:,.0f} tokens/s" in answer
    assert "(n = 2)" in answer
    assert "2 runs to compare, 1 without a result" in answer
    heads = page.locator("table.runs th").all_inner_texts()
    assert heads[2:6] == ["model.layers", "global_batch_size", "partition", "iteration ms"]
    rows = page.locator("table.runs tbody tr")
    assert rows.count() == 2
    assert f"tiny/{fastest} ★ best" in rows.nth(0).inner_text()
    failed = page.locator("section", has_text="Without a result").last
    assert "Rank 1 <ran> out of memory." in failed.inner_text()
    links = page.locator("td a").evaluate_all("(all) => all.map((one) => one.href)")
    assert sorted(set(links)) == [(runs / stamp / "report/index.html").as_uri() for stamp in STAMPS]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1366


def test_an_outcome_has_what_the_run_reached_and_costs(tmp_path: Path):
    run = RunDir(tmp_path / "runs/tiny" / STAMPS[0])
    make_run(run.path, Shape(pipeline=2, data=2, ranks_per_node=2))
    known = record.read(run)
    found = outcome(known, Good(), "x.html")
    speed = known.metrics["tokens_per_s"].iloc[1:].mean()
    assert found.tokens_per_s == pytest.approx(speed)
    costs = 2 * PRICE_PER_HOUR / 3600 / known.metrics["tokens_per_s"].iloc[1:] * 1e6
    assert found.dollars == pytest.approx(costs.median())
    assert found.memory_gib == pytest.approx(11_000.25 / 1024)
    assert found.settings["parallel.partition"] == "4-4"
    assert not found.failed
    assert outcome(known, Judgement(), "x.html").failed


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        pytest.param([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], ["b"], id="one"),
        pytest.param([{"a": "1"}, {"a": "1"}], [], id="none"),
        pytest.param([{"a": "1"}, {"a": "1", "b": "2"}], ["b"], id="only-in-one"),
        pytest.param([{"a": "1"}, {}, {"a": "2"}], ["a"], id="one-unknown"),
        pytest.param(
            [{"model.name": "xl", "model.layers": "48"}, {"model.name": "small", "model.layers": "24"}],
            ["model.name"],
            id="a-name-stands-for-its-part",
        ),
        pytest.param(
            [{"model.name": "xl", "model.layers": "48"}, {"model.name": "xl", "model.layers": "24"}],
            ["model.layers"],
            id="same-name",
        ),
    ],
)
def test_what_was_swept_is_what_differs(settings: list[dict[str, str]], keys: list[str]):
    assert swept([replace(BASE, settings=one) for one in settings]) == keys


@given(st.lists(st.tuples(st.integers(1, 9), st.one_of(st.just(NAN), st.integers(1, 9)), st.booleans()), max_size=12))
def test_no_run_beats_one_of_the_front_and_one_of_the_front_equals_or_beats_every_other(rows: list[tuple]):
    verdicts = {True: Good(), False: Judgement()}
    outcomes = [
        replace(
            measured(str(number), speed, speed),
            name="same",
            dollars=dollars,
            lines={"tokens_per_s": [speed] * 2, **({} if math.isnan(dollars) else {"dollars": [dollars] * 2})},
            verdict=verdicts[good],
        )
        for number, (speed, dollars, good) in enumerate(rows)
    ]
    found = front(outcomes)
    known = [one for one in outcomes if not one.failed and not math.isnan(one.dollars)]
    if found is None:
        assert not known
        return
    ahead = [one for one in known if one.link in found.runs]
    assert ahead
    for one in known:
        better = [
            other
            for other in known
            if (other.tokens_per_s >= one.tokens_per_s and other.dollars < one.dollars)
            or (other.tokens_per_s > one.tokens_per_s and other.dollars <= one.dollars)
        ]
        assert (one.link in found.runs) == (not better)
    ranked = ranking(outcomes)
    assert ranked is not None
    assert ranked.speed(ranked.pools[0]).median == max(one.tokens_per_s for one in outcomes if not one.failed)


def test_without_prices_the_front_weighs_memory():
    outcomes = [replace(BASE, link=str(gib), dollars=NAN, memory_gib=gib) for gib in (3.0, 2.0)]
    found = front(outcomes)
    assert found == comparison.Front(against="memory_gib", runs=frozenset({"2.0"}))


def test_what_was_rehearsed_is_not_called_better_than_what_was_measured():
    outcomes = [replace(measured("emulated", 9, 9), emulated=True), measured("measured", 1, 1)]
    ranked, found = ranking(outcomes), front(outcomes)
    assert ranked is not None
    assert [pool.links for pool in ranked.pools] == [{"measured"}]
    assert (ranked.best, found and found.runs) == (None, {"measured"})
    alone = ranking(outcomes[:1])
    assert alone is not None
    assert alone.pools[0].runs == outcomes[:1]


def test_emulated_times_are_told_to_be_emulated(tmp_path: Path):
    for stamp, rehearsal in zip(STAMPS, (None, "virtual"), strict=False):
        make_run(tmp_path / "runs/tiny" / stamp, Shape(rehearsal=rehearsal))
    records = [record.read(RunDir(tmp_path / "runs/tiny" / stamp)) for stamp in STAMPS[:2]]
    real, rehearsed = (outcome(known, Good(), f"{number}.html") for number, known in enumerate(records))
    assert not math.isnan(real.memory_gib)
    assert math.isnan(rehearsed.memory_gib)
    page = sweep_page.render([real, rehearsed])
    assert "1 of them rehearsed, with emulated times" in page
    assert page.count("<td>succeeded · emulated</td>") == 1
    assert "rehearsed" not in sweep_page.render([real])


def test_logs_that_do_not_tell_their_tokens_are_compared_by_iterations(tmp_path: Path, open_page: Opener):
    for number, job in enumerate((Job(), Job(micro_batches=9))):
        (tmp_path / f"n{number}.out").write_text(log(job, calls(job)))
    main([str(tmp_path / "n0.out"), str(tmp_path / "n1.out")])
    page = open_page(tmp_path / "comparison.html")
    assert page.locator("table.runs tbody tr").count() == 2
    said = page.inner_text(".verdict")
    assert len(re.findall(r"n\d: [\d.,]+( ± [\d.,]+)? ms per iteration \(n = \d+\)", said)) == 2


def test_only_failures_have_a_page_that_says_so():
    page = sweep_page.render([replace(BASE, verdict=Judgement()), replace(BASE, name="b", iteration_ms=NAN)])
    assert page == sweep_page.render([replace(BASE, verdict=Judgement()), replace(BASE, name="b", iteration_ms=0.0)])
    assert "No result" in page
    assert "Rank 1 &lt;ran&gt; out of memory." in page
    assert "no iteration logged" in page


def test_hostile_names_and_settings_are_shown_as_they_are(tmp_path: Path, open_page: Opener):
    hostile = "</script><img src=x onerror=alert(1)>\"'"
    outcomes = [
        replace(
            BASE, name=hostile + number, settings={f"parallel.{hostile}": hostile + number}, link=f"a%22{number}.html"
        )
        for number in "12"
    ]
    bad = replace(BASE, name="bad", verdict=Judgement(state=hostile, reason=hostile))
    path = tmp_path / "page.html"
    path.write_text(sweep_page.render([*outcomes, bad]))
    page = open_page(path)
    assert page.locator("img").count() == 0
    assert hostile in page.inner_text("main")


def test_a_line_crosses_every_axis_where_its_values_are_and_has_a_gap_where_one_is_not_known():
    items = [Item(name=name, link="x", tone="") for name in "ab"]
    axes = [
        Axis(title="cut", values=["1-3", "3-1"]),
        Axis(title="ms", values=[1.0, NAN]),
        Axis(title="n", values=[5.0, 7.0]),
    ]
    whole, broken = parallel(items, axes).data
    assert list(whole.y) == [0.0, 0.5, 0.0]
    assert [None if math.isnan(y) else y for y in broken.y] == [1.0, None, 1.0]


def test_of_many_values_some_are_written():
    many = Axis(title="n", values=[str(number) for number in range(40)])
    drawn = parallel([Item(name="a", link="x", tone="")] * 40, [many])
    assert 5 <= len(drawn.layout.annotations) <= 14


def test_numbers_as_text_are_in_their_order():
    assert [text for text, _ in Axis(title="", values=["10", "9", "2", "x"]).marks()] == ["2", "9", "10", "x"]


def evaluated(run: Path, losses: list[float]) -> None:
    """Gives the last lines of a run's metrics an evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, loss in zip(lines[-len(losses) :], losses, strict=True):
        line |= {"valid_loss": loss, "evaluation_s": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_time_to_quality_says_what_each_run_had_spent(tmp_path: Path, open_page: Opener):
    folder = tmp_path / "runs/tiny"
    for stamp, losses in zip(STAMPS[:2], ([3.0, 2.5], [2.75, 2.0]), strict=True):
        make_run(folder / stamp, Shape())
        evaluated(folder / stamp, losses)
    main([str(folder)], lambda _run: Found(Good()))
    page = open_page(folder / "comparison.html", viewport={"width": 1366, "height": 768})
    rows = [row.split("\t") for row in page.locator("table.quality tbody tr").all_inner_texts()]
    first, second = (f"tiny/{stamp}" for stamp in STAMPS[:2])
    assert [row[:2] for row in rows] == [
        ["loss ≤ 2.5", first],
        ["loss ≤ 2.5", second],
        ["loss ≤ 2", second],
        ["loss ≤ 2", first],
    ]
    assert rows[3][2:] == ["not reached"]
    known = record.read(RunDir(folder / STAMPS[0])).metrics
    last = known.iloc[-1]
    hours = float((known["elapsed_ms"] * known["iteration"].diff().fillna(1)).sum() / 3.6e6 + 2 / 3600)
    dollars = hours * PRICE_PER_HOUR * len(record.read(RunDir(folder / STAMPS[0])).plan.nodes)
    shown = [f"{last['iteration']:,.0f}", f"{last['consumed_samples']:,.0f}", span(3600 * hours, 3), f"{dollars:,.4g}"]
    assert rows[0][2:] == rows[1][2:] == rows[2][2:] == shown
    assert page.evaluate("document.documentElement.scrollWidth") <= 1366


def test_runs_without_evaluations_have_no_time_to_quality(runs: Path):
    main([str(runs)], judge)
    assert "Time to quality" not in (runs / "comparison.html").read_text()


def test_runs_on_unlike_gpus_say_how_busy_each_type_is(tmp_path: Path, open_page: Opener):
    """By the passes of the events, over the time from one iteration to the next."""
    folder = tmp_path / "runs/tiny"
    for stamp in STAMPS[:2]:
        make_run(folder / stamp, Shape(pipeline=1, data=2, ranks_per_node=1))
        plan = json.loads((folder / stamp / "plan.json").read_text())
        plan["nodes"][1]["gpu"] = "Other"
        (folder / stamp / "plan.json").write_text(json.dumps(plan))
    main([str(folder)], lambda _run: Found(Good()))
    page = open_page(folder / "comparison.html", viewport={"width": 1366, "height": 768})
    head = page.locator("table.throughput thead th").all_inner_texts()
    first = page.locator("table.throughput tbody tr").first.locator("td").all_inner_texts()
    row = dict(zip(head, first, strict=True))
    found = Source.find(tmp_path, str(folder / STAMPS[0]), Sizes()).read()
    figures = statistics(found.timeline, found.record.plan.ranks)
    for rank, gpu in enumerate(node.gpu for node in found.record.plan.nodes):
        share = float(np.median(figures.spent.compute[rank, figures.steady] / figures.period_ns[figures.steady] * 1e6))
        assert 0 < share <= 1
        assert row[f"{gpu} busy"] == f"{share:.0%}"


def test_a_batch_that_adapts_is_compared_by_the_samples_that_it_trained(tmp_path: Path):
    folder = tmp_path / "runs/tiny" / STAMPS[0]
    make_run(folder, Shape())
    adapt = AdaptConfig("noise", 0.3, 8, 64, 10, 0.1, 4, "sqrt", rebalance=False)
    plan = json.loads((folder / "plan.json").read_text())
    plan["train"]["samples"] = 1000
    (folder / "plan.json").write_text(json.dumps(plan | {"adapt": vars(adapt)}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, consumed, elapsed_ms in zip(lines[:3], (8, 16, 48), (999.0, 100.0, 200.0), strict=True):
        line |= {"consumed_samples": consumed, "elapsed_ms": elapsed_ms}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    found = outcome(record.read(RunDir(folder)), Good(), "x.html").facts
    assert found.samples_per_s == pytest.approx((48 - 8) / 0.3)


def test_of_two_runs_it_is_shown_what_differs_and_an_iteration_of_each_on_one_scale(tmp_path: Path, open_page: Opener):
    folder = tmp_path / "runs/tiny"
    for stamp, shape in zip(STAMPS, (Shape(iterations=4), Shape(iterations=4, layers=9)), strict=False):
        make_run(folder / stamp, shape)
    main([str(folder / stamp) for stamp in STAMPS[:2]])
    page = open_page(folder / "comparison.html", viewport={"width": 1366, "height": 768})
    page.wait_for_selector("body[data-difference]")
    said = page.inner_text("#difference .reason")
    assert re.match(r"(B is [\d.]+ ms (slower|faster) per iteration|On average B takes [\d.]+ against [\d.]+ ms)", said)
    rows = page.locator("#difference table tbody tr").evaluate_all("(all) => all.map((row) => row.cells[4].innerText)")
    more = [float(cell.replace(",", "")) for cell in rows]
    assert more == sorted(more, reverse=True)
    assert len(more) > 0
    assert page.evaluate("iterations.then(([a, b]) => a.length === b.length && a.shown.found > 0 && b.shown.found > 0)")
    page.focus("#iteration-A .rows")
    page.keyboard.press("+")
    until(page, "iterations.then(([a, b]) => a.times !== null && String(a.times) === String(b.times))")


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        pytest.param([100, 104, 96, 102], [80, 84, 76, 82], True, id="apart"),
        pytest.param([100, 110, 90, 105], [90, 100, 80, 95], False, id="within-the-spread"),
        pytest.param([100], [50], False, id="one-line-each"),
        pytest.param([100, 101, 99], [50], False, id="one-line-of-one"),
    ],
)
def test_nothing_is_called_best_within_the_spread(first: list[float], second: list[float], best: bool):
    ranked = ranking([measured("2-2", *second), measured("1-3", *first)])
    assert ranked is not None
    assert ranked.pools[0].links == {"1-3"}
    assert (ranked.best is not None) is best
    page = sweep_page.render([measured("2-2", *second), measured("1-3", *first)])
    assert ("Best: parallel.partition=1-3" in page) is best
    assert ("★ best" in page) is best
    assert ("No clear best" in page) is not best


def with_train(link: str, tokens_per_s: float, **train: object) -> Outcome:
    settings = {f"train.{key}": value if isinstance(value, str) else json.dumps(value) for key, value in train.items()}
    return measured(link, *[tokens_per_s] * 3, **{**settings, "parallel.partition": "2-2"})


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ({"iterations": 20}, {"iterations": 200}),
        ({"seed": 1}, {"seed": 2}),
        ({"lr": 1e-4}, {"lr": 0.0}),
        ({"lr_policy": "cosine"}, {"lr_policy": "constant"}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.01}),
        ({"eval_interval": 5}, {"eval_interval": None}),
        ({"until": "loss<=2"}, {"until": None}),
    ],
)
def test_a_key_that_cannot_change_the_speed_wins_nothing(train: dict[str, object], other: dict[str, object]):
    """However far the two are apart: it is chance, or the machine."""
    outcomes = [with_train("a", 100.0, **train), with_train("b", 50.0, **other)]
    ranked = ranking(outcomes)
    assert ranked is not None
    assert len(ranked.pools) == 1
    page = sweep_page.render(outcomes)
    key = next(iter(train))
    assert "Best" not in page
    assert "★ best" not in page
    assert f"train.{key} does not change how long an iteration takes" in page


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ({"precision": "fp32"}, {"precision": "bf16"}),
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}),
        ({"clip_grad": 1.0}, {"clip_grad": 0.0}),
        ({"save_interval": 1}, {"save_interval": None}),
        ({"compile": True}, {"compile": False}),
    ],
)
def test_a_key_that_can_change_the_speed_is_named(train: dict[str, object], other: dict[str, object]):
    ranked = ranking([with_train("a", 100.0, **train), with_train("b", 50.0, **other)])
    assert ranked is not None
    assert ranked.best is not None


def test_repeats_are_pooled_with_all_of_their_lines():
    runs = [with_train(f"{seed}", 10.0 * seed, seed=seed, iterations=20) for seed in (1, 2, 3)]
    other = measured("other", 900, 901, 902, **{"train.seed": "1", "train.iterations": "20"})
    longer = with_train("longer", 40.0, seed=1, iterations=40)
    known = [pool for pool in repeats([*runs, other, longer]) if len(pool.runs) > 1]
    assert [pool.links for pool in known] == [{"1", "2", "3"}]
    spread = known[0].spread("tokens_per_s")
    assert spread is not None
    assert (spread.median, spread.count) == (20, 9)
    assert {pool.links for pool in alike_in_speed([*runs, other, longer])} == {
        frozenset({"1", "2", "3", "longer"}),
        frozenset({"other"}),
    }
    page = sweep_page.render([*runs, other, longer])
    assert "20<br><small>± 10 (n = 9)</small>" in page
    assert "Best: parallel.partition=other" in page


def test_a_figure_is_the_median_of_the_lines_of_the_files_with_their_spread(tmp_path: Path):
    """Read again from metrics.jsonl."""
    folder, each = tmp_path / "runs/tiny", []
    for stamp in STAMPS:
        make_run(folder / stamp, Shape(iterations=9))
        lines = [json.loads(line) for line in (folder / stamp / "metrics.jsonl").read_text().splitlines()]
        each += [line["elapsed_ms"] for line in lines[1:]]
    main([str(folder)], lambda _run: Found(Good()))
    low, high = np.quantile(each, [0.1587, 0.8413], method="weibull")
    page = (folder / "comparison.html").read_text()
    assert "One configuration" in page
    assert f"{np.median(each):,.1f} ± {(high - low) / 2:,.1f} ms per iteration (n = {len(each)})" in page
    assert f"{np.median(each):,.1f}<br><small>± {(high - low) / 2:,.1f} (n = {len(each)})</small>" in page


def test_axes_of_figures_begin_at_0(tmp_path: Path):
    near = Axis(title="ms", values=[98.0, 100.0], from_zero=True)
    assert near.marks()[0] == ("0", 0.0)
    assert near.place(0) == pytest.approx(0.98)
    page = sweep_page.render([measured("1-3", 98.0, 98.0), measured("2-2", 100.0, 100.0)])
    assert "Axes of figures begin at 0." in page
    drawn = dots([Item(name=name, link="x", tone="") for name in "ab"], near, near)
    assert drawn.layout.xaxis.range[0] == drawn.layout.yaxis.range[0] == 0


def many(count: int, keys: int) -> list[Outcome]:
    """Runs of a sweep over as many keys, all of which can change the speed."""
    values = {
        "parallel.partition": ("12-12-12-12", "13-11-12-12", "10-14-12-12"),
        "parallel.micro_batch_size": ("1", "2"),
        "parallel.schedule": ("one_f_one_b", "zero_bubble", "interleaved"),
        "parallel.recompute": ("none", "full"),
        "parallel.global_batch_size": ("64", "128"),
        "train.precision": ("bf16", "fp32"),
        "model.hidden": ("1024", "1536"),
        "model.layers": ("24", "48"),
        "data.prefix": ("/data/corpora/wikipedia-2026-with-a-long-name/text_document", "/data/books"),
        "parallel.tensor": ("1", "2"),
    }
    found = []
    for run in range(count):
        tokens = [60_000.0 + 1000 * run + 100 * at for at in range(11)]
        lines = {"tokens_per_s": tokens, "iteration_ms": [1.6e7 / one for one in tokens]}
        lines |= {"utilisation": [one / 2e5 for one in tokens], "dollars": [4000 / one for one in tokens]}
        found.append(
            replace(
                BASE,
                name=f"a-sweep-over-many-keys/20260101-0000{run:02}-aaaa",
                link=f"{run}.html",
                settings={key: some[(run // (1 + at)) % len(some)] for at, (key, some) in enumerate(values.items())},
                lines=lines,
                memory_gib=10 + run / 7,
                loss=2 + run / 9,
                **{name: statistics_of(each) for name, each in lines.items()},
            )
        )
    return [replace(one, settings=dict([*one.settings.items()][:keys])) for one in found]


@pytest.mark.parametrize("keys", [8, 10])
def test_twenty_runs_over_many_keys_fit_paper(keys: int, tmp_path: Path, open_page: Opener):
    """With everything unfolded; each chart has no more axes than their labels leave room for."""
    path = tmp_path / "comparison.html"
    path.write_text(sweep_page.render(many(20, keys)))
    page = open_page(path)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for wide, width in ((False, 718), (True, 1046)):
        page.set_viewport_size({"width": width, "height": 1000})
        cut = page.evaluate(
            """(wide) => [...document.querySelectorAll("section")]
              .filter((one) => (getComputedStyle(one).page === "wide") === wide)
              .flatMap((one) => [...one.querySelectorAll("table, .main-svg")])
              .filter((one) => one.getBoundingClientRect().right > innerWidth)
              .map((one) => one.textContent.slice(0, 80))""",
            wide,
        )
        assert cut == [], width
    axes = [len(re.findall(r'"type": ?"line"', one)) for one in re.findall(r'"shapes": ?\[.*?\]', path.read_text())]
    assert axes
    assert max(axes) <= sweep_page.MOST_AXES
    assert all(key.split(".")[-1] in page.inner_text("main") for key in many(1, keys)[0].settings)


def test_a_spread_of_less_than_the_digits_of_its_median_is_not_0():
    assert "± 0.000 " not in sweep_page.render(many(3, 4))
