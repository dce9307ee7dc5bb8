"""Messages between stages in 8 bits: every layout equals one process that rounds the same numbers at the same cuts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.parallel_config import Compress, compressed_bytes
from megatron_ext.contract.plan import Plan
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Split
from megatron_ext.engine.executor.messages import message_of, quantised, restored
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Wire
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, Case, assert_as_delayed
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT, Layout, assert_equal
from tests.megatron_ext.engine.test_traffic import EVALUATED, UNTIED, only, samples, sent
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun
from tests.support.megatron_ext.pretended_gpus import pretended_gpus
from tests.support.megatron_ext.tasks import WIDTH, GraphTask
from tests.support.megatron_ext.textbook import trained

Engine = Callable[..., EngineRun]
INT8 = "parallel.compress=int8"


def rounded(numbers: Tensor) -> Tensor:
    """The oracle: each block of 256 by itself, in numpy."""
    flat = numbers.detach().numpy().astype(np.float32).ravel()
    blocks = []
    for block in np.split(flat, range(256, len(flat), 256)):
        scale = np.abs(block).max() / np.float32(127)
        blocks.append(np.rint(block / scale) * scale if scale else np.zeros_like(block))
    return torch.from_numpy(np.concatenate(blocks)).view(numbers.shape).to(numbers.dtype)


class Cut(torch.autograd.Function):
    """Rounds what goes over a cut, and the gradient that comes back."""

    @staticmethod
    def forward(ctx: object, numbers: Tensor) -> Tensor:
        return rounded(numbers)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return rounded(gradient)


class InOneProcess(nn.Module):
    """All stages of a plan after each other; with sequence parallelism tensor groups of one size send shares."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        task = task_of(plan)
        owned: dict[str, nn.Parameter] = {}
        self.stages = nn.ModuleList(Stage(task, part, TensorGroup(), owned) for part in cut(task, plan.partition))
        for stage in self.stages:
            stage.initialise(1)
        sizes = [plan.layout.tensors[at % plan.pipeline] for at in range(len(self.stages))]
        alike = [plan.sequence_parallel and one == other for one, other in pairwise(sizes)]
        self.shares = [size if cut_alike else 1 for size, cut_alike in zip(sizes, alike, strict=False)]

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        left: dict[str, Tensor] = {}
        for stage, shares in zip(self.stages, [1, *self.shares], strict=True):
            entered = self.over_cut(left, shares) if left else {}
            left = stage({**entered, **{name: inputs[name] for name in stage.inputs}})
        return left

    def over_cut(self, left: dict[str, Tensor], shares: int) -> dict[str, Tensor]:
        parts = []
        for of_rank in zip(*(tensor.chunk(shares, dim=1) for tensor in left.values()), strict=True):
            flat = Cut.apply(torch.cat([share.flatten() for share in of_rank]))
            split = flat.split([share.numel() for share in of_rank])
            parts.append([one.view(share.shape) for one, share in zip(split, of_rank, strict=True)])
        return {name: torch.cat(of_name, dim=1) for name, of_name in zip(left, zip(*parts, strict=True), strict=True)}

    def state(self, values: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        return {
            f"{part_name(block)}.{inner}": values(parameter)
            for stage in self.stages
            for name, parameter in stage.parameters_by_name()
            for block, inner in [stage.places.get(name, (None, None))]
            if block is not None
        }


def expected(plan: Plan, corpus: Path) -> tuple[np.ndarray, dict[str, Tensor]]:
    """What the oracle learns from the plan's micro-batches."""
    model, train, vocab = InOneProcess(plan), plan.train, plan.model.vocab_size
    count = train.samples or train.iterations * plan.global_batch_size
    data = GptSamples(corpus, Split(count, train.seed, tuple(plan.data_split)), plan.model.sequence_length, vocab)

    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        losses = []
        for micro in numbers.split(plan.micro_batch_size):
            tokens = torch.stack([torch.from_numpy(data.tokens(sample)) for sample in micro.tolist()])
            logits = model({"tokens": tokens[:, :-1], "number": micro})["logits"][..., :vocab]
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
        return torch.stack(losses).sum() / (len(numbers) * plan.model.sequence_length)

    return trained(plan, loss, model)


GPU = "cluster.gpus.cpu.name=GPU"
TWO_STAGES = ("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=2")
SHARES = ("parallel.shares=3-1", "parallel.data=2", "parallel.pipeline=2", "parallel.micro_batch_size=1")


def of(layout: Layout) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={value}" for key, value in layout._asdict().items())


LAYOUTS = {
    str(layout): of(layout)
    for layout in (
        Layout(1, 1, 2, "1-2", 2),
        Layout(1, 2, 3, "0-3-0", 1, sharded_optimizer=True),
        Layout(1, 2, 2, "1-2", 1, schedule="zb_h1"),
        Layout(1, 1, 3, "1-1-1", 2, schedule="gpipe"),
        Layout(1, 1, 2, "1-0-1-1", 2, schedule="interleaved", chunks=2),
        Layout(1, 1, 2, "1-2", 1, replicas="3-2"),
    )
} | {"shares": (*SHARES, "parallel.partition=2-1")}
SGD = ("train.optimizer=sgd", "train.lr=0.03")
OF_TENSOR_GROUPS = [
    Layout(2, 1, 2, "1-2", 2),
    Layout(2, 2, 2, "2-1", 2, True, "full", True),
    Layout("2-1-4", 1, 3, "1-0-2", 2, True),
]


@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_equals_one_process_that_rounds_at_the_same_cuts(
    engine_run: Engine, corpus: Path, words: tuple[str, ...]
) -> None:
    run = engine_run(INT8, *words)
    assert run.go() == 0, run.stderr()
    assert_equal(run, expected(run.plan, corpus))


@pytest.mark.parametrize("layout", OF_TENSOR_GROUPS, ids=str)
def test_tensor_groups_do_but_for_numbers_on_the_edge_between_two_multiples(
    engine_run: Engine, corpus: Path, layout: Layout
) -> None:
    """A group adds up in another order, which may round such a number to the other one; its token then learns from
    another gradient, of which Adam would make a large step where it is small."""
    run = engine_run(INT8, *of(layout), *SGD)
    assert run.go() == 0, run.stderr()
    losses, state = expected(run.plan, corpus)
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-5)
    for name, tensor in state.items():
        own = tensor[:VOCAB] if name.endswith("embedding.word") else tensor
        tolerance = 2e-5 if name.startswith("weights/") else 1e-2 * tensor.abs().max().item()
        torch.testing.assert_close(run.state()[name], own, rtol=0, atol=tolerance)


