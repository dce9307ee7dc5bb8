"""What a stage holds and what crosses a cut follow from the blocks; blocks that do not fit together are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.engine.executor.messages import message_of
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import check, cut, ties
from megatron_ext.tasks.task import SEQUENCE, Block, Placement, Wire
from tests.support.megatron_ext.engine_run import EngineRun
from tests.support.megatron_ext.tasks import GraphTask


def block(name: str, takes: str, gives: str, held: Placement = Placement.COUNTED) -> Block:
    return Block(name, "any", tuple(takes.split()), tuple(gives.split()), lambda _: nn.Identity(), held)


SKIPPING = [
    block("in", "x", "a", Placement.FIRST),
    block("encoder.0", "a", "b side"),
    block("encoder.1", "b", "c"),
    block("bridge", "c", "d", Placement.NEXT),
    block("decoder.0", "d a", "e"),
    block("decoder.1", "e side", "f"),
    block("out", "f", "y", Placement.LAST),
]


def task(blocks: list[Block], tied: dict[str, str] | None = None) -> GraphTask:
    return GraphTask(blocks, "x", "y", tied)


def test_what_skips_a_stage_is_handed_on_by_it() -> None:
    parts = cut(task(SKIPPING), [1, 1, 0, 1, 1])
    assert [[one.name for one in part.blocks] for part in parts] == [
        ["in", "encoder.0"],
        ["encoder.1"],
        [],
        ["bridge", "decoder.0"],
        ["decoder.1", "out"],
    ]
    assert [set(part.enters) for part in parts] == [
        set(),
        {"a", "b", "side"},
        {"a", "c", "side"},
        {"a", "c", "side"},
        {"e", "side"},
    ]
    assert all(set(before.leaves) == set(after.enters) for before, after in pairwise(parts))
    assert (parts[0].inputs, parts[1].inputs, parts[-1].leaves) == (("x",), (), ("y",))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_every_block_is_held_once_in_its_order(partition: list[int]) -> None:
    layers = [block(f"layers.{n}", f"w{n}", f"w{n + 1}") for n in range(sum(partition))]
    ends = [block("in", "x", "w0", Placement.FIRST), block("out", f"w{sum(partition)}", "y", Placement.LAST)]
    parts = cut(task([ends[0], *layers, ends[1]]), partition)
    assert [one for part in parts for one in part.blocks] == [ends[0], *layers, ends[1]]
    assert [sum(one.placement is Placement.COUNTED for one in part.blocks) for part in parts] == partition
    assert parts[0].blocks[0] == ends[0]
    assert parts[-1].blocks[-1] == ends[1]


@pytest.mark.parametrize(
    ("blocks", "tied", "message"),
    [
        ([block("one", "x z", "y")], {}, "block one takes z, which no block gives; there are x, y"),
        (
            [block("one", "x", "y"), block("two", "x", "y")],
            {},
            "block two gives y, but so does block one; rename one of them",
        ),
        ([block("one", "x", "x")], {}, "block one gives x, but so does the micro-batch"),
        (
            [block("one", "x c", "a"), block("two", "a", "b"), block("three", "b", "c y")],
            {},
            "the blocks one -> two -> three -> one take what each other gives: a cycle",
        ),
        (
            [block("two", "a", "y"), block("one", "x", "a")],
            {},
            "block two takes a, which one gives only after it; put that block first",
        ),
        ([block("one", "x", "a"), block("one", "a", "y")], {}, "two blocks are called one"),
        ([block("one", "x", "a")], {}, "the loss takes y, which no block gives"),
        ([block("one", "x", "y")], {"two.w": "one.w"}, "two.w is tied to one.w, but no block has a parameter two.w"),
    ],
    ids=["no-giver", "two-givers", "input", "cycle", "order", "name", "loss", "tied"],
)
def test_blocks_that_do_not_fit_are_named(blocks: list[Block], tied: dict[str, str], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        check(task(blocks, tied))


def test_a_partition_of_another_number_of_blocks_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^parallel\.partition=2-3 has 5 blocks, but the model has 4$"):
        cut(task(SKIPPING), [2, 3])


@pytest.mark.parametrize(
    ("partition", "pipeline", "stages"),
    [([2, 2], 2, [0, 1]), ([4, 0, 0], 3, [0, 2]), ([4], 1, None), ([1, 1, 1, 1], 2, [0, 1]), ([0, 0, 4, 0], 4, [0, 3])],
    ids=str,
)
def test_copies_of_a_tied_parameter_are_on_the_stages_of_their_blocks(
    partition: list[int], pipeline: int, stages: list[int] | None
) -> None:
    tied = {"out.word": "in.word"}
    assert ties(task(SKIPPING, tied), partition, pipeline) == ([] if stages is None else [("in.word", stages)])


def test_a_message_has_one_flat_tensor_for_each_number_format() -> None:
    wires = [
        Wire("a", ("batch", 3)),
        Wire("mask", ("batch", 2), torch.int64, gradient=False),
        Wire("b", (SEQUENCE, "batch")),
    ]
    found = GraphTask([Block("one", "any", ("x",), ("a", "mask", "b"), lambda _: nn.Identity())], "x", "a", wires=wires)
    message = message_of(
        found, ["a", "mask", "b"], 5, TensorGroup(2, 0, None, True), torch.bfloat16, torch.device("cpu")
    )
    assert [(like.dtype, like.numel()) for like in message.likes] == [
        (torch.bfloat16, 5 * 3 + 4 * 5),
        (torch.int64, 10),
    ]
    sent = {
        "a": torch.randn(5, 3).bfloat16(),
        "mask": torch.arange(10).view(5, 2),
        "b": torch.randn(4, 5).bfloat16(),
    }
    received = message.unpack([flat.clone() for flat in message.pack(sent)])
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor)
    assert [content.name for content in message.gradients().contents] == ["a", "b"]


def test_a_tensor_of_another_shape_is_refused_before_it_is_sent() -> None:
    found = GraphTask([Block("one", "any", ("x",), ("a",), lambda _: nn.Identity())], "x", "a")
    message = message_of(found, ["a"], 5, TensorGroup(), torch.float32, torch.device("cpu"))
    with pytest.raises(EngineError, match=r"^another stage expects a with the shape \[5, 4\] .* but it is \[5, 3\]"):
        message.pack({"a": torch.randn(5, 3)})


def test_a_gpt_stage_sends_its_share_of_the_hidden_states(engine_run: Callable[..., EngineRun]) -> None:
    found = task_of(engine_run("parallel.pipeline=1", "parallel.data=1", "parallel.partition=3").plan)
    first, _, last = cut(found, [1, 0, 2])
    assert (first.leaves, last.enters) == (("hidden.1",), ("hidden.1",))
    whole = message_of(found, first.leaves, 2, TensorGroup(), torch.float32, torch.device("cpu"))
    share = message_of(found, first.leaves, 2, TensorGroup(4, 1, None, True), torch.float32, torch.device("cpu"))
    assert (whole.likes[0].shape, share.likes[0].shape) == ((2, 24, 32), (2, 6, 32))
