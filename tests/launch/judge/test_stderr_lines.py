"""Of stderr, what matters: no warnings, like lines once, in the order they appeared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.judgement import LineGroup
from launch.judge.node_reports import grouped_lines, last_words, warnings

PYTHON_WARNING = b"""\
/lib/torch/x.py:12: UserWarning: something is deprecated
  warnings.warn(
WARNING:root:and this
[W1121 07:00:00.1 socket.cpp:1] [c10d] The client socket cannot be initialized
[rank3]:[W1121 07:00:00.1 socket.cpp:1] nor here
"""
TRACEBACK = b"""\
Traceback (most recent call last):
  File "a.py", line 3, in f
    g()
ValueError: rank 3 has 12 layers
"""


def test_warnings_are_left_out() -> None:
    assert grouped_lines({"n": PYTHON_WARNING}) == []


def test_warnings_are_grouped_for_those_who_want_them_the_most_frequent_first() -> None:
    told = warnings({"a": PYTHON_WARNING, "b": b"W1121 once\nWARNING:root:and this\nno such thing\n"})
    assert [(one.text, one.count, one.nodes) for one in told] == [
        ("WARNING:root:and this", 2, ("a", "b")),
        ("/lib/torch/x.py:12: UserWarning: something is deprecated", 1, ("a",)),
        ("[W1121 07:00:00.1 socket.cpp:1] [c10d] The client socket cannot be initialized", 1, ("a",)),
        ("[rank3]:[W1121 07:00:00.1 socket.cpp:1] nor here", 1, ("a",)),
        ("W1121 once", 1, ("b",)),
    ]


def test_of_a_traceback_the_last_line_is_kept() -> None:
    assert grouped_lines({"n": TRACEBACK}) == [LineGroup("ValueError: rank 3 has 12 layers", 1, ("n",))]


def test_lines_that_differ_in_numbers_only_are_counted_together() -> None:
    found = grouped_lines({"a": b"rank 0 lost 0x1f\nother\n", "b": b"rank 1 lost 0x2a\nrank 2 lost 0xff\n"})
    assert found == [LineGroup("rank 0 lost 0x1f", 3, ("a", "b")), LineGroup("other", 1, ("a",))]


def test_what_may_be_the_cause_comes_before_what_follows_from_it() -> None:
    stderr = {
        "first": b"loading shard 3\n[rank 7] error: the optimizer lost its mind\n",
        "second": b"[rank 2] error: rank 7 is gone\nRuntimeError: Connection closed by peer [10.0.0.1]:29500\nodd\n",
    }
    found = grouped_lines(stderr, causes=["the optimizer lost its mind"], symptoms=["rank 7 is gone"])
    assert [group.text for group in found] == [
        "[rank 7] error: the optimizer lost its mind",
        "loading shard 3",
        "odd",
        "[rank 2] error: rank 7 is gone",
        "RuntimeError: Connection closed by peer [10.0.0.1]:29500",
    ]


OF_A_STEP = """\
KeyError: 340

srun: error: hgx-001: task 0: Exited with exit code 1
srun: forcing job termination
srun: Job step aborted: Waiting up to 4 seconds for job step to finish.
slurmstepd-gpu2-001: error: *** STEP 25281348.2 ON gpu2-001 CANCELLED AT 2026-11-22T11:01:50 ***
"""
"""What Slurm 22.05 writes behind a worker's own last line."""
OF_PYXIS = """\
slurmstepd-hgx-001: error: pyxis: failed to import docker image: registry.test#none:1
slurmstepd-hgx-001: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-hgx-001: error: Failed to invoke spank plugin stack
srun: error: hgx-001: task 0: Exited with exit code 1
"""


def test_the_end_of_a_step_of_slurm_says_no_cause() -> None:
    assert last_words(OF_A_STEP) == "KeyError: 340"
    assert last_words(OF_PYXIS) == OF_PYXIS.splitlines()[0]
    assert last_words("srun: error: a: task 0: Killed\n") == "srun: error: a: task 0: Killed"
    assert last_words("\n") is None
    told = [group.text for group in grouped_lines({"a": OF_A_STEP.encode()[14:] + b"KeyError: 340\n"})]
    assert told[0] == "KeyError: 340"


def test_of_several_causes_the_earliest_comes_first() -> None:
    stderr = {"a": b"ValueError: late\n", "b": b"ValueError: early\n"}
    assert [c.text for c in grouped_lines(stderr, causes=["early", "late"])] == [
        "ValueError: early",
        "ValueError: late",
    ]


def test_without_a_told_cause_the_first_nodes_lines_come_first() -> None:
    assert [c.text for c in grouped_lines({"b": b"from b\n", "a": b"from a\n"})] == ["from b", "from a"]


def test_bytes_that_are_no_text_and_lines_ended_by_windows_are_told() -> None:
    assert grouped_lines({"a": b"caf\xe9\r\nplain"}) == [
        LineGroup("caf\ufffd", 1, ("a",)),
        LineGroup("plain", 1, ("a",)),
    ]


@given(st.lists(st.sampled_from([b"12", b"epoch 3", b" ", b"\r", b"\n", b"\r\n"]), max_size=6).map(b"".join))
def test_progress_that_is_still_being_written_is_told_as_far_as_it_came(content: bytes) -> None:
    told = [line for line in content.replace(b"\r", b"\n").split(b"\n") if line.strip() and not line.startswith(b" ")]
    found = grouped_lines({"a": content})
    assert {group.text for group in found} <= {line.strip().decode() for line in told}
    assert any(line.strip(b"0123456789 ") for line in told) <= bool(found)