def test_what_is_rounded_makes_a_difference(engine_run: Engine, corpus: Path) -> None:
    run = engine_run(*TWO_STAGES)
    assert run.go() == 0, run.stderr()
    assert np.abs(run.losses() - expected(run.plan, corpus)[0]).max() > 1e-5


@pytest.mark.parametrize(
    "case",
    [Case((3, 1), "stashing", SGD), Case((1, 2, 1), "latest", (*SGD, *DROPOUT)), Case((2, 1), "vertical", ADAM, 2)],
    ids=str,
)
def test_without_a_flush_it_equals_one_process_with_delays_that_rounds_too(engine_run: Engine, case: Case) -> None:
    run = engine_run(*case.overrides(), INT8)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)


def test_on_gpus_it_equals_one_process_too(engine_run: Engine, corpus: Path) -> None:
    run = engine_run(INT8, GPU, *TWO_STAGES, "train.checkpoint=true")
    assert run.go(pretended_gpus()) == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), expected(run.plan, corpus)[0], rtol=0, atol=1e-5)


def test_bytes_between_stages_are_what_the_formula_says(engine_run: Engine) -> None:
    """24 tokens of 32 numbers, three samples at a time: 2,304 bytes and nine scales."""
    run = engine_run(
        *("parallel.data=1", "parallel.pipeline=3", "parallel.partition=1-1-1", INT8, UNTIED, *EVALUATED),
        *("parallel.micro_batch_size=3", "parallel.global_batch_size=9"),
    )
    message = samples(run) // 3 * (2304 + 4 * 9)
    assert sent(run) == [
        only(activations=message), only(activations=message, gradients=message), only(gradients=message)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_message_is_its_numbers_rounded_by_block(count: int, dtype: torch.dtype) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    message = quantised(numbers)
    assert (message.dtype, len(message)) == (torch.int8, count + 4 * -(-count // 256)) == (
        torch.int8, compressed_bytes(count),
    )  # fmt: skip
    found = restored(message, count, dtype)
    assert torch.equal(found, rounded(numbers.float()).to(dtype))
    for block, of in zip(found.float().split(256), numbers.float().split(256), strict=True):
        assert (block - of).abs().max() <= of.abs().max() * (0.5 / 127 + 2**-8 * (dtype is not torch.float32))


def test_zeros_and_the_smallest_numbers_stay_and_what_is_not_finite_is_not_after_it_either() -> None:
    assert torch.equal(restored(quantised(torch.zeros(300)), 300, torch.float32), torch.zeros(300))
    tiny = torch.full((256,), 180 * 2.0**-149)
    assert (restored(quantised(tiny), 256, torch.float32) > 0).all()
    for value in (torch.inf, -torch.inf, torch.nan):
        numbers = torch.ones(512)
        numbers[300] = value
        found = restored(quantised(numbers), 512, torch.float32)
        assert torch.isfinite(found[:256]).all()
        assert not torch.isfinite(found[256:]).any()


def test_only_activations_are_compressed() -> None:
    """A mask of integers, statistics and what has no gradient stay as they are."""
    wires = [
        Wire("x", ("batch", WIDTH)),
        Wire("mask", ("batch", WIDTH), torch.int64, gradient=False),
        Wire("bias", ("batch", WIDTH), gradient=False),
        Wire("balance", (2, 8), torch.float32, exact=True),
        Wire("y", ("batch", WIDTH)),
    ]
    names = [wire.name for wire in wires]
    task = GraphTask([], "x", "x", {}, wires)
    message = message_of(task, names, 2, TensorGroup(), torch.float32, torch.device("cpu"), compress=Compress.int8)
    shapes = {wire.name: [2 if dim == "batch" else int(dim) for dim in wire.dims] for wire in wires}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["mask"] = (tensors["mask"] > 0).long()
    packed = message.pack(tensors)
    assert [(one.dtype, one.numel()) for one in packed] == [(like.dtype, like.numel()) for like in message.likes]
    assert sum(one.numel() for one in packed if one.dtype is torch.int8) == compressed_bytes(4 * WIDTH)
    found = message.unpack(packed)
    for name in ("mask", "bias", "balance"):
        assert torch.equal(found[name], tensors[name])
    together = rounded(torch.cat([tensors["x"].flatten(), tensors["y"].flatten()]))
    assert torch.equal(torch.cat([found["x"].flatten(), found["y"].flatten()]), together)
    back = message.gradients()
    assert [like.dtype for like in back.likes] == [torch.int8, torch.float32]


@pytest.mark.slow
def test_over_500_iterations_the_loss_stays_within_a_hundredth(engine_run: Engine) -> None:
    """Of means over 50 iterations, which the noise of single batches does not hide."""
    training = ("train.iterations=500", "train.lr=3e-3", "train.min_lr=3e-4", "parallel.data=1", "parallel.pipeline=3")

    def means(compress: str) -> np.ndarray:
        run = engine_run(*training, f"parallel.compress={compress}", name=compress)
        assert run.go() == 0, run.stderr()
        return run.losses().reshape(10, 50).mean(axis=1)

    exact = means("none")
    assert exact[-1] < 0.5 * exact[0]
    assert means("int8") == pytest.approx(exact, rel=1e-2)
