"""tdpp's own divisions: as good as all others tried one by one, and never worse than the public optimizer's layouts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema.experiment import Gpu, NodeGroup
from fasop.costs.hardware import NodeKind
from fasop.errors import SearchError
from fasop.graphs.division import Level, Options, Sync
from fasop.graphs.graph import Graph, Operators
from fasop.graphs.own import recurrence
from fasop.graphs.own.cuts import Work
from fasop.graphs.own.machines import Machines, of_levels, of_nodes
from fasop.graphs.own.on_levels import on_levels
from fasop.graphs.own.on_nodes import on_nodes
from fasop.graphs.own.recurrence import Best, fastest
from fasop.graphs.own.versioned_memory import VersionedMemory
from fasop.graphs.public.recurrence import divide, optimize
from fasop.graphs.public.states import States
from tests.support.cases import fewer
from tests.support.profiled_graphs import branches, chain, node, random_graph


class Brute:
    """Every division on contiguous ranks, one after another, with the costs as the documentation has them."""

    def __init__(self, operators: Operators, times: np.ndarray, machines: Machines, options: Options) -> None:
        self.operators, self.times, self.machines, self.options = operators, times, machines, options
        every = range(operators.count)
        self.cuts = [
            frozenset(some)
            for size in range(operators.count + 1)
            for some in combinations(every, size)
            if all(operators.takes[one] >> other & 1 == 0 or other in some for one in some for other in every)
        ]
        self.best = math.inf
        self._extend(frozenset(), 0, 0, 0.0)

    def _sent(self, before: frozenset[int]) -> float:
        users = self.operators.users
        inside = sum(1 << one for one in before)
        return sum(self.operators.activations[one] for one in before if users[one] & ~inside)

    def _link(self, sent: float, cut: int, before: int, behind: int) -> float:
        load: dict[tuple[int, int], float] = {}
        rounds = math.lcm(before, behind)
        for batch in range(rounds):
            here, there = cut - before + batch % before, cut + batch % behind
            level = max(n for n, units in enumerate(self.machines.units) if units[here] != units[there])
            for rank in (here, there):
                key = (level, int(self.machines.units[level, rank]), int(rank == here))
                load[key] = load.get(key, 0.0) + 2 * sent * self.machines.s_per_byte[here, there] / rounds
        return max(load.values())

    def _extend(self, done: frozenset[int], ranks: int, last: int, slowest: float) -> None:
        total, operators, machines = self.machines.count, self.operators, self.machines
        for cut in self.cuts:
            members = sorted(cut - done)
            if not done < cut or not any(self.times[one].any() or operators.parameters[one] for one in members):
                continue
            for replicas in range(1, 2 if self.options.straight else total - ranks + 1):
                if (ranks + replicas == total) != (len(cut) == operators.count):
                    continue
                held = list(range(ranks, ranks + replicas))
                compute = max(sum(self.times[one, machines.kinds[rank]] for one in members) for rank in held)
                parameters = sum(operators.parameters[one] for one in members)
                summing = 0.0
                if replicas > 1 and parameters:
                    ring = [*zip(held, [*held[1:], held[0]], strict=True)]
                    rate = max(machines.s_per_byte[pair] for pair in ring)
                    summing = 2 * (replicas - 1) * max(machines.latency_s[pair] for pair in ring)
                    summing += machines.rounds * (replicas - 1) / replicas * parameters * rate
                versions = (total - 1 - ranks) // replicas + 1
                kept = sum(operators.activations[one] for one in members) + self._sent(done)
                memory = parameters * (versions + 2) + versions * kept
                if memory > min(machines.memory_bytes[rank] for rank in held):
                    continue
                stage = max(compute, summing) if self.options.sync is Sync.max else compute + summing
                seconds = max(slowest, stage / replicas)
                if done:
                    seconds = max(seconds, self._link(self._sent(done), ranks, last, replicas))
                if seconds >= self.best:
                    continue
                if len(cut) == operators.count:
                    self.best = seconds
                else:
                    self._extend(cut, ranks + replicas, replicas, seconds)


def best_of(operators: Operators, times: np.ndarray, machines: Machines, options: Options) -> Best | None:
    limited = bool(np.isfinite(machines.memory_bytes).any())
    work = Work(operators, times, limited=limited)
    return fastest(work, machines, [machines.count], options, VersionedMemory())


def machines_of(seed: int) -> Iterator[Any]:
    """Networks of up to 5 ranks, of one kind or of two."""
    memory = [None, 1.5e8, 6e7][seed % 3]
    yield of_levels([Level(machines=[2, 3, 4, 5][seed % 4], bytes_per_s=1e9)], memory)
    yield of_levels([Level(machines=2, bytes_per_s=1e10), Level(machines=2, bytes_per_s=5e8)], memory)
    kinds = [kind("fast", 1, 2, 8, 20), kind("slow", 3, 1, 4, 5)]
    bytes_ = [math.inf, math.inf] if memory is None else [memory, memory / 2]
    yield of_nodes(kinds, [1, 0, 1, 1][: 2 + seed % 3], [0, 1], bytes_)


def kind(name: str, count: int, gpus: int, intra: float, inter: float, memory: float = 40) -> NodeKind:
    rates = {"fp32_tflops": 1, "fp16_tflops": 1, "bf16_tflops": 1, "memory_gb_per_s": 1}
    gpu = Gpu(name=name, memory_gib=memory, **rates)
    group = NodeGroup(
        count=count,
        gpus_per_node=gpus,
        gpu=name,
        intra_gbit_per_s=intra,
        intra_latency_us=5,
        inter_gbit_per_s=inter,
        inter_latency_us=50,
    )
    return NodeKind(name=name, group=group, gpu=gpu, gpus=gpus, profile=None)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_no_division_that_is_tried_by_hand_is_better(seed: int) -> None:
    """Of random graphs of up to 9 operators on up to 5 ranks."""
    operators = Operators(random_graph(seed, 3 + seed % 7))
    chance = random.Random(seed)
    slower = np.array([chance.uniform(1.2, 3) for _ in range(operators.count)])
    for machines in machines_of(seed):
        times = np.stack([operators.compute_s, operators.compute_s * slower], axis=1)
        if len(set(machines.kinds)) == 1:
            times = times[:, :1]
        for options in (Options(), Options(straight=True), Options(sync=Sync.max)):
            brute = Brute(operators, times, machines, options)
            found = best_of(operators, times, machines, options)
            if found is None:
                assert brute.best == math.inf
                continue
            assert found.seconds == pytest.approx(brute.best, rel=1e-9)
            assert found.bound == pytest.approx(found.seconds, rel=1e-9)
            assert sum(piece.replicas for piece in found.pieces) == machines.count
            slowest = max(
                max(float(options.sync.together(one.takes.compute_s, one.takes.summing_s)), one.takes.received_s)
                for one in found.pieces
            )
            assert slowest == pytest.approx(found.seconds, rel=1e-9)
            for piece in found.pieces:
                held = machines.memory_bytes[piece.begin : piece.begin + piece.replicas]
                assert piece.memory_bytes <= held.min()


def rooted(seed: int, operators: int) -> Graph:
    """With one source, as the public optimizer needs it."""
    several = random_graph(seed, operators).nodes
    return Graph((several[0], *(replace(one, inputs=one.inputs or (several[0].name,)) for one in several[1:])))


@pytest.mark.parametrize("seed", range(fewer(12, 30)))
def test_never_worse_than_the_nested_answer(seed: int) -> None:
    """As far as somebody can make it."""
    graph = rooted(seed, 4 + seed % 6)
    levels = [Level(machines=2, bytes_per_s=1e10), Level(machines=2 + seed % 2, bytes_per_s=[1e9, 1e8][seed % 2])]
    options = Options(compression=1.0)
    public = optimize(States(Operators(graph)), levels, options, strict=True)
    ours = on_levels(graph, levels, options, VersionedMemory())
    assert ours.pipeline_s <= public.pipeline_s * (1 + 1e-9)
    assert ours.data_parallel_s == pytest.approx(public.data_parallel_s)
    stages = {one.name: one.stage for one in ours.graph.nodes}
    assert None not in stages.values()
    assert all((stages[name] or 0) <= (stages[one.name] or 0) for one in ours.graph.nodes for name in one.inputs)


def test_the_public_answer_may_be_one_that_nobody_can_make() -> None:
    """Of a stage that begins behind one branch and ends behind another one it counts the difference of their times."""
    levels = [Level(machines=2, bytes_per_s=1e10), Level(machines=2, bytes_per_s=1e9)]
    found = []
    for seed in range(60):
        states = States(Operators(rooted(seed, 9)))
        public, strict = (
            optimize(states, levels, Options(compression=1.0), strict=one).pipeline_s for one in (False, True)
        )
        assert public <= strict * (1 + 1e-9)
        found.append(public < strict * (1 - 1e-6))
    assert any(found)
    assert not all(found)


def test_a_chain_has_the_public_optimum_and_branches_a_better_one() -> None:
    """The public states put the second source where it is first needed."""
    levels = [Level(machines=4, bytes_per_s=1e9)]
    public, ours = (
        [by(chain()), by(branches())]
        for by in (
            lambda graph: divide(graph, levels, Options(compression=1.0)),
            lambda graph: on_levels(graph, levels, Options(), VersionedMemory()),
        )
    )
    assert [one.pipeline_s for one in public] == pytest.approx([0.01521, 0.022])
    assert [one.pipeline_s for one in ours] == pytest.approx([0.01521, 0.018])
    assert ours[0].replicas == "2-1-1"


def test_memory_is_that_of_the_versions_and_mini_batches_in_flight() -> None:
    """The public rule lets data parallelism have nothing at all."""
    levels = [Level(machines=3, bytes_per_s=1e12)]
    ours = on_levels(chain(), levels, Options(straight=True, memory_bytes=1e9), VersionedMemory())
    assert [stage.versions for stage in ours.stages] == [3, 2, 1]
    first = ours.stages[0]
    assert first.memory_bytes == first.parameter_bytes * (3 + 2) + 3 * first.activation_bytes
    with pytest.raises(SearchError, match="no division fits the memory"):
        on_levels(chain(), levels, Options(memory_bytes=1e6), VersionedMemory())


def test_fewer_machines_are_used_where_more_are_no_faster() -> None:
    """Weights that take long to sum up."""
    graph = Graph((node("a", 5, 5, 1e3, 4e9), node("b", 4, 5, 1e3, 4e9, ("a",))))
    levels = [Level(machines=4, bytes_per_s=1e9)]
    assert on_levels(graph, levels, Options(fewer=True), VersionedMemory()).replicas == "1-1"
    assert len(on_levels(graph, levels, Options(), VersionedMemory()).replicas.split("-")) == 2
    with pytest.raises(SearchError, match="straight=true: no division gives each rank"):
        on_levels(graph, levels, Options(straight=True), VersionedMemory())


def test_of_a_cluster_whole_nodes_are_left_out() -> None:
    """Two operators whose gradients take long to sum up need two of the three nodes' GPUs at most."""
    graph = Graph((node("a", 5, 5, 1e3, 1e9), node("b", 4, 5, 1e3, 1e9, ("a",))))
    kinds = [kind("fast", 3, 2, 1, 1)]
    ours = on_nodes([graph], [0], kinds, Options(fewer=True), VersionedMemory())
    assert (ours.replicas, ours.node_order) == ("1-1", "fast")
    assert on_nodes([graph], [0], kinds, Options(), VersionedMemory()).node_order == "fast*3"


