"""The course of a rank's memory stays small, and keeps every peak."""

from __future__ import annotations

from megatron_ext.timeline.usage import MOST_POINTS, PeakSeries


def test_a_course_of_many_iterations_has_few_points_and_every_peak() -> None:
    course, taken = PeakSeries(), {}
    for iteration in range(3, 10_000):
        taken[iteration] = float(iteration * 7919 % 4099)
        course.add(iteration, taken[iteration])
        assert len(course.points) <= MOST_POINTS
    begin = 3
    for end, most in course.points:
        assert most == max(taken[iteration] for iteration in range(begin, end + 1))
        begin = end + 1
    assert begin == 10_000
    assert len(course.points) > MOST_POINTS / 2
