"""Any graph of blocks, cut anywhere, gives the gradients of the whole: random ones over gloo, with wires that skip
stages, blocks that give several wires, tensors of integers on the way, and weights that blocks share."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan_parts import Place
from megatron_ext.engine.executor.executor import Chunk, Executor
from megatron_ext.engine.executor.messages import Message, channels, message_of
from megatron_ext.engine.executor.pace import Pace
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut, ties
from megatron_ext.tasks.linear import WeightGradients, linear
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Block, Micro, Placement, Wire
from megatron_ext.timeline.recorder import Recorder
from tests.megatron_ext.engine.executor.test_executor_soak import random_schedule
from tests.support import cases
from tests.support.megatron_ext.tasks import WIDTH, GraphTask

TASKS = cases.fewer(60, 150)
RANKS = 3
BATCH = 2
CPU = torch.device("cpu")


class Mix(nn.Module):
    """Adds what it takes, times a matrix; may also give a mask of integers, which comes without a gradient."""

    def __init__(self, masks: bool, seed: int) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=source, dtype=torch.float64))
        self.later: WeightGradients | None = None
        self.masks = masks

    def forward(self, *taken: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = sum(tensor.double() for tensor in taken)
        y = torch.tanh(linear(x, self.weight, None, self.later))
        return (y, (x.detach() > 0).long()) if self.masks else y


def random_task(random: Random) -> GraphTask:
    """Each block takes one to three of the wires before it, and some the input again; some share a matrix."""
    blocks: list[Block] = []
    wires: list[Wire] = []
    tied: dict[str, str] = {}
    for number in range(random.randint(1, 7)):
        before = ["x", *(wire.name for wire in wires)]
        taken = tuple(random.sample(before, min(len(before), random.randint(1, 3))))
        if number and not {wire.name for wire in wires if wire.gradient} & set(taken):
            taken = (*taken, f"w{number - 1}")
        masks = random.random() < 0.3
        gives = (f"w{number}", f"mask{number}") if masks else (f"w{number}",)
        wires.append(Wire(f"w{number}", ("batch", WIDTH)))
        if masks:
            wires.append(Wire(f"mask{number}", ("batch", WIDTH), torch.int64, gradient=False))
        seed = random.randrange(1000)
        held = random.choice((Placement.COUNTED, Placement.NEXT))
        blocks.append(Block(f"b.{number}", "mix", taken, gives, lambda _, m=masks, s=seed: Mix(m, s), held))
        if number and random.random() < 0.2:
            owner = f"b.{random.randrange(number)}.weight"
            tied[f"b.{number}.weight"] = tied.get(owner, owner)
    blocks[-1] = blocks[-1]._replace(placement=Placement.COUNTED)
    return GraphTask(blocks, "x", blocks[-1].gives[0], tied, wires)


def run_one(seed: int, rank: int, groups: dict[int, Groups]) -> None:
    """This rank's part of task `seed`, if it has one; compared with the whole model in one piece."""
    random = Random(seed)
    task = random_task(random)
    stages, micro_batches = random.randint(1, RANKS), random.randint(1, 4)
    chunks = random.randint(1, 2) if stages > 1 else 1
    counted = [random.randrange(stages * chunks) for block in task.blocks if block.placement is Placement.COUNTED]
    partition = [counted.count(stage) for stage in range(stages * chunks)]
    lists = random_schedule(random, stages, chunks, micro_batches)
    if rank >= stages:
        return
    source = torch.Generator().manual_seed(seed)
    micros = [task.micro({"x": torch.randn(BATCH, WIDTH, generator=source).double()}) for _ in range(micro_batches)]

    def loss(left: dict[str, Tensor], micro: Micro) -> Tensor:
        return task.loss(left, micro, TensorGroup())

    def message(names: tuple[str, ...]) -> Message:
        return message_of(task, names, BATCH, TensorGroup(), torch.float64, CPU)

    parts = cut(task, partition)
    owned: dict[str, nn.Parameter] = {}
    own = [Stage(task, parts[chunk * stages + rank], TensorGroup(), owned) for chunk in range(chunks)]
    for (owner, members), copy in [(tie, owned.get(tie[0])) for tie in ties(task, partition, stages)]:
        assert (rank in members) == (copy is not None), owner
    first = {block.name: block.make(TensorGroup()) for block in task.blocks}
    with torch.no_grad():  # copies begin as their owners
        for owner, parameter in owned.items():
            parameter.copy_(first[owner.removesuffix(".weight")].weight)
    later = WeightGradients(add)
    for stage in own:
        stage.defer_weight_grads(later, [parameter for each in own for parameter in each.shared])
    peers = (
        channels(Layout.grid(1, 1, stages), Place(rank, 0, rank, rank, 0, 0), chunks, groups[stages])
        if stages > 1
        else {}
    )
    own_chunks = [Chunk(one, message(one.part.enters), message(() if one.last else one.part.leaves)) for one in own]
    executor = Executor(
        lambda: own_chunks,
        peers,
        later,
        Recorder(None),
        loss,
        Pace(CPU, 30.0),
    )
    found = executor.run(lists[rank], dict(enumerate(micros)), 0.5)

    whole_owned: dict[str, nn.Parameter] = {}
    (whole,) = cut(task, [sum(partition)])
    model = Stage(task, whole, TensorGroup(), whole_owned)
    expected = sum(loss(model(micro.inputs), micro) for micro in micros) * 0.5
    expected.backward()
    if own[-1].last:
        torch.testing.assert_close(found, expected.detach())
    for owner in sorted(task.tied.values() | whole_owned.keys()):
        members = next((members for name, members in ties(task, partition, stages) if name == owner), [rank])
        total = sum_over(members, rank, owned.get(owner))
        if owner in owned:
            wanted = whole_owned[owner].grad
            torch.testing.assert_close(total, torch.zeros(WIDTH, WIDTH).double() if wanted is None else wanted)


def add(weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
    weight.grad = left @ right if weight.grad is None else weight.grad + left @ right


def sum_over(members: list[int], rank: int, parameter: nn.Parameter | None) -> Tensor | None:
    """The sum of a shared parameter's gradients, sent around its stages."""
    if parameter is None or rank not in members:
        return None
    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    others = [torch.empty_like(own) for _ in members if _ != rank]
    sends = [dist.isend(own.contiguous(), member) for member in members if member != rank]
    for other, member in zip(others, [member for member in members if member != rank], strict=True):
        dist.recv(other, member)
    for send in sends:
        send.wait()
    return own + sum(others)


def all_of_them(folder: Path, rank: int) -> None:
    """All tasks, one after another, in one process; what goes wrong is left in a file."""
    seed = -1
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        timeout = timedelta(seconds=30)
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
        groups = {stages: Groups.make(Layout.grid(1, 1, stages), 2, (), timeout) for stages in range(2, RANKS + 1)}
        for seed in range(TASKS):
            run_one(seed, rank, groups)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (reported in full, and the exit code says it)
        (folder / f"rank-{rank}.txt").write_text(f"task {seed}: {traceback.format_exc()}")
        raise SystemExit(1) from None


def test_random_graphs_cut_anywhere_have_the_gradients_of_the_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=all_of_them, args=(tmp_path, rank)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(300.0)
        found = "\n".join(path.read_text() for path in sorted(tmp_path.glob("rank-*.txt")))
        assert [process.exitcode for process in ranks] == [0] * RANKS, found
    finally:
        for process in ranks:
            process.kill()
            process.join()
