"""Sections of several runs: each is there only where runs have what it shows, and says what they reached."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pandas as pd
import pytest

from reports.facts.learning import Learned
from reports.facts.side_by_side import Compared, Facts, Sent, StageUse, speed_up
from reports.sections.comparison_sections import (
    PUBLISHED,
    curves_section,
    depth_section,
    published_section,
    size,
    stages_section,
    throughput_section,
    traffic_section,
)

SECTIONS = (curves_section, depth_section, published_section, stages_section, throughput_section, traffic_section)
EVALUATED = Learned(
    evaluations=pd.DataFrame(
        {"iteration": [5, 10], "samples": [50.0, 100.0], "epochs": [1.0, 2.0], "hours": [0.1, 0.2], "top-1": [0.5, 0.9]}
    ),
    larger={"top-1": True},
)


def stage(ahead: int | None, versions: int, holds: str = "conv.0-2", replicas: int = 1) -> StageUse:
    return StageUse(
        holds=holds, replicas=replicas, ahead=ahead, versions=versions, predicted_gib=math.nan, measured_gib=0.25
    )


DP = Facts(
    learned=EVALUATED, model="vgg16", workers=16, data_parallel=True, epoch_s=80.0, samples_per_s=100.0,
    sent=Sent(by_kind={"all_reduce": 4e6}, most=1e6), stages=[stage(None, 1, replicas=16)],
)  # fmt: skip
PIPE = Facts(
    learned=EVALUATED, model="vgg16", workers=16, replicas=(15, 1), epoch_s=40.0, samples_per_s=250.0,
    predicted_samples_per_s=200.0, sent=Sent(by_kind={"activations": 512.0, "gradients": 512.0}, most=512.0),
    stages=[stage(1, 2, replicas=15), stage(0, 1, "linear.0-2")],
)  # fmt: skip


def named(*facts: Facts) -> list[Compared]:
    return [Compared(f"run{number}", f'<a href="{number}">run{number}</a>', one) for number, one in enumerate(facts)]


def rows(html: str) -> list[list[str]]:
    """The texts of a section's cells."""
    body = html[html.index("<tbody>") :]
    return [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body)
    ]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_section_is_left_out_where_runs_have_nothing_for_it(section) -> None:
    assert section(named(Facts(), Facts())) == ""


def test_throughput_stands_beside_what_was_predicted_and_data_parallelism() -> None:
    assert rows(throughput_section(named(DP, PIPE))) == [
        ["run0", "80.0", "100.0", "–", "–", "–"],
        ["run1", "40.0", "250.0", "200.0", "1.25", "2.50"],
    ]


def test_a_speed_up_is_over_the_same_model_on_as_many_workers() -> None:
    assert speed_up(PIPE, [DP, replace(DP, samples_per_s=125.0), PIPE]) == 2.0
    assert math.isnan(speed_up(PIPE, [replace(DP, model="alexnet"), replace(DP, workers=4), PIPE]))
    assert math.isnan(speed_up(DP, [DP, PIPE]))


def test_bytes_are_shown_by_kind_and_of_all_ranks() -> None:
    assert rows(traffic_section(named(DP, PIPE, Facts()))) == [
        ["run0", "0 B", "0 B", "4.00 MB", "4.00 MB", "1.00 MB"],
        ["run1", "512 B", "512 B", "0 B", "1.02 kB", "512 B"],
    ]
    assert [size(value) for value in (0, 999, 1e3, 2.5e9)] == ["0 B", "999 B", "1.00 kB", "2.50 GB"]


def test_every_stage_has_its_versions_and_memory() -> None:
    assert rows(stages_section(named(DP, PIPE))) == [
        ["run0", "0", "conv.0-2", "16", "–", "1", "–", "0.25"],
        ["run1", "0", "conv.0-2", "15", "1", "2", "–", "0.25"],
        ["", "1", "linear.0-2", "1", "0", "1", "–", "0.25"],
    ]


def test_the_table_of_many_stages_is_folded() -> None:
    deep = replace(PIPE, stages=[stage(0, 1)] * 32)
    assert "<details>" not in stages_section(named(DP, PIPE))
    folded = stages_section(named(DP, deep))
    assert "<summary>Stages of all 2 runs</summary>" in folded
    assert len(rows(folded)) == 33


def test_depths_of_the_same_stages_are_compared_the_shallowest_first() -> None:
    shallow = replace(PIPE, samples_per_s=90.0, stages=[stage(0, 1, replicas=15), stage(0, 1, "linear.0-2")])
    html = depth_section(named(PIPE, shallow, DP))
    assert [row[:4] for row in rows(html)] == [["run1", "0-0", "1-1", "90.0"], ["run0", "1-0", "2-1", "250.0"]]
    assert [row[-1] for row in rows(html)] == ["top-1 0.9"] * 2
    assert depth_section(named(PIPE, PIPE)) == ""
    elsewhere = replace(shallow, stages=[stage(0, 1, "conv.0-1", 15), stage(0, 1, "conv.2")])
    assert depth_section(named(PIPE, elsewhere)) == ""


def test_quality_is_drawn_against_epochs_and_time() -> None:
    html = curves_section(named(DP, PIPE))
    assert [f"top-1 over {axis}" in html for axis in ("epochs", "hours", "samples")] == [True, True, False]
    without = replace(EVALUATED, evaluations=EVALUATED.evaluations.drop(columns="epochs"))
    assert "top-1 over samples" in curves_section(named(DP, replace(PIPE, learned=without)))


def test_what_is_published_of_a_model_stands_beside_what_was_reached() -> None:
    found = rows(published_section(named(DP, PIPE)))
    assert [row[:2] for row in found] == [["vgg16", "16"]] * 2
    assert [row[3:7] for row in found] == [
        ["15-1", "time to accuracy, at most", "5.3", "2.50"],
        ["15-1", "throughput, predicted", "1.84", "2.50"],
    ]
    assert all(one.source for one in PUBLISHED)
    assert published_section(named(replace(PIPE, model="vgg-tiny"))) == ""
