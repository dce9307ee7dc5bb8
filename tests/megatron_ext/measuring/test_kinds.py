"""What is measured of a user's module: every kind of block, and the bytes of its sequence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from megatron_ext.blocks import plan_of
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring import kinds
from megatron_ext.measuring.kinds import Kinds
from megatron_ext.measuring.passes import LAYERS, SavedTensors
from megatron_ext.measuring.sequence import LOSS, Ledger, crossing, wires_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import Tensors
from tests.support.megatron_ext.users_files import MODELS, users_file

CPU = torch.device("cpu")


def planned(folder: Path, name: str, micro_batch_size: int = 2, code: str = "", capture: bool | None = None) -> Plan:
    file = users_file(folder, name, code)
    captured = MODELS[name][1] if capture is None else capture
    return plan_of(f"{file}:{name}", captured, micro_batch_size)


@pytest.mark.parametrize("name", MODELS)
def test_what_crosses_a_cut_is_what_a_stage_hands_on(tmp_path: Path, name: str) -> None:
    """Skips that are handed on, too; behind all blocks an empty stage would compute the loss."""
    plan = planned(tmp_path, name)
    task = task_of(plan)
    sizes = {
        wire: torch.empty([int(size) for size in one.dims], dtype=one.dtype).nbytes for wire, one in task.wires.items()
    }
    count = len(task.blocks)
    leaves = [cut(task, [before, count - before])[0].leaves for before in range(count + 1)]
    expected = [sum(sizes[wire] for wire in of) for of in leaves]
    assert crossing(task, sizes) == expected
    assert Kinds(plan, 2, CPU).sequence()["crossing"] == expected


@pytest.mark.parametrize("name", MODELS)
def test_wires_lead_from_their_givers_to_their_takers(tmp_path: Path, name: str) -> None:
    """By the numbers of blocks, all of which are counted; the loss lies behind them."""
    plan = planned(tmp_path, name)
    task, timed = task_of(plan), Kinds(plan, 2, CPU)
    found, module = wires_of(task), timed.module()
    assert module["wires"] == [*found.values()]
    assert len(timed.sequence()["wires"]) == len(found)
    for wire, (giver, *takers) in found.items():
        assert wire in task.blocks[giver].gives
        expected = {number for number, block in enumerate(task.blocks) if wire in block.takes}
        assert {*takers} == expected | ({len(task.blocks)} if wire in task.outputs else set())
        assert len({*takers}) == len(takers)
    used = {wire for block in task.blocks for wire in block.takes} | {*task.outputs}
    assert {*found} == used & {wire for block in task.blocks for wire in block.gives}


def of_family(folder: Path, name: str) -> Plan:
    sizes = ["parallel=single", "parallel.global_batch_size=2", "parallel.micro_batch_size=2"]
    run = RunDir(folder)
    run.write_json(run.plan, make_plan(compose([f"model={name}", *sizes]), "test/run").as_json())
    return Plan.read(run.plan)


@pytest.mark.parametrize("name", ["tiny", "llama-tiny", "bert-tiny", "t5-tiny"])
def test_a_formula_knows_which_wires_lead_where(tmp_path: Path, name: str) -> None:
    plan = of_family(tmp_path, name)
    task = task_of(plan)
    sizes = {
        wire: math.prod(size if isinstance(size, int) else task.sizes(1)[size] for size in one.dims)
        for wire, one in task.wires.items()
    }
    expected = [(ends, sizes[wire]) for wire, ends in wires_of(task).items()]
    assert sorted(([one.giver, *one.takers], one.numbers) for one in plan.model.traits.wires(plan.model)) == sorted(
        expected
    )


def test_blocks_that_no_partition_counts_lie_where_a_task_says(tmp_path: Path) -> None:
    """Of a T5: on the first stage, on the last one, or with the block that follows."""
    plan = of_family(tmp_path, "t5-tiny")
    task, timed = task_of(plan), Kinds(plan, 2, CPU)
    named = task.sizes(2)
    sizes = {
        wire: 4 * math.prod(size if isinstance(size, int) else named[size] for size in each.dims)
        for wire, each in task.wires.items()
    }
    expected = [sum(sizes[wire] for wire in cut(task, [before, 4 - before])[0].leaves) for before in range(5)]
    assert timed.sequence()["crossing"] == expected
    blocks = timed.module()["blocks"]
    assert isinstance(blocks, list)
    assert [block.get("held") for block in blocks] == ["first", None, None, "next", "next", None, None, "last"]


def test_what_the_loss_keeps_of_logits_is_kept_by_the_head(tmp_path: Path) -> None:
    ledger, logits = Ledger(task_of(planned(tmp_path, "convnet"))), torch.ones(6)
    address = logits.untyped_storage().data_ptr()
    ledger.note(1, {}, {"logits": logits}, {})
    assert ledger.kept[1] == 0
    for _ in range(2):
        ledger.note_loss({address: 24, address + 64: 8})
    assert ledger.kept[1] == 24


@pytest.mark.parametrize("name", ["convnet", "UNet", "Seq2Seq", "SharedEmbedding", "TwoHeads"])
def test_blocks_keep_together_what_the_whole_module_keeps(tmp_path: Path, name: str) -> None:
    """Every storage once, though the next block takes what this one gives; weights are none of it."""
    plan = planned(tmp_path, name)
    task = task_of(plan)
    whole = Stage(task, cut(task, [len(task.blocks)])[0], TensorGroup())
    micro = task.example(2, torch.Generator())
    with SavedTensors() as kept:
        whole(dict(micro.inputs))
    weights = {one.untyped_storage().data_ptr() for one in (*whole.parameters(), *whole.buffers())}
    inputs = {one.untyped_storage().data_ptr() for one in micro.inputs.values()}
    expected = sum(size for address, size in kept.sizes.items() if address not in weights | inputs)
    taken = sum(size for address, size in kept.sizes.items() if address in inputs)
    left = {one.untyped_storage().data_ptr(): one.nbytes for one in whole(dict(micro.inputs)).values()}
    found = sum(Kinds(plan, 2, CPU).sequence()["kept"])
    assert expected <= found <= expected + len(task.blocks) * taken + sum(left.values())
    assert expected > 0


def test_every_kind_is_timed_there_and_back_and_the_loss_by_itself(tmp_path: Path) -> None:
    timed = Kinds(planned(tmp_path, "UNet"), 2, CPU)
    timed.forward_and_backward(3)
    names = [*dict.fromkeys(block.kind for block in task_of(planned(tmp_path, "UNet")).blocks), LOSS]
    ways = [f"{name}.forward" for name in names] + [f"{name}.backward" for name in reversed(names)]
    assert list(timed.laps) == ways
    assert {len(laps) for laps in timed.laps.values()} == {3}
    assert all(one.value > 0 for one in timed.medians().values())
    assert timed.passes() == 3
    assert timed.optimizer_ns(0.05).value > 0


def test_a_pass_goes_through_a_few_blocks_of_a_kind_in_a_row_and_then_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stage's does: by itself a small block would find all that it works with in a cache, or no memory."""
    code = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(3, 8), *[nn.Linear(8, 8) for _ in range(6)], nn.Tanh(), nn.Tanh())


