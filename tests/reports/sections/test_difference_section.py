"""What differs between two runs, as their comparison shows it."""

from __future__ import annotations

import re
from dataclasses import replace

from reports.facts.statistics import statistics
from reports.sections.difference_section import MOST_ROWS, Timed, difference_section
from tests.support.reports.constructed import Course, plan_of, timeline_of

DEEP = Course(partition=(2,) * 12, tensor=2)


def timed(course: Course) -> Timed:
    plan = plan_of(course)
    timeline = timeline_of(course, plan)
    figures = statistics(timeline, plan.ranks)
    return Timed(name="a", link="", plan=plan, micro_batches=8, time=None, timeline=timeline, figures=figures)


def test_of_many_changes_some_are_shown_and_the_others_folded():
    """A pipeline of twelve stages, all slower, has a row for each stage and kind of work."""
    drawn = difference_section([timed(DEEP), timed(replace(DEEP, pace=lambda *_: 1.5))])
    first, folded = drawn.split("<details>")
    rows = len(re.findall("<tr", first)) - 1, len(re.findall("<tr", folded)) - 1
    assert rows[0] == MOST_ROWS
    assert f"<summary>{rows[1]} more changes</summary>" in folded


def test_what_hardly_took_time_before_has_no_percentage():
    drawn = difference_section([timed(replace(DEEP, host=lambda *_, host=host: host)) for host in (0.01, 5.0)])
    others = re.findall(r"<tr[^>]*><td[^>]*>\d+</td><td[^>]*>other</td>.*?</tr>", drawn)
    assert others
    assert all(">–</td></tr>" in row for row in others)


def test_ranks_of_a_tensor_group_have_rows_of_unlike_names_on_a_phone():
    drawn = difference_section([timed(DEEP), timed(DEEP)])
    names = re.findall(r'"short": ?"([^"]+)"', drawn)
    assert len(set(names)) == len(names) // 2 == 24, "in each of the two runs"
