"""A front of time against cost holds what looking at every plan finds, and says what limits leave."""

from __future__ import annotations

import csv
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.errors import SearchError
from fasop.search import front_search
from fasop.search.arguments import Arguments, First, parse
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.by_stage import closing, look
from fasop.search.front import COST, ENERGY, Front, kilowatts
from fasop.search.front_search import front
from fasop.search.inputs import Inputs, read, scattering
from fasop.search.plan import DAY, HOUR, Plan, Run
from fasop.search.run import best_plans
from fasop.search.search import Best, explore
from fasop.search.space import node_orders
from fasop.search.space.candidates import Space
from fasop.search.space.node_sets import clusters
from launch.cli import main
from launch.control.planning.plan import make_plan
from megatron_ext.contract.reliability import best_interval_s, expected_s
from tests.support.cases import drawn, fast_first, fewer
from tests.support.fasop.plans import mixed, pipelines
from tests.support.fasop.random_clusters import random_case
from tests.support.fasop.searches import floor
from tests.support.fasop.seeds import seeds

ONE_F_ONE_B = "parallel.schedule=one_f_one_b"
WORDS = (
    *("cluster=a100x8_a10x8", "model=xl", "train=gpt2", "parallel.global_batch_size=32", "train.precision=fp16"),
    *("cluster.groups.a100.count=1", "cluster.groups.a10.count=2", "parallel.tensor=1", "parallel.recompute=none"),
)

ONCE = Run(iterations=1)


def few() -> Inputs:
    return read([*WORDS, ONE_F_ONE_B])


@cache
def front_of_few() -> list[Plan]:
    return front(few(), Arguments(pareto=First.time)).plans


@cache
def every_alike() -> list[Plan]:
    """Every plan of `few` with equal shares whose stages are alike, on every set of nodes: prices, watts and failures
    change none."""
    inputs, every = few(), Best(100_000)
    for one in (inputs, *(scattering(inputs, zero) for zero in inputs.may_scatter)):
        explore([Space(one.training, kinds, one.choices) for kinds in clusters(one.kinds)], every)
    return every.plans


def told(plans: object) -> list[tuple[float, float]]:
    assert isinstance(plans, list)
    return [(plan.total, COST.known(plan, ONCE)) for plan in plans]


def test_a_front_is_what_looking_at_every_plan_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds and the floor leave out nothing that belongs to it."""
    monkeypatch.setattr(front_search, "_front_by_stage", lambda *_: 0)  # every plan whose stages are alike
    inputs = few()
    plans = told(every_alike())
    best = [
        (time, cost)
        for time, cost in plans
        if not any(t <= time and c <= cost and (t, c) != (time, cost) for t, c in plans)
    ]
    found = told(front(inputs, Arguments(pareto=First.time)).plans)
    assert len(found) > 3
    assert found == sorted(set(best))
    assert told(list(front(inputs, Arguments(pareto=First.cost)).plans)) == found[::-1]


def test_a_front_of_energy_is_what_looking_at_every_plan_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the order of the nodes by power is another one than that by price."""
    monkeypatch.setattr(front_search, "_front_by_stage", lambda *_: 0)  # every plan whose stages are alike
    inputs = read([*WORDS, ONE_F_ONE_B, "cluster.gpus.a10.watts=70"])
    watts = {"a100": 8 * 400, "a10": 8 * 70}
    plans = [(p.total, sum(watts[n.name] for n in p.nodes) * p.total / 3.6e6) for p in every_alike()]
    best = [one for one in plans if not any(t <= one[0] and e <= one[1] and (t, e) != one for t, e in plans)]
    found = front(inputs, Arguments(pareto=First.energy)).plans
    assert len(found) > 1
    assert [(p.total, ENERGY.known(p, ONCE)) for p in found] == [pytest.approx(one) for one in sorted(set(best))[::-1]]
    cheap = front(inputs, Arguments(pareto=First.cost)).plans
    assert [p.total for p in found] != [p.total for p in cheap]