def loss(outputs, targets):
    return (outputs - targets).square().mean()


def data(split, seed):
    import torch

    return [(torch.ones(3), torch.zeros(8)) for _ in range(8)]
"""
    measured = Kinds(planned(tmp_path, "net", code=code, capture=False), 2, CPU)
    way, kind_of, through = [], {}, Kinds._through

    def noted(self: Kinds, stage: Stage | None, taken: Tensors) -> Tensors:
        left = through(self, stage, taken)
        kind_of[id(left)] = LOSS if stage is None else stage.part.blocks[0].kind
        way.append(kind_of[id(left)])
        return left

    def noted_back(left: Tensors, gradients: Tensors) -> None:
        way.append(f"back {kind_of[id(left)]}")
        backward(left, gradients)

    monkeypatch.setattr(Kinds, "_through", noted)
    monkeypatch.setattr(kinds, "backward", noted_back)
    measured.forward_and_backward(1)
    there = ["Linear", *["Linear-2"] * LAYERS, "Tanh", "Tanh", LOSS]
    assert way == [*there, *(f"back {kind}" for kind in reversed(there))]


def test_a_block_that_works_longer_takes_longer_and_is_a_kind_of_its_own(tmp_path: Path) -> None:
    """Nothing but a number of the user's own tells them apart; and the first one has no gradient to hand back."""
    code = """
import torch
from torch import nn


class Turns(nn.Module):
    def __init__(self, turns):
        super().__init__()
        self.turns = turns
        self.inner = nn.Linear(128, 128)

    def forward(self, x):
        for _ in range(self.turns):
            x = torch.tanh(self.inner(x))
        return x


def net():
    return nn.Sequential(Turns(1), Turns(1), Turns(1), Turns(9), Turns(1))


def loss(outputs, targets):
    return (outputs - targets).square().mean()


def data(split, seed):
    return [(torch.ones(64, 128), torch.zeros(64, 128)) for _ in range(8)]
"""
    plan = planned(tmp_path, "net", code=code, capture=False)
    assert [block.kind for block in task_of(plan).blocks] == ["Turns", "Turns-2", "Turns-2", "Turns-3", "Turns-2"]
    timed = Kinds(plan, 2, CPU)
    timed.forward_and_backward(15)
    found = {name: min(lap.ms for lap in laps) for name, laps in timed.laps.items()}
    for way in ("forward", "backward"):
        assert 4 < found[f"Turns-3.{way}"] / found[f"Turns-2.{way}"] < 20


def test_what_is_described_are_the_users_parameters(tmp_path: Path) -> None:
    """A frozen layer and buffers are bytes alone; a head that is tied to the embedding is counted as tied."""
    described = Kinds(planned(tmp_path, "SharedEmbedding"), 2, CPU).module()
    assert (described["tied_parameters"], described["tied_blocks"]) == (17 * 16 + 16 * 16 + 16, 2)
    blocks = Kinds(planned(tmp_path, "TwoHeads"), 2, CPU).module()["blocks"]
    assert isinstance(blocks, list)
    frozen = next(block for block in blocks if block["name"] == "frozen")
    assert (frozen["parameters"], frozen["fixed_bytes"]) == (0, 4 * (16 * 16 + 16))
    norm = Kinds(planned(tmp_path, "convnet"), 2, CPU).module()["blocks"]
    assert isinstance(norm, list)
    assert (norm[1]["parameters"], norm[1]["fixed_bytes"]) == (16, 4 * 16 + 8)