def test_unlike_nodes_get_the_work_that_they_can_do() -> None:
    """Eight equal operators; a GPU of the one kind is three times as fast."""
    nodes = [node(f"n{number}", 1, 2, 1e2, 1e3, (f"n{number - 1}",) * (number > 0)) for number in range(8)]
    fast = Graph(tuple(nodes))
    slow = Graph(tuple(node(n.name, 3, 6, 1e2, 1e3, n.inputs) for n in nodes))
    kinds = [kind("slow", 2, 1, 100, 100), kind("fast", 2, 1, 100, 100)]
    ours = on_nodes([slow, fast], [0, 1], kinds, Options(straight=True), VersionedMemory())
    assert ours.pipeline_s == pytest.approx(0.009)
    given = [len(stage.nodes) for stage in ours.stages]
    assert ours.node_order is not None
    order = [
        name for run in ours.node_order.split("+") for name in [run.split("*")[0]] * int((run + "*1").split("*")[1])
    ]
    assert {name: [n for n, where in zip(given, order, strict=True) if where == name] for name in ("fast", "slow")} == {
        "fast": [3, 3],
        "slow": [1, 1],
    }
    with pytest.raises(SearchError, match="belong to different models"):
        on_nodes([slow, chain()], [0, 1], kinds, Options(), VersionedMemory())