@pytest.mark.slow
def test_a_front_of_energy_is_a_table_a_file_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "front.csv", tmp_path / "front.html"
    unpriced = [f"cluster.groups.{name}.price_per_hour=null" for name in ("a100", "a10")]
    words = [*WORDS, ONE_F_ONE_B, *unpriced, "train.iterations=1000000"]
    assert main(["search", "pareto=energy", *words, f"csv={file}", f"page={page}"]) == 0
    shown = capsys.readouterr()
    row = next(csv.DictReader(file.open()))
    nodes = 8 * (400 * ("a100" in row["node placement"]) + 150 * len(re.findall(r"\ba10\b", row["node placement"])))
    kwh = nodes * float(row["estimated time (step/s)"]) / 3.6e6
    assert float(row["kwh_per_step"]) == pytest.approx(kwh, abs=1e-6)
    assert "kWh/1000 steps" in shown.out and "cluster.gpus.<key>.watts" in shown.err
    assert "the most frugal" not in shown.err and "$" not in shown.out
    assert "Time against energy" in page.read_text() and "most frugal" in page.read_text()
    assert main(["search", "pareto=energy", *words, "max_days=0.001"]) == 1
    assert re.search(r"meets max_days=0.001: the most frugal takes \S+ days for \S+ kWh", capsys.readouterr().err)


