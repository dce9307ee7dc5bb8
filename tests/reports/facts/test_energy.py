"""The energy of a run: a GPU counts once, a gap for what is known, and stages add up to the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.compose import compose
from conf.run_folder.gpu_lines import GpuReading, GpuSample, entry_text
from launch.control.planning.plan import make_plan
from reports.readers.gpus import gpu_report
from reports.sections.gpu_section import Energy, energy_of

PLAN = make_plan(compose(["experiment=seed_a100x1_a10x7"]), "xl/1")
GPU = GpuSample(
    index=0, uuid="", name="A10", utilisation=90, memory_used_mib=1, memory_total_mib=2, power_w=100, power_limit_w=150,
    temperature_c=50, processes=(),
)  # fmt: skip


def readings(node: str, seconds: list[int], *watts: int | None, interval_s: int = 10) -> str:
    gpus = tuple(replace(GPU, index=n, uuid=f"{node}-{n}", power_w=power) for n, power in enumerate(watts))
    return "".join(
        entry_text(GpuReading(unix=1_760_000_000 + at, host="h", number=n, interval_s=interval_s, gpus=gpus))
        for n, at in enumerate(seconds, 1)
    )


def energy(texts: dict[str, str]) -> Energy | None:
    return energy_of(gpu_report(texts).energy, PLAN)


def test_stages_add_up_to_the_run_and_a_million_tokens_take_their_part() -> None:
    names = [node.name for node in PLAN.nodes]
    every_10_s = list(range(0, 3600, 10))
    found = energy({names[0]: readings("a", every_10_s, 400, 400), names[1]: readings("b", every_10_s, 100)})
    assert found is not None
    assert found.kwh == pytest.approx(0.9)
    assert (found.hours, found.gpus, found.watts) == (pytest.approx(1.0), 3, pytest.approx(900))
    assert sum(found.by_stage.values()) == pytest.approx(0.9)
    first = {PLAN.ranks[rank].stage for rank in PLAN.nodes[0].ranks[:2]}
    assert sum(found.by_stage[stage] for stage in first) >= 0.8 - 1e-9
    assert found.kwh_per_million_tokens(1000.0) == pytest.approx(0.25)  # 1000 s at 900 W


def test_a_node_that_was_lost_has_used_energy_but_draws_no_more() -> None:
    found = energy({PLAN.nodes[0].name: readings("a", [0, 10, 20], 360), "lost-1": readings("b", [0, 10, 20], 180)})
    assert found is not None
    assert found.kwh == pytest.approx((360 + 180) * 30 / 3.6e6)
    assert found.watts == pytest.approx(360)


def test_a_gap_counts_for_two_readings_and_what_is_not_known_for_nothing() -> None:
    name = PLAN.nodes[0].name
    found = energy({name: readings("a", [0, 10, 20, 500, 510], 360, None)})
    assert found is not None
    assert found.kwh == pytest.approx(360 * (10 + 10 + 20 + 10 + 10) / 3.6e6)
    assert found.gpus == 1


def test_a_gpu_that_two_nodes_read_counts_once() -> None:
    one, other = PLAN.nodes[0].name, PLAN.nodes[1].name
    text = readings("same", [0, 10, 20], 360)
    both, alone = energy({one: text, other: text}), energy({one: text})
    assert both == alone


def test_hosts_that_change_their_nodes_between_starts_count_in_both() -> None:
    """In the first start node 0 ran on host a, in the second on host b."""
    one, other = (node.name for node in PLAN.nodes[:2])
    first, second = [0, 10, 20], [1000, 1010, 1020]
    found = energy(
        {
            one: readings("a", first, 360) + readings("b", second, 180),
            other: readings("b", first, 180) + readings("a", second, 360),
        }
    )
    assert found is not None
    assert found.kwh == pytest.approx(2 * (360 + 180) * 30 / 3.6e6)
    assert (found.gpus, found.watts) == (2, pytest.approx(540))


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    found = energy({PLAN.nodes[0].name: readings("a", [0, 10, 20, 5, 15], 360)})
    assert found is not None
    assert found.kwh == pytest.approx(360 * (10 + 10 + 0 + 10 + 10) / 3.6e6)


def test_the_counters_are_compared_over_the_time_that_both_know() -> None:
    """Of a gap nobody knows the power, and a driver that is loaded again counts from 0."""
    counts = {0: 1000, 10: 4960, 20: 8920, 500: 100_000, 510: 100, 520: 4060}
    text = "".join(
        entry_text(
            GpuReading(
                unix=1_760_000_000 + at,
                host="h",
                number=n,
                interval_s=10,
                gpus=(replace(GPU, uuid="GPU-0", power_w=360, energy_j=j),),
            )
        )
        for n, (at, j) in enumerate(counts.items(), 1)
    )
    found = energy({PLAN.nodes[0].name: text})
    assert found is not None
    assert found.counter == pytest.approx(1.1)
    plain = energy({PLAN.nodes[0].name: readings("a", [0, 10], 360)})
    assert plain is not None and plain.counter is None


def test_without_power_there_is_no_energy() -> None:
    assert energy({PLAN.nodes[0].name: readings("a", [0, 10], None)}) is None
    assert energy({}) is None