def test_stages_in_the_order_of_the_blocks_and_what_another_order_would_give() -> None:
    """Two branches, of which only the second one balances with the source."""
    times = {"a": (1, ()), "b": (1, ("a",)), "c": (2, ("a",)), "d": (2, ("b", "c"))}
    graph = Graph(tuple(node(name, ms, 0, 1e2, 1e3, inputs) for name, (ms, inputs) in times.items()))
    kinds, options = [kind("any", 2, 1, 100, 100)], Options(straight=True)
    free, ours = (on_nodes([graph], [0], kinds, options, VersionedMemory(), in_order=one) for one in (False, True))
    assert free.pipeline_s == pytest.approx(3e-3)
    assert ours.pipeline_s == pytest.approx(4e-3)
    assert [[one.name for one in stage.nodes] for stage in ours.stages] == [["a", "b"], ["c", "d"]]
    assert ours.notes == (
        "no division on contiguous ranks in the order of the blocks is faster (proved)",
        "blocks in another order could be divided 25.0% faster, into a, c; b, d; but a run uses the order in "
        "which the model calls them",
    )


def wide(width: int, depth: int) -> Graph:
    """Branches beside each other: (depth + 1) ** width cuts."""
    chance, nodes = random.Random(3), [node("source", 1, 1, 1e4)]
    for branch in range(width):
        for step in range(depth):
            before = f"b{branch}.{step - 1}" if step else "source"
            nodes.append(node(f"b{branch}.{step}", chance.uniform(1, 3), 2, 1e4, 1e5, (before,)))
    nodes.append(node("joined", 1, 1, 1e4, 0, tuple(f"b{branch}.{depth - 1}" for branch in range(width))))
    return Graph(tuple(nodes))


