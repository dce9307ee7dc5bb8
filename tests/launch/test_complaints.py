"""Of stderr, what matters: no warnings, like lines once, in the order they appeared."""

from __future__ import annotations

from launch.complaints import Complaint, complaints

PYTHON_WARNING = """\
/lib/torch/x.py:12: UserWarning: something is deprecated
  warnings.warn(
WARNING:root:and this
[W1121 07:00:00.1 socket.cpp:1] [c10d] The client socket cannot be initialized
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 3, in f
    g()
ValueError: rank 3 has 12 layers
"""


def test_warnings_are_left_out() -> None:
    assert complaints({"n": PYTHON_WARNING}) == []


def test_of_a_traceback_the_last_line_is_kept() -> None:
    assert complaints({"n": TRACEBACK}) == [Complaint("ValueError: rank 3 has 12 layers", 1, ("n",))]


def test_lines_that_differ_in_numbers_only_are_counted_together() -> None:
    found = complaints({"a": "rank 0 lost 0x1f\nother\n", "b": "rank 1 lost 0x2a\nrank 2 lost 0xff\n"})
    assert found == [Complaint("rank 0 lost 0x1f", 3, ("a", "b")), Complaint("other", 1, ("a",))]
