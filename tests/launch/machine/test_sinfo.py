"""sinfo's states of nodes: which take jobs, and what the others are."""

from __future__ import annotations

import pytest

from launch.machine.sinfo import parse

NODE = "gpu2-002|gpu2|gpu2*|{up}|{state}|64|UNLIMITED|256000|infinite|10|OFF|gpu:a10:4|a10"


@pytest.mark.parametrize(
    ("state", "hindrance"),
    [
        ("idle", None),
        ("mix", None),
        ("alloc", None),
        ("comp", None),
        ("plnd", None),
        ("idle~", None),
        ("idle#", None),
        ("idle%", None),
        ("alloc-", None),
        ("down", "down"),
        ("down*", "down"),
        ("down~", "down"),
        ("drain", "drained"),
        ("drain*", "drained"),
        ("drng", "draining"),
        ("fail", "failing"),
        ("failg", "failing"),
        ("futr", "not set up yet"),
        ("unk", "unknown to Slurm"),
        ("unk*", "unknown to Slurm"),
        ("idle*", "not answering Slurm"),
        ("maint", "under maintenance"),
        ("mix$", "under maintenance"),
        ("resv", "reserved"),
        ("inval", "invalid, since it has less than slurm.conf says"),
    ],
    ids=lambda value: str(value),
)
def test_what_keeps_a_node_from_taking_jobs(state: str, hindrance: str | None) -> None:
    (node,) = parse(NODE.format(state=state, up="up"))
    assert (node.hindrance, node.usable) == (hindrance, hindrance is None)


def test_a_partition_that_is_not_up_keeps_its_nodes() -> None:
    (node,) = parse(NODE.format(state="idle", up="inact"))
    assert node.hindrance == "in a partition that is inact"
