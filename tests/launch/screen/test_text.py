"""Texts of several lines keep their remedy where a message has one line."""

from __future__ import annotations

import pytest

from launch.screen import one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("boom", "boom"),
        ("the vocabulary has 300 words:\n  a file has 400\n\nset model.vocab_size=400\n",
         "the vocabulary has 300 words: a file has 400; set model.vocab_size=400"),
        ("CUDA error: an illegal access\nFor debugging pass CUDA_LAUNCH_BLOCKING=1.\n\n"
         "Exception raised from x at y.cpp:1 (most recent call first):\nframe #0: f\n",
         "CUDA error: an illegal access; For debugging pass CUDA_LAUNCH_BLOCKING=1. …"),
        ("", ""),
    ],
    ids=["one line", "a remedy behind", "a stack behind", "nothing"],
)  # fmt: skip
def test_all_lines_up_to_a_stack_become_one(text: str, shown: str) -> None:
    assert one_line(text) == shown