def test_many_branches_are_searched() -> None:
    """4,096 cuts, of which the public tables would have 16 million pairs."""
    ours = on_levels(wide(6, 3), [Level(machines=8, bytes_per_s=1e9)], Options(), VersionedMemory())
    assert ours.notes[0] == "no division on contiguous ranks is faster (proved)"


def test_of_many_cuts_nested_stages_are_left_out_in_words() -> None:
    levels = [Level(machines=2, bytes_per_s=1e10), Level(machines=2, bytes_per_s=1e9)]
    ours = on_levels(wide(7, 4), levels, Options(), VersionedMemory())
    assert ours.notes == (ours.notes[0], "nested stages were not searched: there are too many cuts")


def test_a_gap_is_reported_where_there_are_too_many_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "STEPS", 200)
    ours = on_levels(wide(6, 3), [Level(machines=8, bytes_per_s=1e9)], Options(), VersionedMemory())
    assert "could be at most" in ours.notes[0]


def ladder(rungs: int) -> Graph:
    """Two rails with rungs from one to the other: a cut lies on at most one step of difference between them."""
    nodes = [node("node0", 1, 2, 1e6, 4096), node("node1", 1.3, 2.2, 1e6, 0, ("node0",))]
    for number in range(2, 2 * rungs):
        inputs = (f"node{number - 2}", f"node{number - 1}") if number % 2 else (f"node{number - 2}",)
        nodes.append(
            node(f"node{number}", 1 + number % 7 * 0.3, 2 + number % 5 * 0.2, 1e6, 4096 * (number % 4), inputs)
        )
    return Graph(tuple(nodes))


def test_a_ladder_of_thousands_of_operators_is_divided() -> None:
    """The cuts' results were once looked up for each pair of operators, which took hours."""
    graph = ladder(1000)
    ours = on_levels(graph, [Level(machines=16, bytes_per_s=1e9)], Options(), VersionedMemory())
    assert sum(len(stage.nodes) for stage in ours.stages) == 2000
    least = sum(one.compute_ms for one in graph.nodes) / 16e3
    assert least <= ours.pipeline_s <= 1.01 * least


@pytest.mark.parametrize("pairs", [10, 300])
def test_where_cuts_of_one_order_are_too_many_some_of_them_are_tried(
    monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    levels = [Level(machines=4, bytes_per_s=1e9)]
    exact = on_levels(ladder(20), levels, Options(), VersionedMemory())
    looked = []

    def divide(self: Any, layers: Any, limit: float) -> Best | None:
        looked.append(self._pairs(layers))
        return inner(self, layers, limit)

    inner = recurrence.Recurrence._divide
    monkeypatch.setattr(recurrence.Recurrence, "_divide", divide)
    monkeypatch.setattr(recurrence, "PAIRS", pairs)
    ours = on_levels(ladder(20), levels, Options(), VersionedMemory())
    assert ours.pipeline_s >= exact.pipeline_s
    assert max(looked) <= pairs + 2 * 40 * 4


def test_more_operators_than_are_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasop.graphs.graph.MOST", 30)
    with pytest.raises(SearchError, match=r"40 operators are too many to divide into stages, at most 30 .* profile"):
        on_levels(ladder(20), [Level(machines=2, bytes_per_s=1e9)], Options(), VersionedMemory())


def test_more_gpus_than_a_graph_is_divided_over_are_refused() -> None:
    with pytest.raises(SearchError, match=r"cluster: 800 machines are too many, .* at most 128; leave groups"):
        on_nodes([chain()], [0], [kind("a", 100, 8, 8, 20)], Options(), VersionedMemory())


def test_the_same_search_says_the_same() -> None:
    ours = [on_levels(branches(), [Level(machines=8, bytes_per_s=2e9)], Options(), VersionedMemory()) for _ in range(2)]
    assert ours[0] == ours[1]