def test_a_gpu_whose_power_is_not_known_is_told() -> None:
    inputs = read([*WORDS, "cluster.gpus.a10.watts=null"])
    assert kilowatts(inputs.kinds) is None
    with pytest.raises(SearchError, match=r"cluster.gpus.a10 has none; give cluster.gpus.a10.watts=150"):
        front(inputs, Arguments(pareto=First.energy))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "layers"), [(node_orders.MOST, node_orders.OF_LAYERS), (2, 0)], ids=["all-orders", "moved-nodes"]
)
def test_no_search_on_any_of_its_sets_of_nodes_beats_a_front(
    most: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a search looks at all node orders, or goes from some to others."""
    monkeypatch.setattr(node_orders, "MOST", most)
    monkeypatch.setattr(node_orders, "OF_LAYERS", layers)
    compared = 0
    for seed in seeds(fewer(3, 5)):
        training, kinds, choices = random_case(np.random.default_rng(seed))
        kept, sets = Front(Run(iterations=1)), clusters(kinds)
        floors = LowerBounds(kinds)
        explore([Space(training, some, choices, floors) for some in sets], kept)
        for some in drawn(sets, 8):
            best = Best(10)
            explore([Space(training, some, choices)], best)
            for plan in best.plans:
                slack = 1 + 1e-9
                assert any(
                    one.total <= slack * plan.total and COST.known(one, ONCE) <= slack * COST.known(plan, ONCE)
                    for one in kept.plans
                )
            compared += len(best.plans)
    assert compared > fewer(30, 100)


def test_a_front_has_the_plan_of_a_set_whose_layers_are_moved_far() -> None:
    """318.4 ms on two nodes of each kind, where moving layers no farther than most plans gain leads to 321.5 ms."""
    sizes = ["cluster.groups.a100.count=2", "cluster.groups.a10.count=4", "parallel.global_batch_size=32"]
    inputs = read(["cluster=a100x8_a10x8", "model=xl", "train.precision=fp16", *sizes, "parallel.tensor=1"])
    kept, floors = Front(ONCE), LowerBounds(inputs.kinds)
    sets = [some for some in clusters(inputs.kinds) if all(kind.group.count in (2, 4) for kind in some)]
    explore([Space(inputs.training, some, inputs.choices, floors) for some in sets], kept)
    of_four = [plan for plan in kept.plans if Counter(node.name for node in plan.nodes) == {"a100": 2, "a10": 2}]
    assert [plan.total * 1e3 for plan in of_four] == pytest.approx([318.43], abs=0.01)


@pytest.mark.slow
def test_a_front_has_all_schedules_and_options_unless_told() -> None:
    inputs = read(WORDS)
    fastest = front(inputs, Arguments(pareto=First.time)).plans[0]
    best = Best(1)
    explore([Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)], best)
    assert fastest.total == best_plans(inputs, Arguments()).plans[0].total
    assert fastest.total < best.plans[0].total, "replicas or tensor sizes by stage are faster here"
    assert fastest.parallel.schedule != "one_f_one_b"
    assert fastest.total < front_of_few()[0].total


@pytest.mark.slow
def test_a_front_looks_for_stages_that_differ_first_on_the_nodes_of_its_fastest_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be too little time for those on all nodes; and those near plans come before all others, of which few
    GPUs are looked at."""
    looked_at = list[int]()

    def explore(training: object, sets: Sequence[Sequence[NodeKind]], *_: object) -> None:
        looked_at.append(gpus_of(sets[0]))

    for name in ("explore_near", "explore_stages"):
        monkeypatch.setattr(look, name, explore)
    inputs = few()
    kept = Front(inputs.run, inputs.fault, COST)
    sets = clusters(inputs.kinds)
    kept.add(best_plans(replace(inputs, kinds=sets[1]), Arguments(top=1, leave_out=False, by_stage=False)).plans)
    first, every = gpus_of(sets[1]), gpus_of(sets[0])
    assert front_search._front_by_stage(inputs, sets, kept, math.inf) == 0
    assert looked_at == 2 * [first, every]
    looked_at.clear()
    with monkeypatch.context() as few_stages:
        few_stages.setattr(front_search, "MOST_STAGES", 0)
        front_search._front_by_stage(inputs, sets, kept, math.inf)
    assert looked_at == [first, first, every]  # near the fastest plan in any case
    looked_at.clear()
    monkeypatch.setattr(front_search, "WHOLLY", first + every // 2)
    front_search._front_by_stage(inputs, sets, kept, math.inf)
    assert looked_at == [first, every, first]
    looked_at.clear()
    monkeypatch.setattr(front_search, "WHOLLY", 0)
    front_search._front_by_stage(inputs, sets, kept, math.inf)
    assert looked_at == [first, every, first]  # on the nodes of the fastest plan in any case


@pytest.mark.slow
def test_the_fastest_plan_of_a_front_is_that_of_a_search_and_others_are_climbed_on_from() -> None:
    """257.95 ms, where from what is near that plan only 258.86 ms are found; and 332.82 ms on four A10 nodes, where
    one look near the plan there finds 337.15 ms."""
    sizes = ["cluster.groups.a100.count=1", "cluster.groups.a10.count=4", "parallel.global_batch_size=16"]
    inputs = read(["cluster=a100x8_a10x8", "model=xl", "train.precision=fp16", *sizes])
    plans = front(inputs, Arguments(pareto=First.time)).plans
    assert plans[0].total <= best_plans(inputs, Arguments()).plans[0].total
    of_four = [plan.total * 1e3 for plan in plans if Counter(node.name for node in plan.nodes) == {"a10": 4}]
    assert of_four == pytest.approx([332.82], abs=0.01)


@pytest.mark.slow
def test_a_front_is_the_same_however_fast_the_cores_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken = told(front_of_few()), time.process_time
    monkeypatch.setattr(time, "process_time", lambda: 4 * taken())
    assert told(front(few(), Arguments(pareto=First.time)).plans) == found


@pytest.mark.slow
def test_a_search_by_stage_finds_what_the_quick_look_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its work ends before it comes to that plan among all its layouts."""
    inputs = read(WORDS)
    quick = best_plans(inputs, Arguments()).plans[0]
    monkeypatch.setattr(closing, "WHOLE", replace(closing.WHOLE, work=-1))
    assert best_plans(inputs, Arguments(by_stage=True)).plans[0].total <= quick.total
    assert not quick.parallel.alike


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "interleaved", "zb_h1"])
def test_no_plan_beats_the_floor(name: str) -> None:
    """Over all partitions of a small model, in both orders of two nodes."""
    inputs = read([*WORDS, "model.layers=8", f"parallel.schedule={name}"])
    some = [replace(k, gpus=4, group=replace(k.group, count=1)) for k in inputs.kinds]
    table = np.array([p for p in itertools.product(range(9), repeat=4) if sum(p) == 8]).T
    stages = 2 if name == "interleaved" else 4
    choices, compared = replace(inputs.choices, pipeline=(stages,), sharded_optimizer=(False,)), 0
    for group in Space(inputs.training, some, choices).groups:
        for order, one in itertools.product(([0, 1], [1, 0]), group.options):
            lines = pipelines(one, some, np.array([order])).take(np.zeros(table.shape[1], int))
            assert floor(one, some) <= lines.iteration(table).min()
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("saved", fast_first(1, [("auto",), (20,)]))
def test_of_nodes_that_fail_before_any_save_the_front_says_that_and_not_that_nothing_fits(saved: str | int) -> None:
    often = [f"cluster.groups.{name}.failures_per_day=1e9" for name in ("a100", "a10")]
    words = [*WORDS, ONE_F_ONE_B, f"train.save_interval={saved}", "train.iterations=1000"]
    with pytest.raises(SearchError, match=r"failures_per_day=1e\+09: a node would fail every .* no run ever reaches"):
        front(read([*words, *often]), Arguments(pareto=First.time))
    assert len({len(plan.nodes) for plan in front(read([*words, *often[:1]]), Arguments(pareto=First.time)).plans}) >= 1


@pytest.mark.parametrize("saved", fast_first(1, [("auto",), (20,)]))
def test_a_front_of_nodes_that_fail_is_what_looking_at_every_plan_finds(saved: str | int) -> None:
    """A10 nodes are cheap and are often taken back, so that fewer of them may be better."""
    spot = ("cluster.groups.a10.failures_per_day=400", "cluster.groups.a10.price_per_hour=2", "cluster.restart_s=20")
    inputs = read([*WORDS, ONE_F_ONE_B, *spot, f"train.save_interval={saved}", "train.iterations=1000"])
    price = {"a100": inputs.kinds[0].group.price_per_hour, "a10": 2.0}
    save_s = 12 * inputs.training.model.parameters() / 1e9

    def expected(plan: Plan) -> tuple[float, float]:
        fails = sum({"a100": 6.5 / 1000, "a10": 400.0}[node.name] for node in plan.nodes)
        mtbf_s = DAY / fails
        work = best_interval_s(save_s, mtbf_s) if saved == "auto" else 20 * plan.total
        seconds = expected_s(work, save_s, 20 + save_s, mtbf_s) * plan.total / work
        return seconds, sum(price[node.name] or 0.0 for node in plan.nodes) * seconds / HOUR

    plans = [*map(expected, every_alike())]
    best = [one for one in plans if not any(t <= one[0] and c <= one[1] and (t, c) != one for t, c in plans)]
    found = front(inputs, Arguments(pareto=First.time))
    assert [(inputs.run.seconds(p), COST.known(p, inputs.run)) for p in found.plans] == [
        pytest.approx(one, rel=1e-9) for one in sorted(set(best))
    ]
    assert len(found.plans) > 1
    assert f"train.save_interval={saved}" in " ".join(found.summary)
    asked = Arguments(pareto=First.time, max_days=inputs.run.days(found.plans[0]) * 0.999)
    with pytest.raises(SearchError, match="no plan for 1000 iterations meets max_days"):
        front(inputs, asked)


@pytest.mark.parametrize(
    ("interval", "iterations", "segments"),
    [("null", 40, [40]), ("1000000", 40, [40]), ("15", 40, [15, 15, 10]), ("20", 40, [20, 20])],
)
def test_days_with_failures_are_those_of_trainings_played_with_failures_at_random(
    interval: str, iterations: int, segments: list[int]
) -> None:
    """An interval beyond the end, or none, is the whole training; the work behind the last one is shorter."""
    words = (*WORDS, f"train.save_interval={interval}", f"train.iterations={iterations}")
    run = read([*words, "cluster.groups.a10.failures_per_day=20", "cluster.restart_s=60"]).run
    assert run.failures is not None
    node, each_s, rng = read(WORDS).kinds[1], 60.0, np.random.default_rng(5)
    kind = replace(node, group=replace(node.group, failures_per_day=20.0, count=1))
    mean_s, save_s, played = DAY / 20, run.failures.save_s, []
    for _ in range(4000):
        now = 0.0
        for segment in segments:
            whole = segment * each_s + save_s
            needs = whole
            while (failure := float(rng.exponential(mean_s))) < needs:
                now, needs = now + failure, 60 + save_s + whole
            now += needs
        played.append(now)
    expected = float(run.expected([kind], np.array([each_s]))[0]) * iterations
    assert expected == pytest.approx(np.mean(played), rel=4 * np.std(played) / np.mean(played) / 4000**0.5)
    said = run.failures.said([kind], each_s, run.length)
    assert (f"the only save (train.save_interval={interval})" in said) == (segments == [40])


def test_a_training_of_unknown_length_that_saves_only_at_its_end_has_no_days() -> None:
    inputs = read([*WORDS, "cluster.groups.a10.failures_per_day=4", "train.save_interval=null"])
    with pytest.raises(SearchError, match=r"train.save_interval=null saves only at the end.* tokens=N"):
        front(inputs, Arguments(pareto=First.time))


def test_a_training_without_checkpoints_starts_anew() -> None:
    words = (*WORDS, "train.iterations=40", "train.checkpoint=false", "cluster.groups.a10.failures_per_day=4")
    inputs = read(words)
    assert inputs.run.failures is not None and inputs.run.failures.save_s == 0
    kind = replace(inputs.kinds[1], group=replace(inputs.kinds[1].group, count=1))
    assert inputs.run.expected([kind], np.array([60.0]))[0] * 40 == pytest.approx(
        expected_s(2400, 0, inputs.run.failures.restart_s, DAY / 4)
    )
    assert "starts anew (train.checkpoint=false)" in inputs.run.failures.said([kind], 60.0, 40)


def test_a_front_of_nodes_that_never_fail_says_so() -> None:
    never = [f"cluster.groups.{name}.failures_per_day=0" for name in ("a100", "a10")]
    words = front(
        read([*WORDS, ONE_F_ONE_B, *never, "cluster.groups.a10.count=1"]), Arguments(pareto=First.time)
    ).summary
    assert any(line.endswith("of the first plan, no node fails.") for line in words)


def test_a_run_that_chooses_when_it_saves_follows_the_failures_of_its_nodes() -> None:
    often, seldom = (
        make_plan(mixed("train.save_interval=auto", f"cluster.groups.gpu2.failures_per_day={rate}"), "a/run").train
        for rate in (5, 0)
    )
    assert often.mtbf_s == pytest.approx(DAY / (5 * 7 + 6.5 / 1000), rel=0.01)
    assert seldom.mtbf_s == pytest.approx(DAY * 1000 / 6.5, rel=0.01)


def test_limits_cut_the_front_and_nothing_else() -> None:
    inputs = few()
    whole = told(front_of_few())
    time, cost = whole[1][0], whole[-2][1]
    some = Arguments(
        pareto=First.cost,
        max_days=inputs.run.iterations * time / DAY * 1.001,
        max_cost=inputs.run.iterations * whole[0][1] * 1.001,
    )
    assert told(list(front(inputs, some).plans)) == whole[1::-1]
    cheap = Arguments(pareto=First.time, max_cost=inputs.run.iterations * cost * 1.001)
    assert told(front(inputs, cheap).plans) == whole[-2:]


def test_limits_that_nothing_keeps_are_told_with_what_would() -> None:
    inputs = few()
    fastest, *_, cheapest = front_of_few()
    with pytest.raises(SearchError) as error:
        front(inputs, Arguments(pareto=First.time, max_cost=0.001, max_days=7))
    text = str(error.value)
    assert "no plan for 50 iterations meets max_cost=0.001 and max_days=7: the cheapest takes" in text
    (days, cost), (_, most) = re.findall(r"([\d.e-]+) days for \$([\d.]+)", text)
    assert float(days) == pytest.approx(inputs.run.days(cheapest), rel=0.01)
    assert float(cost) == pytest.approx(COST.known(cheapest, ONCE) * 50, rel=0.01)
    assert float(most) == pytest.approx(COST.known(fastest, ONCE) * 50, rel=0.01)


def test_a_front_is_a_table_a_file_and_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.commands.searching.plans.PLANS", tmp_path)
    file = tmp_path / "front.csv"
    assert main(["search", "pareto=cost", *WORDS, "tokens=1e6", f"csv={file}", "plan=cheap"]) == 0
    shown = capsys.readouterr()
    assert "$/1000 steps" in shown.out
    assert "the whole training has 31 iterations" in shown.err
    rows = list(csv.DictReader(file.open()))
    assert rows[-1]["schedule"] != "one_f_one_b"
    for row in rows:
        seconds, price = float(row["estimated time (step/s)"]), float(row["price_per_hour"])
        assert float(row["price_per_step"]) == pytest.approx(seconds * price / HOUR, abs=1e-6)
        assert float(row["train_cost"]) == pytest.approx(31 * seconds * price / HOUR, abs=1e-5)
        a100 = 32.7726 if "a100" in row["node placement"] else 0.0
        a10 = sum(int(n or 1) for n in re.findall(r"\ba10(?:\*(\d+))?(?=\+|$)", row["node placement"]))
        assert price == pytest.approx(a100 + 9.773 * a10)
    costs = [float(row["train_cost"]) for row in rows]
    assert costs == sorted(costs)
    words = [word for word in WORDS if not word.startswith(("parallel.tensor", "parallel.recompute"))]
    taken = compose([*words, *(f"parallel.{line}" for line in plan_keys(tmp_path / "cheap.yaml"))])
    assert str(taken.node_order) == rows[0]["node placement"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [[], ["tokens=1e6"], ["train.iterations=31"]], ids=["unknown", "tokens", "steps"])
def test_days_and_dollars_are_told_of_a_training_whose_length_was_given(
    length: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "front.csv", tmp_path / "front.html"
    assert main(["search", "pareto=time", *WORDS, *length, f"csv={file}", f"page={page}"]) == 0
    shown = capsys.readouterr()
    heading = shown.out.splitlines()[0].split()
    row = next(csv.DictReader(file.open()))
    assert [name in heading for name in ("days", "$")] == [bool(length)] * 2
    assert [bool(row[name]) for name in ("train_days", "train_cost")] == [bool(length)] * 2
    said = page.read_text()
    assert ("31 iterations take" in said, "the length of the training is not given" not in said) == (bool(length),) * 2
    assert ("add tokens=N to see days and dollars of a whole training" in shown.err) == (not length)
    assert row["price_per_step"] and "$/1000 steps" in shown.out


@pytest.mark.parametrize("limit", ["max_days=10", "max_cost=5"])
def test_a_limit_of_a_training_of_unknown_length_is_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "pareto=cost", *WORDS, limit]) == 1
    told = capsys.readouterr()
    assert (
        f"{limit} limits a whole training, so its length is needed: add tokens=N, train.samples=N or train.iterations=N"
        in told.err
    )
    assert not told.out


def plan_keys(path: Path) -> list[str]:
    return [
        line.replace(": ", "=").replace('"', "") for line in path.read_text().splitlines() if not line.startswith("#")
    ]


def test_tokens_make_iterations_rounded_up() -> None:
    assert Run(iterations=1, known=False).of_tokens(1e6, 32, 1024).iterations == math.ceil(1e6 / 32 / 1024) == 31


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pareto=both"], "pareto=both must be time, cost or energy"),
        (["max_cost=5"], "max_cost=5 limits a Pareto front of time and cost: add pareto=time"),
        (["pareto=energy", "max_cost=5"], "max_cost=5 limits a front of time and cost: use pareto=cost"),
        (["pareto=time", "max_days=-1"], "max_days=-1 must be a number above 0"),
        (["tokens=many"], "tokens=many must be a number above 0"),
    ],
    ids=["pareto", "limit", "limit-of-energy", "days", "tokens"],
)
def test_a_word_that_means_nothing_is_told(words: list[str], message: str) -> None:
    with pytest.raises(SearchError, match=re.escape(message)):
        parse(words)


def test_a_node_without_a_price_is_told() -> None:
    inputs = read([*WORDS, "cluster.groups.a10.price_per_hour=null"])
    with pytest.raises(SearchError, match=r"cluster.groups.a10 has none; give cluster.groups.a10.price_per_hour="):
        front(inputs, Arguments(pareto=First.time))
    inputs = read([*WORDS, *(f"cluster.groups.{name}.price_per_hour=null" for name in ("a100", "a10"))])
    with pytest.raises(SearchError, match=r": cluster.groups.a100?, cluster.groups.a100? have none; give cluster"):
        front(inputs, Arguments(pareto=First.time))
